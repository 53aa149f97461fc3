"""Hit rate, false hits and what they cost at every threshold, out of the reuse map's rows.

python experiments/gates/thresholds.py experiments/reuse_map/results/map/rows.jsonl

A hit is a pair that is accepted; it is false where the first answer token is off by more than
``--budget`` nats. The cost is over all pairs, with 0 where one is refused. Printed last: the lowest
threshold whose false hits are, with 97.5 % confidence, at most ``--target`` of all pairs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.gates.false_hits import wilson  # noqa: E402
from kvsem.intervals import bootstrap  # noqa: E402

THRESHOLDS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98)
GATES = {"off": "threshold alone", "on": "and lexical"}
Row = dict[str, Any]


def at(rows: Sequence[Row], threshold: float, budget: float) -> Row:
    """Of pairs that were measured with a gate that accepts any score."""
    hit = np.array([r["similarity"] >= threshold and r["hit_rate"] > 0 for r in rows])
    cost = np.where(hit, [r["kl_first_nats"] for r in rows], 0.0)
    reused = np.where(hit, [r["hit_rate"] for r in rows], 0.0)
    false = int((cost > budget).sum())
    low, high = bootstrap(np.stack([cost, reused], axis=1), [r["group"] for r in rows])
    ends = {"hits": int(hit.sum()), "false hits": false}
    found: Row = {"threshold": threshold, "n": len(rows), **ends}
    for name, count in ends.items():
        bounds = wilson(count, len(rows))
        found[f"{name} rate"] = {"mean": count / len(rows), "low": bounds[0], "high": bounds[1]}
    for i, (name, values) in enumerate({"kl_first_nats": cost, "hit_rate": reused}.items()):
        found[name] = {"mean": float(values.mean()), "low": float(low[i]), "high": float(high[i])}
    return found


def lowest(found: Sequence[Row], target: float) -> float | None:
    """Precision first: from this threshold on no false-hit rate may be above ``target``."""
    ok = None
    for row in sorted(found, key=lambda row: -row["threshold"]):
        if row["false hits rate"]["high"] > target:
            break
        ok = row["threshold"]
    return ok


def table(found: Sequence[Row]) -> str:
    keys = ("hits rate", "false hits rate", "hit_rate", "kl_first_nats")
    lines = ["| threshold | hits | false hits | tokens reused | KL first |", "|---" * 5 + "|"]
    for row in found:
        cells = ("{mean:.3g} ({low:.3g} … {high:.3g})".format(**row[key]) for key in keys)
        lines.append(f"| {row['threshold']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="rows.jsonl of experiments/reuse_map/map.py")
    parser.add_argument("--ratio", type=float, default=0.0, help="share recomputed (default 0)")
    parser.add_argument("--budget", type=float, default=0.02, help="nats (default 0.02)")
    parser.add_argument("--target", type=float, default=0.05, help="of false hits (default 0.05)")
    given = parser.parse_args()
    read = [json.loads(line) for line in given.rows.read_text(encoding="utf-8").splitlines()]
    for gate, name in GATES.items():
        rows = [r for r in read if r["gate"] == gate and r["ratio"] == given.ratio]
        if not rows:
            parser.error(f"{given.rows} has no row with ratio {given.ratio:g}")
        found = [at(rows, threshold, given.budget) for threshold in THRESHOLDS]
        best = lowest(found, given.target)
        print(f"{name}, {given.ratio:.0%} recomputed, n = {len(rows)}\n\n{table(found)}\n")
        print(f"lowest threshold with false hits surely at most {given.target:.0%}: {best}\n")


if __name__ == "__main__":
    main()
