"""Donors and targets that differ in known ways, as `workload=jsonl` reads them.

python experiments/reuse_map/prepare.py KIND FOLDER OUT.jsonl [--limit 20] [--skip 0]

FOLDER holds the public files. prompts: two variants of one product's system prompt, one feature
switched, a stretch of 6,000 characters of each from 2,000 ahead of where they part; edited: XQuAD
articles, one sentence in ten replaced by one of another article; asv, ylt: twelve Bible verses, the
World English Bible behind the American Standard Version or Young's Literal Translation; reviews:
IMDb reviews that were rewritten to the opposite verdict.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.public import Record, read, sentences

AHEAD, WIDTH = 2_000, 6_000  # characters
EVERY = 10  # sentences
STARTS = (0, 20, 30, 10, 5, 15, 25, 35)  # of reviews


def prompts(folder: Path) -> Iterator[Record]:
    """Neighbours of a family whose words agree in nine of ten, one pair a family."""
    families = defaultdict(list)
    for variant in read(folder / "system_prompts" / "agent_prompt_variants.jsonl.gz"):
        if variant["axis"] == "feature":
            families[variant["product"], variant["family"]].append(variant)
    for family in families.values():
        for donor, target in itertools.permutations(family, 2):
            pairs = enumerate(zip(donor["text"], target["text"], strict=False))
            start = max(0, next((i for i, (a, b) in pairs if a != b), 0) - AHEAD)
            a, b = (v["text"][start : start + WIDTH] for v in (donor, target))
            agree = SequenceMatcher(None, a.split(), b.split(), autojunk=False)
            same = sum(block.size for block in agree.get_matching_blocks()) / len(b.split())
            if a != b and same >= 0.9:
                yield {
                    "id": f"{donor['id']}-{target['id']}",
                    "donor": a,
                    "target": b,
                    "question": "Which rule of these instructions matters most?",
                }
                break


def edited(folder: Path) -> Iterator[Record]:
    articles = defaultdict(list)
    for paragraph in read(folder / "rag" / "xquad_en_zh_es.jsonl.gz"):
        articles[paragraph["article"]].append(paragraph)
    names = sorted(articles)
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        strange = iter(sentences(" ".join(p["context"]["en"] for p in articles[other])))
        count, changed = itertools.count(1), []
        for paragraph in articles[name]:
            kept = [
                next(strange) if next(count) % EVERY == EVERY // 2 else sentence
                for sentence in sentences(paragraph["context"]["en"])
            ]
            changed.append(" ".join(kept))
        asked = articles[name][-1]["qas"][0]
        yield {
            "id": name,
            "donor": "\n".join(p["context"]["en"] for p in articles[name]),
            "target": "\n".join(changed),
            "question": asked["question"]["en"],
            "answers": [asked["answer"]["en"]],
        }


def translated(folder: Path, donor: str) -> Iterator[Record]:
    for passage in read(folder / "paraphrase" / "parallel_passages_pd.jsonl.gz"):
        yield {
            "id": passage["id"],
            "donor": passage["versions"][donor],
            "target": passage["versions"]["WEB"],
            "question": "Who speaks in this passage, and about what?",
        }


def reviews(folder: Path) -> Iterator[Record]:
    """Every fortieth from each of `STARTS`, so that any few are spread over the file."""
    found = list(read(folder / "paraphrase" / "counterfactual_imdb.jsonl.gz"))
    for review in itertools.chain.from_iterable(found[start::40] for start in STARTS):
        yield {
            "id": str(review["id"]),
            "donor": review["original"],
            "target": review["revised"],
            "question": "Is this review positive or negative?",
            "answers": [str(review["label_revised"])],
        }


def records(name: str, folder: Path) -> Iterator[Record]:
    if name == "prompts":
        return prompts(folder)
    if name == "reviews":
        return reviews(folder)
    return edited(folder) if name == "edited" else translated(folder, name.upper())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("name", choices=["prompts", "edited", "asv", "ylt", "reviews"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first ones")
    given = parser.parse_args()
    end = given.skip + given.limit
    found = list(itertools.islice(records(given.name, given.folder), given.skip, end))
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in found)
    given.out.write_text("".join(lines), encoding="utf-8")
    print(f"{given.out}: {len(found)} records")


if __name__ == "__main__":
    main()
