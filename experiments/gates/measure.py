"""Swaps that bear the answer, donor to target, under several reaches of the lexical gate.

python experiments/gates/measure.py [--each 4] [--reach off 0 2 clause] [--out FOLDER]
python experiments/gates/measure.py --requests runs/map-reviews.jsonl --reach off 2 default

``off`` is the threshold alone, ``default`` the gate as it is by default, the others its reach and
no further. Each swap is a tenant of its own: nothing else can be found.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvsem.contexts.behind_system import BehindSystem  # noqa: E402
from kvsem.embedders.minilm import MinilmEmbedder  # noqa: E402
from kvsem.engine import Engine  # noqa: E402
from kvsem.gates.all_of import AllOf  # noqa: E402
from kvsem.gates.base import Gate  # noqa: E402
from kvsem.gates.lexical import LexicalGate  # noqa: E402
from kvsem.gates.threshold import ThresholdGate  # noqa: E402
from kvsem.harness import Arm, Harness  # noqa: E402
from kvsem.intervals import bootstrap  # noqa: E402
from kvsem.lm import LM, load  # noqa: E402
from kvsem.metrics.divergence import DivergenceMetric  # noqa: E402
from kvsem.types import Request  # noqa: E402

SWAPS = ROOT / "tests/golden/swaps.jsonl"
KEYS = (
    "quality/top1_agreement",
    "reuse/hit_rate",
    "quality/kl_first_nats",
    "quality/kl_nats",
    "cost/flop_ratio",
)
Record = dict[str, Any]


def chosen(path: Path, each: int, skip: int = 0) -> list[Record]:
    """``each`` records a language and kind that have a question, spread over the passages."""
    cells = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["question"]:
            cells[record["lang"], record["kind"]].append(record)
    picked: list[Record] = []
    for j in range(each):  # one of every cell first, so that what is cut short is no cell
        for i, records in enumerate(cells.values()):
            step = max(1, len(records) // each)
            picked.append(records[(i + skip + j * step) % len(records)])
    return list({record["id"]: record for record in picked}.values())


def asked(path: Path) -> list[Record]:
    """Donor/target records of any file that ``workload=jsonl`` reads."""
    about = {"kind": path.stem, "lang": "", "system": None}
    lines = path.read_text(encoding="utf-8").splitlines()
    return [about | {"group": r["id"]} | r for r in map(json.loads, lines)]


def gate(reach: str) -> Gate:
    near = ThresholdGate(0.75)
    if reach == "off":
        return near
    if reach == "default":
        return AllOf([near, LexicalGate()])
    return AllOf([near, LexicalGate(int(reach) if reach.isdigit() else reach, wide_from=None)])


def rows(lm: LM, records: Sequence[Record], reaches: Sequence[str]) -> Iterator[Record]:
    embedder = MinilmEmbedder()
    rules = {
        name: instantiate(OmegaConf.load(ROOT / f"conf/recompute/{name}.yaml"))
        for name in ("none", "krige")
    }
    for record in records:
        names = ("id", "donor", "target", "question")
        request = Request.donor_target(*(record[n] for n in names), system=record["system"])
        request = replace(request, group=record["group"])
        arms: list[Arm] = []
        for reach in reaches:
            for name, rule in rules.items():
                engine = Engine(
                    lm,
                    recompute=rule,
                    gate=gate(reach),
                    embedder=embedder,
                    context=BehindSystem(),
                    admit="none",
                )
                if arms:
                    engine.share(arms[0].engine)
                else:
                    engine.ingest([request])
                arms.append(Arm(f"{name}/{reach}", engine))
        exact = Engine(lm, reuse=(), admit="none")
        for row in next(iter(Harness(lm, exact, arms, [DivergenceMetric()]).run([request]))):
            kept = {key: row.get(key) for key in KEYS}
            about = {"kind": record["kind"], "lang": record["lang"], "group": record["group"]}
            yield {"id": record["id"], "arm": row["arm"], **about, **kept}


def summary(found: Sequence[Record]) -> Record:
    """Mean and 95 % interval of each number by arm, clustered by passage; agreement by kind."""
    arms: Record = {}
    for arm in dict.fromkeys(row["arm"] for row in found):
        own = [row for row in found if row["arm"] == arm]
        values = np.array([[row[key] for key in KEYS] for row in own], dtype=np.float64)
        low, high = bootstrap(values, [row["group"] for row in own])
        arms[arm] = {
            key: {"mean": float(values[:, i].mean()), "low": float(low[i]), "high": float(high[i])}
            for i, key in enumerate(KEYS)
        }
        for by in ("kind", "lang"):
            arms[arm][f"top1 by {by}"] = {
                name: float(np.mean([row[KEYS[0]] for row in own if row[by] == name]))
                for name in sorted({row[by] for row in own})
            }
    n = Counter((row["lang"], row["kind"]) for row in found if row["arm"] == "exact")
    return {"n": sum(n.values()), "cells": {" ".join(k): v for k, v in n.items()}, "arms": arms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=4, help="swaps a language and kind")
    parser.add_argument("--skip", type=int, default=0, help="start with other swaps")
    parser.add_argument("--requests", type=Path, help="donor/target records instead of swaps")
    parser.add_argument("--reach", nargs="+", default=["off", "0", "2", "clause", "sentence"])
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gates")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lm = load("smollm2", packaged=True, device="cpu")
    records = asked(given.requests) if given.requests else chosen(SWAPS, given.each, given.skip)
    given.out.mkdir(parents=True, exist_ok=True)
    found: list[Record] = []
    with (given.out / "rows.jsonl").open("w", encoding="utf-8") as file:
        for row in rows(lm, records, given.reach):
            file.write(json.dumps(row) + "\n")
            file.flush()
            found.append(row)
    text = json.dumps(summary(found), indent=1)
    (given.out / "summary.json").write_text(text + "\n", encoding="utf-8")
    for arm, keys in summary(found)["arms"].items():
        print(arm, *(f"{key.split('/')[1]} {keys[key]['mean']:.4f}" for key in KEYS))


if __name__ == "__main__":
    main()
