"""Documents and what became of them, as `workload=jsonl` reads them.

python experiments/chunkers/prepare.py {rag,dialogue,code,documents,prompts} FOLDER OUT.jsonl

FOLDER holds the public files. The donor is a document of at most 4,000 characters, the target the
same with its parts in another order and one of them changed. rag: five passages of HotpotQA, one
replaced; dialogue: the turns of a QMSum meeting, a window moved on by two turns, one turn replaced;
code: a class of ClassEval and functions of HumanEval, one function replaced; documents: paragraphs
of XQuAD, one sentence in ten replaced; prompts: sections of agents' system prompts, one line less.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.public import Record, read, sentences

LENGTH = 4_000  # characters of a document
EVERY = 10  # sentences, of which one is replaced
SYSTEM = "You answer from the document below, and briefly."


def within(parts: Sequence[str], length: int = LENGTH) -> list[str]:
    """The first parts that fit."""
    kept: list[str] = []
    for part in parts:
        if sum(map(len, kept)) + len(part) > length:
            break
        kept.append(part)
    return kept


def reordered(parts: Sequence[str]) -> list[str]:
    """The second half ahead of the first: no part keeps its place, most keep their neighbour."""
    half = len(parts) // 2
    return [*parts[half:], *parts[:half]]


def record(id: str, donor: str, target: str, question: str, answers: Sequence[str] = ()) -> Record:
    fields: Record = {"id": id, "system": SYSTEM, "donor": donor, "target": target}
    return fields | {"question": question, "answers": list(answers)}


def rag(folder: Path) -> Iterator[Record]:
    """The last passage is replaced by one of another question."""
    found = list(read(folder / "rag" / "hotpotqa_100.jsonl.gz"))
    for asked, other in pairwise(found):
        first, new = (
            [f"{p['title']}\n{p['text']}" for p in each["passages"]] for each in (asked, other)
        )
        parts = within(first)[:5]
        changed = reordered([*parts[:-1], new[0]])
        texts = "\n\n".join(parts), "\n\n".join(changed)
        yield record(str(asked["id"]), *texts, asked["question"], asked["answers"])


def dialogue(folder: Path) -> Iterator[Record]:
    """Two turns are gone at the front, one in the middle says something else."""
    found = list(read(folder / "rag" / "qmsum_meetings.jsonl.gz"))
    for meeting, other in pairwise(found):
        turns = [f"{t['speaker']}: {' '.join(t['text'].split())}" for t in meeting["transcript"]]
        parts = within([turn for turn in turns if len(turn) < LENGTH / 4])
        spoken = next(t["text"] for t in other["transcript"] if 100 < len(t["text"]) < LENGTH / 4)
        middle = len(parts) // 2
        said = f"{parts[middle].partition(':')[0]}: {' '.join(spoken.split())}"
        changed = [*parts[2:middle], said, *parts[middle + 1 :]]
        question = meeting["queries"][0]["query"]
        yield record(str(meeting["id"]), "\n".join(parts), "\n".join(changed), question)


def code(folder: Path) -> Iterator[Record]:
    """A class behind functions, then ahead of them; one of the functions is another."""
    functions = [f["prompt"] + f["solution"] for f in read(folder / "code" / "humaneval.jsonl.gz")]
    functions = [text.strip() for text in functions if len(text) < 900]
    classes = list(read(folder / "code" / "classeval.jsonl.gz"))
    for i, each in enumerate(c for c in classes if 600 < len(c["solution"]) < 2_000):
        at = 4 * i % (len(functions) - 4)
        own, new = functions[at : at + 3], functions[at + 3]
        parts = [*own, each["solution"].strip()]
        changed = reordered([own[0], new, *parts[2:]])
        question = f"What does the class {each['class_name']} do?"
        texts = "\n\n\n".join(parts), "\n\n\n".join(changed)
        yield record(str(each["id"]), *texts, question)


def documents(folder: Path) -> Iterator[Record]:
    """Paragraphs in another order, one sentence in ten from another article."""
    articles = defaultdict(list)
    for paragraph in read(folder / "rag" / "xquad_en_zh_es.jsonl.gz"):
        articles[paragraph["article"]].append(paragraph)
    names = sorted(articles)
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        parts = within([p["context"]["en"] for p in articles[name]])
        strange = iter(sentences(" ".join(p["context"]["en"] for p in articles[other])))
        count, changed = 0, []
        for part in parts:
            kept = []
            for sentence in sentences(part):
                kept.append(next(strange) if count % EVERY == EVERY // 2 else sentence)
                count += 1
            changed.append(" ".join(kept))
        asked = articles[name][0]["qas"][0]
        texts = "\n\n".join(parts), "\n\n".join(reordered(changed))
        yield record(name, *texts, asked["question"]["en"], [asked["answer"]["en"]])


def prompts(folder: Path) -> Iterator[Record]:
    """One prompt of each family: its sections in another order, one line less in the longest."""
    families: dict[tuple[str, str], str] = {}
    for variant in read(folder / "system_prompts" / "agent_prompt_variants.jsonl.gz"):
        families.setdefault((variant["product"], variant["family"]), variant["text"])
    for (product, family), text in families.items():
        sections = re.split(r"\n+(?=#{1,3} )", text)
        parts = within([s.strip() for s in sections if 80 < len(s) < LENGTH / 2])
        if len(parts) < 3:
            continue
        longest = max(range(len(parts)), key=lambda i: len(parts[i]))
        lines = parts[longest].splitlines()
        shorter = "\n".join(lines[: len(lines) // 2] + lines[len(lines) // 2 + 1 :])
        changed = reordered([*parts[:longest], shorter, *parts[longest + 1 :]])
        texts = "\n\n".join(parts), "\n\n".join(changed)
        yield record(f"{product}/{family}", *texts, "Which rule of these matters most?")


KINDS = {
    "rag": rag,
    "dialogue": dialogue,
    "code": code,
    "documents": documents,
    "prompts": prompts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=KINDS)
    parser.add_argument("folder", type=Path, help="the public files")
    parser.add_argument("out", type=Path, help="the .jsonl to write")
    parser.add_argument("--limit", type=int, default=12, help="requests (default 12)")
    given = parser.parse_args()
    rows = list(islice(KINDS[given.name](given.folder), given.limit))
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(rows)} requests in {given.out}")


if __name__ == "__main__":
    main()
