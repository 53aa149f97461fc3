"""The requests of this study as `workload=jsonl` reads them.

python experiments/rules/prepare.py {musique,hotpotqa,dialogue,long} FOLDER OUT.jsonl [--limit 20]

FOLDER holds the public files. Texts are cut so that the study fits a small machine: musique and
hotpotqa five passages of 90 words; dialogue half meetings (six stretches of 90 words, a query about
them) and half chats (the turns before the sixth, 60 words each); long eight passages of 140 words.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.musique.prepare import convert
from experiments.public import Record, read


def cut(text: str, words: int) -> str:
    return " ".join(text.split()[:words])


def meetings(folder: Path) -> Iterator[Record]:
    """A query whose answer stands within the stretch that it names, which is cut into six."""
    for meeting in read(folder / "rag" / "qmsum_meetings.jsonl.gz"):
        query = next((q for q in meeting["queries"] if q.get("turns")), None)
        if query is None:
            continue
        first = int(query["turns"][0][0])
        said = (f"{t['speaker']}: {t['text']}" for t in meeting["transcript"][first:])
        words = " ".join(said).split()[: 6 * 90]
        yield {
            "id": meeting["id"],
            "system": "You are given parts of a meeting. Answer briefly.",
            "passages": [" ".join(words[i : i + 90]) for i in range(0, len(words), 90)],
            "question": query["query"],
            "answers": [cut(query["answer"], 24)],
        }


def chats(folder: Path) -> Iterator[Record]:
    for chat in read(folder / "dialogue" / "mt_eval.jsonl.gz"):
        said = list(chain.from_iterable((t["user"], t["bot"]) for t in chat["turns"]))
        texts = [cut(text, 60) for text in said][:7]
        if len(texts) < 5:
            continue
        texts = texts[: len(texts) - 1 + len(texts) % 2]  # the last one is the user's
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        yield {"id": chat["id"], "system": "You are a helpful assistant.", "messages": messages}


def records(name: str, folder: Path, limit: int) -> list[Record]:
    if name == "musique":
        found = read(folder / "rag" / "musique_100.jsonl.gz")
        return [convert(r, 5, 90) for r in islice(found, limit)]
    if name == "hotpotqa":
        found = read(folder / "rag" / "hotpotqa_100.jsonl.gz")
        return [convert(r, 5, 90) for r in islice(found, limit)]
    if name == "long":
        found = read(folder / "rag" / "musique_cacheblend.jsonl.gz")
        return [convert(r, 8, 140) for r in islice(found, limit)]
    half = limit // 2
    return [*islice(meetings(folder), limit - half), *islice(chats(folder), half)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("musique", "hotpotqa", "dialogue", "long"))
    parser.add_argument("folder", type=Path, help="the public files")
    parser.add_argument("out", type=Path, help="the .jsonl to write")
    parser.add_argument("--limit", type=int, default=20, help="requests (default 20)")
    given = parser.parse_args()
    rows = records(given.name, given.folder, given.limit)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    given.out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(rows)} requests in {given.out}")


if __name__ == "__main__":
    main()
