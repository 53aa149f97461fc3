"""MuSiQue questions as `workload=jsonl` reads them: passages cut to 90 words, 5 a prompt.

python experiments/musique/prepare.py MUSIQUE.jsonl.gz OUT.jsonl [--limit 32]

Each question keeps its gold passages, where the file says which they are, and the first others,
in the file's order.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.public import Record, read

SYSTEM = "Answer the question from the passages. Reply with a short phrase."


def passages(record: Record, n: int, words: int) -> list[str]:
    """``n`` passages, the gold ones among them, in the file's order, cut to ``words``."""
    given = record["passages"]
    kept = sorted(sorted(range(len(given)), key=lambda i: not given[i].get("gold"))[:n])
    texts = (given[i] for i in kept)
    return [" ".join(f"{p['title']}: {p['text']}".lstrip(": ").split()[:words]) for p in texts]


def convert(record: Record, n: int, words: int) -> Record:
    return {
        "id": record["id"],
        "system": SYSTEM,
        "passages": passages(record, n, words),
        "question": record["question"],
        "answers": record["answers"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="MuSiQue as .jsonl or .jsonl.gz")
    parser.add_argument("out", type=Path, help="the .jsonl to write")
    parser.add_argument("--limit", type=int, default=32, help="questions (default 32)")
    parser.add_argument("--passages", type=int, default=5, help="a prompt (default 5)")
    parser.add_argument("--words", type=int, default=90, help="a passage (default 90)")
    given = parser.parse_args()
    records = list(islice(read(given.source), given.limit))
    rows = (
        json.dumps(convert(r, given.passages, given.words), ensure_ascii=False) for r in records
    )
    given.out.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(records)} questions in {given.out}")


if __name__ == "__main__":
    main()
