"""Runs of this study as one small file, tables and a figure.

python experiments/rules/tables.py NAME RUN [RUN ...]

Each RUN is a folder of experiments/run.py on the same requests, one per ratio; the arms of a
second run at a ratio are added to the first. Writes results/NAME.json and results/NAME.svg beside
this file, and prints the tables of the README.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.figure import Figure

from kvsem.plots import styles, svg
from kvsem.results import load_run, write_atomic

HERE = Path(__file__).resolve().parent
KEYS = (
    "quality/kl_first_nats",
    "quality/kl_nats",
    "quality/answer_nll_nats",
    "cost/flop_ratio",
    "cost/ttft_speedup",
    "quality/top1_agreement",
    "quality/f1",
    "reuse/hit_rate",
)
SHOWN = KEYS[:5]
PAIRED = KEYS[:3]
OURS = "krige"


def cells(runs: list[Path]) -> dict[str, Any]:
    """Ratio -> arm -> key -> estimate, and the paired differences of ours and every other arm."""
    found: dict[str, Any] = {}
    for path in runs:
        run = load_run(path)
        at = found.setdefault(f"{run.config['recompute_ratio']:g}", {"arms": {}, "pairs": {}})
        for arm, estimates in run.summary["arms"].items():
            at["arms"].setdefault(arm, {k: estimates[k] for k in KEYS if k in estimates})
        for pair, estimates in run.summary["pairs"].items():
            if OURS in pair.split("-"):
                at["pairs"].setdefault(pair, {k: estimates[k] for k in PAIRED if k in estimates})
        if run.summary.get("pgr"):
            at["pgr"] = run.summary["pgr"]
    return {ratio: found[ratio] for ratio in sorted(found, key=float)}


def shown(estimate: dict[str, Any] | None) -> str:
    if not estimate:
        return "–"
    return f"{estimate['mean']:.3g} ({estimate['low']:.3g} … {estimate['high']:.3g})"


def table(ratio: str, at: dict[str, Any]) -> str:
    n = at["arms"][OURS][KEYS[0]]["n"]
    lines = [
        f"**{float(ratio):.0%} recomputed**, n = {n}",
        "",
        "| arm | KL first | KL 16 | answer NLL | FLOP ratio | TTFT speed-up "
        "| krige − arm, first | krige − arm, 16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, e in sorted(at["arms"].items(), key=lambda item: item[1][KEYS[0]]["mean"]):
        pair = at["pairs"].get(f"{OURS}-{arm}", {})
        row = [f"`{arm}`", *(shown(e.get(key)) for key in SHOWN)]
        row += [shown(pair.get(key)) for key in PAIRED[:2]]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def figure(found: dict[str, Any]) -> Figure:
    """Every rule as a line over the ratios: divergence against multiplications and against TTFT."""
    arms = [a for a in next(iter(found.values()))["arms"] if a not in ("exact", "exact_again")]
    drawn = Figure(figsize=(10, 4.8), layout="constrained")
    axes = drawn.subplots(1, 2, sharey=True)
    look = styles(arms)
    costs = ("cost/flop_ratio", "cost/ttft_speedup")
    for ax, cost in zip(axes, costs, strict=True):
        for arm in arms:
            points = [at["arms"][arm] for at in found.values() if arm in at["arms"]]
            x = [p[cost]["mean"] for p in points]
            x = [1 / v for v in x] if cost == costs[1] else x
            y = [p[KEYS[0]]["mean"] for p in points]
            colour, marker = look[arm]
            width = 2.5 if arm == OURS else 1.2
            ax.plot(x, y, color=colour, marker=marker, linewidth=width, label=arm)
        ax.set_yscale("log")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("KL(exact ‖ arm), first token [nats]")
    axes[0].set_xlabel("multiplications, arm ÷ exact (flop_ratio)")
    axes[1].set_xlabel("time to first token, arm ÷ exact")
    axes[1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    drawn.suptitle(
        f"each line: {', '.join(f'{float(r):.0%}' for r in found)} of the matched tokens"
    )
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the requests: musique, hotpotqa, dialogue, pydoc …")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    given = parser.parse_args()
    found = cells(given.runs)
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    env = load_run(given.runs[0]).env
    kept = {"requests": given.name, "env": env, "cells": found}
    write_atomic(results / f"{given.name}.json", json.dumps(kept, indent=1) + "\n")
    write_atomic(results / f"{given.name}.svg", svg(figure(found), given.name))
    for ratio, at in found.items():
        print(table(ratio, at), end="\n\n")


if __name__ == "__main__":
    main()
