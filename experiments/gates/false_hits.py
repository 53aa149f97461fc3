"""How often pairs are accepted at each threshold, look-alikes and paraphrases, with intervals.

python experiments/gates/false_hits.py ../shared/data [--limit 300] [--out FOLDER]

Three rates: pairs above the threshold; of all pairs those that the lexical gate accepts too; and
those that it accepts with nothing to compute, which are reused as if they said the same. For a
look-alike the last is the false hit; for a paraphrase the second is the hit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.public import Record, read  # noqa: E402
from kvsem.embedders.minilm import MinilmEmbedder  # noqa: E402
from kvsem.gates.base import Candidate, Decision  # noqa: E402
from kvsem.gates.lexical import LexicalGate  # noqa: E402

THRESHOLDS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98)
SWAPS = ROOT / "tests/golden/swaps.jsonl"
Z = 1.959964  # of a 95 % interval


@dataclass(frozen=True)
class Pair:
    group: str
    alike: bool  # whether one may stand in for the other
    target: str
    donor: str


def wilson(hits: int, n: int) -> tuple[float, float]:
    """95 % interval of a rate (Wilson 1927); the whole range of nothing."""
    if not n:
        return 0.0, 1.0
    rate, spread = hits / n, Z * Z / n
    middle = rate + spread / 2
    half = Z * math.sqrt((rate * (1 - rate) + spread / 4) / n)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def records(path: Path, limit: int) -> list[Record]:
    return list(islice(read(path), limit))


def public(data: Path, limit: int) -> Iterator[Pair]:
    for name in ("gptcache_mock", "disfl_qa"):
        for r in records(data / f"paraphrase/{name}.jsonl.gz", limit):
            yield Pair(name, True, r["a"], r["b"])
    for r in records(data / "paraphrase/counterfactual_imdb.jsonl.gz", limit):
        yield Pair("counterfactual_imdb", False, r["revised"], r["original"])
    n_alike = 0
    for r in records(data / "rag/squad_question_paraphrases.jsonl.gz", 10**6):
        for qa in r["qas"]:  # all adversarial ones: they are few
            alike = qa["kind"] == "paraphrase"
            n_alike += alike
            if not alike or n_alike <= limit:
                yield Pair(f"squad {qa['kind']}", alike, qa["paraphrase"], qa["question"])


def swaps() -> Iterator[Pair]:
    for line in SWAPS.read_text(encoding="utf-8").splitlines():
        r = json.loads(line)
        yield Pair(f"swap {r['lang']} {r['kind']}", False, r["target"], r["donor"])


def other_intents(data: Path, limit: int, embedder: MinilmEmbedder) -> Iterator[Pair]:
    """Every bank question with the nearest one of another intent."""
    found = records(data / "paraphrase/banking77.jsonl.gz", 10**6)
    found = found[:: max(1, len(found) // limit)]
    vectors = embedder.embed([r["text"] for r in found])
    intents = np.array([r["intent"] for r in found])
    cosines = np.where(intents[:, None] == intents, -1.0, vectors @ vectors.T)
    for r, nearest in zip(found, cosines.argmax(axis=1), strict=True):
        yield Pair("banking77 other intent", False, r["text"], found[nearest]["text"])


def rates(pairs: Sequence[Pair], embedder: MinilmEmbedder) -> list[dict[str, Any]]:
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.target, pair.donor)))
    vectors = dict(zip(texts, embedder.embed(texts), strict=True))
    scores = np.array([float(vectors[p.target] @ vectors[p.donor]) for p in pairs])
    gate = LexicalGate()
    decided = [gate.accept(p.target, Candidate(p.donor, 1.0)) for p in pairs]
    groups = np.array([p.group for p in pairs])
    names = {p.group: p.alike for p in pairs}
    return [
        row
        for group, alike in names.items()
        for threshold in THRESHOLDS
        for row in [_row(group, alike, threshold, scores, decided, np.flatnonzero(groups == group))]
    ]


def _row(
    group: str,
    alike: bool,
    threshold: float,
    scores: np.ndarray,
    decided: Sequence[Decision],
    own: np.ndarray,
) -> dict[str, Any]:
    above = [int(i) for i in own if round(float(scores[i]), 5) >= threshold]
    accepted = [i for i in above if decided[i].accepted]
    whole = [i for i in accepted if not decided[i].compute]
    row: dict[str, Any] = {"group": group, "alike": alike, "threshold": threshold, "n": len(own)}
    for name, hits in (("above", above), ("accepted", accepted), ("whole", whole)):
        low, high = wilson(len(hits), len(own))
        row[name] = {"rate": len(hits) / len(own), "low": low, "high": high}
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| pairs | n | threshold | above it | and lexical accepts | as if equal |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        cells = (f"{c['rate']:.3f} ({c['low']:.3f} … {c['high']:.3f})" for c in _cells(row))
        kind = "paraphrase" if row["alike"] else "look-alike"
        head = f"| {row['group']} ({kind}) | {row['n']} | {row['threshold']} | "
        lines.append(head + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[dict[str, float]]:
    return [row[name] for name in ("above", "accepted", "whole")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with paraphrase/ and rag/")
    parser.add_argument("--limit", type=int, default=500, help="records a file (default 500)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/false_hits")
    given = parser.parse_args()
    torch.set_num_threads(1)
    embedder = MinilmEmbedder()
    pairs = [*public(given.data, given.limit), *swaps()]
    pairs += other_intents(given.data, given.limit, embedder)
    rows = rates(pairs, embedder)
    given.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (given.out / "false_hits.jsonl").write_text(lines, encoding="utf-8")
    (given.out / "false_hits.md").write_text(table(rows), encoding="utf-8")
    print(table([row for row in rows if row["threshold"] == 0.85]))


if __name__ == "__main__":
    main()
