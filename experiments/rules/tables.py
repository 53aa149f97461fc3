"""Runs of this study as one small file, tables and a figure.

python experiments/rules/tables.py NAME RUN [RUN ...]
python experiments/rules/tables.py

Each RUN is a folder of experiments/run.py on the same requests; the further arms of a second run at
a ratio are added to those of the first. Writes results/NAME.json and results/NAME.svg beside this
file, and prints its tables. Without arguments, prints the overview of all results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml
from matplotlib.figure import Figure

from kvsem.plots import styles, svg
from kvsem.results import RunDir, load_run, write_atomic
from kvsem.summary import Row, summarise

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
OWN = "own"  # the ratio of a run in which each arm has one of its own
OURS = ("krige", "best")  # the rule, and the arm that holds it
RULES = (
    *("none", "random", "epic", "cacheblend", "kvshare", "prophetkv", "sparsex", "fusionrag"),
    *("refine", "krige"),
)


def cells(runs: list[Path], by: str = "recompute_ratio") -> dict[str, Any]:
    """Ratio (or context) -> arm -> key -> estimate, paired differences of ours and every other arm,
    and PGR."""
    rows: dict[str, dict[tuple[str, str], Row]] = defaultdict(dict)
    for path in runs:
        run = RunDir.open(path)
        value = yaml.safe_load((path / "config.yaml").read_text())[by]
        value = described(value) if isinstance(value, dict) else value
        at = rows[OWN if value is None else f"{value:g}" if by == "recompute_ratio" else value]
        known = {arm for _, arm in at}
        new = ((r["request"], r["arm"], r) for r in run.rows() if r["arm"] not in known)
        at |= {(request, arm): row for request, arm, row in new}
    return {ratio: cell(list(rows[ratio].values())) for ratio in sorted(rows)}


def described(context: dict[str, Any]) -> str:
    """Its name, and its numbers above 1: ``in_company n=3``."""
    name = context["_target_"].split(".")[-2]
    more = [f"{k}={v}" for k, v in context.items() if isinstance(v, int) and v > 1]
    return " ".join([name, *more])


def share(ratio: str) -> str:
    if ratio == OWN:
        return "each its own share"
    return f"{float(ratio):.0%}" if ratio[:1].isdigit() else f"`{ratio}`"


def ours(arms: dict[str, Any]) -> str:
    """Our arm, where there is one; what the others are compared with."""
    return next(arm for arm in (*OURS, "none", *arms) if arm in arms)


def cell(rows: list[Row]) -> dict[str, Any]:
    summary = summarise(rows, {}, {}, {})
    kept = {
        arm: {key: estimates[key] for key in KEYS if key in estimates}
        for arm, estimates in summary["arms"].items()
    }
    pairs = {
        pair: {key: estimates[key] for key in PAIRED if key in estimates}
        for pair, estimates in summary["pairs"].items()
        if pair.startswith((f"{ours(kept)}-", "random-"))
    }
    return {"arms": kept, "pairs": pairs, "pgr": summary.get("pgr", {})}


def shown(estimate: dict[str, Any] | None) -> str:
    if not estimate:
        return "–"
    return f"{estimate['mean']:.3g} ({estimate['low']:.3g} … {estimate['high']:.3g})"


def table(ratio: str, at: dict[str, Any]) -> str:
    mine = ours(at["arms"])
    n = at["arms"][mine][KEYS[0]]["n"]
    lines = [
        f"**{share(ratio)}{' recomputed' if '`' not in share(ratio) else ''}**, n = {n}",
        "",
        "| arm | KL first | KL 16 | answer NLL | FLOP ratio | TTFT speed-up "
        f"| {mine} − arm, first | {mine} − arm, 16 | PGR (NLL) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, e in sorted(at["arms"].items(), key=lambda item: item[1][KEYS[0]]["mean"]):
        pair = at["pairs"].get(f"{mine}-{arm}", {})
        row = [f"`{arm}`", *(shown(e.get(key)) for key in SHOWN)]
        row += [shown(pair.get(key)) for key in PAIRED[:2]]
        row += [shown(at["pgr"].get(arm, {}).get(PAIRED[2]))]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join([*lines, *against_random(at["pairs"])])


def against_random(pairs: dict[str, Any]) -> list[str]:
    """One line: what `random` is off by more than each rule; a good rule's interval is above 0."""
    shares = [
        f"`{pair.removeprefix('random-')}` " + ", ".join(shown(of.get(key)) for key in PAIRED[:2])
        for pair, of in pairs.items()
        if pair.startswith("random-") and pair.removeprefix("random-") in RULES
    ]
    return ["", "`random` − rule, first and 16: " + "; ".join(shares)] if shares else []


def overview(key: str) -> str:
    """Means of ``key``: a row for each data set and ratio, a column for each rule."""
    files = [
        f
        for f in sorted((HERE / "results").glob("*.json"))
        if not {"parts", "f1"} & {*f.stem.split("_")}
    ]
    found = {f.stem: json.loads(f.read_text()).get("cells", {}) for f in files}
    lines = ["| | " + " | ".join(f"`{rule}`" for rule in RULES) + " |", "|---" * 11 + "|"]
    for name, ratios in found.items():
        for ratio, at in ratios.items():
            if not ratio[:1].isdigit():
                continue
            arms = at["arms"] | {"krige": at["arms"][ours(at["arms"])]}
            means = [arms.get(rule, {}).get(key, {}).get("mean") for rule in RULES]
            least = min(mean for mean in means if mean is not None)
            cells = [
                "–" if m is None else f"**{m:.3g}**" if m == least else f"{m:.3g}" for m in means
            ]
            lines.append(f"| {name}, {share(ratio)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(found: dict[str, Any]) -> Figure:
    """Every rule as a line over the ratios: divergence against multiplications and against TTFT."""
    ran = dict.fromkeys(arm for at in found.values() for arm in at["arms"])
    arms = [arm for arm in (*OURS, *RULES[:-1]) if arm in ran]
    arms += [arm for arm in ran if arm not in (*arms, "exact", "exact_again") and OWN in found]
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
            width = 2.5 if arm in OURS else 1.2
            ax.plot(x, y, color=colour, marker=marker, linewidth=width, label=arm)
        ax.set_yscale("log")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("KL(exact ‖ arm), first token [nats]")
    axes[0].set_xlabel("multiplications, arm ÷ exact (flop_ratio)")
    axes[1].set_xlabel("time to first token, arm ÷ exact")
    axes[1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    drawn.suptitle(f"each line: {', '.join(share(r) for r in found)} of the matched tokens")
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", help="of the requests: musique, hotpotqa, dialogue …")
    parser.add_argument("runs", type=Path, nargs="*", help="run folders")
    parser.add_argument("--by", choices=("recompute_ratio", "context"), default="recompute_ratio")
    given = parser.parse_args()
    if not given.runs:
        print(*(f"{key}\n\n{overview(key)}\n" for key in (*KEYS[:2], KEYS[3])), sep="\n")
        return
    found = cells(given.runs, given.by)
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
