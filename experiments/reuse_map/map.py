"""Study: what a change between donor and target costs, by its kind and by the share recomputed.

python experiments/reuse_map/map.py --help
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["HYDRA_FULL_ERROR"] = "1"

import hydra
import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.embeddings.estimate import estimate, spearman  # noqa: E402
from experiments.embeddings.pairs import FILES, Pair  # noqa: E402
from experiments.reuse_map.bench import KEYS, Bench, Row, collected, means, part, shown  # noqa: E402
from experiments.reuse_map.changes import KINDS, PROMPTS, made  # noqa: E402
from experiments.study import attempt, check_keys, data_file, entry, record  # noqa: E402
from kvsem.errors import SettingError, check_range  # noqa: E402
from kvsem.gates.threshold import ThresholdGate  # noqa: E402
from kvsem.lm import LM, load  # noqa: E402
from kvsem.plots import GREY, STYLE  # noqa: E402

GATES = ("off", "on")
PLAIN = ("off", 0.0)  # gate and ratio
FIRST = "kl_first_nats"
RESAMPLES = 1000
SIDES, BIN = ("similarity", "overlap"), "similarity, overlap"
SIMILARITY, OVERLAP = (0.75, 0.85, 0.95), (0.5, 0.75, 0.9)  # edges of the bins
FLOOR, TOP = 1e-5, 1e-1  # nats: ends of the colours
CMAP = "viridis"
MILLI = 1e3


def arms(ratios: Sequence[float]) -> dict[tuple[str, float], dict[str, Any]]:
    """Each gate with each ratio; ``off`` takes whatever it finds."""
    gates = {"off": ThresholdGate(-1.0), "on": part("gate", "default")}
    return {
        (gate, ratio): {"gate": gates[gate], "recompute": part("recompute", "krige", ratio=ratio)}
        for gate in GATES
        for ratio in ratios
    }


def inside(value: float, edges: Sequence[float]) -> str:
    """The bin of ``value``, which begins at its lower edge."""
    ends = ["0", *(f"{edge:g}" for edge in edges), "1"]
    at = bisect_right(edges, value)
    return f"{ends[at]} to {ends[at + 1]}"


def changed(rows: Sequence[Row]) -> list[Row]:
    """Each arm's numbers less those of the same pair without gate and recomputation."""
    plain = {row["id"]: row for row in rows if (row["gate"], row["ratio"]) == PLAIN}
    return [
        row | {key: row[key] - plain[row["id"]][key] for key in KEYS}
        for row in rows
        if row["id"] in plain and (row["gate"], row["ratio"]) != PLAIN
    ]


def ranked(rows: Sequence[Row]) -> dict[str, Any]:
    """Rank correlation of each likeness with the divergence of plain reuse; 1: a perfect order."""
    plain = [row for row in rows if (row["gate"], row["ratio"]) == PLAIN]
    kl, groups = np.array([row[FIRST] for row in plain]), [row["group"] for row in plain]
    return {
        name: estimate(spearman, np.array([r[name] for r in plain]), kl, groups, RESAMPLES, 0)
        for name in SIDES
        if plain
    }


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "kind | gate | ratio": means(rows, ["kind", "gate", "ratio"]),
        "gate | ratio": means(rows, ["gate", "ratio"]),
        f"{BIN} | gate | ratio": means(binned(rows), [BIN, "gate", "ratio"]),
        "less plain reuse: gate | ratio": means(changed(rows), ["gate", "ratio"]),
        "spearman": ranked(rows),
        "refused": {row["id"]: row["refused"] for row in rows if row["refused"]},
    }


def binned(rows: Sequence[Row]) -> list[Row]:
    """The rows with their bin, in its order."""
    found = [
        row | {BIN: f"{inside(row[SIDES[0]], SIMILARITY)}, {inside(row[SIDES[1]], OVERLAP)}"}
        for row in rows
    ]
    return sorted(found, key=lambda row: str(row[BIN]))


def table(rows: Sequence[Row], by: str, key: str) -> list[str]:
    """Markdown: a row for each value of ``by`` and gate, a column for each ratio."""
    found = means(rows, [by, "gate", "ratio"])
    ratios = list(dict.fromkeys(row["ratio"] for row in rows))
    heads = [f"{by} (n), {key}", "similarity", "overlap", "gate", "hit rate"]
    heads += [f"{ratio:g}" for ratio in ratios]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name in dict.fromkeys(row[by] for row in rows):
        for gate in GATES:
            cells = [found[f"{name} | {gate} | {ratio}"] for ratio in ratios]
            about = [f"{cells[0][side]['mean']:.2f}" for side in SIDES]
            about += [gate, f"{cells[0]['hit_rate']['mean']:.2f}"]
            about += [shown(cell[key]) for cell in cells]
            lines.append(f"| {name} ({cells[0]['n']}) | {' | '.join(about)} |")
    return lines


def figure(rows: Sequence[Row]) -> Figure:
    """Kind by share recomputed, without and with the gate; and similarity by overlap."""
    found = means(rows, ["kind", "gate", "ratio"])
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    ratios = list(dict.fromkeys(row["ratio"] for row in rows))
    norm = LogNorm(FLOOR, TOP)
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(12.5, 0.34 * len(kinds) + 1.5), layout="constrained")
        off, on, right = drawn.subplots(1, 3, width_ratios=(1, 1, 1.35))
        for axes, gate in ((off, "off"), (on, "on")):
            cells = np.array(
                [[found[f"{kind} | {gate} | {r}"][FIRST]["mean"] for r in ratios] for kind in kinds]
            )
            _heat(axes, cells, norm)
            axes.set_xticks(np.arange(len(ratios)) + 0.5, [f"{100 * r:g} %" for r in ratios])
            axes.set_xlabel("matched tokens recomputed")
            axes.set_title(f"gate {gate}")
        ends = [found[f"{kind} | off | {ratios[0]}"] for kind in kinds]
        names = [f"{kind} ({end['n']})" for kind, end in zip(kinds, ends, strict=True)]
        off.set_yticks(np.arange(len(kinds)) + 0.5, names)
        on.set_yticks([])
        _scatter(right, [r for r in rows if (r["gate"], r["ratio"]) == ("off", ratios[0])], norm)
        drawn.colorbar(
            ScalarMappable(norm, CMAP), ax=right, label="KL(exact ‖ reuse), first token [nats]"
        )
        drawn.supxlabel(
            "Left: mean KL of the first token in thousandths of a nat. "
            f"Right: one dot a pair, gate off, {100 * ratios[0]:g} % recomputed.",
            fontsize=8,
            color=GREY,
            x=0.01,
            ha="left",
        )
        return drawn


def _heat(axes: Axes, cells: np.ndarray, norm: LogNorm) -> None:
    axes.pcolormesh(np.maximum(cells, FLOOR), norm=norm, cmap=CMAP, ec="white")
    axes.invert_yaxis()
    axes.grid(False)
    axes.tick_params(length=0)
    for (y, x), value in np.ndenumerate(cells):
        red, green, blue, _ = mpl.colormaps[CMAP](norm(max(float(value), FLOOR)))
        ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
        text = f"{value * MILLI:.2g}" if value < TOP else f"{value * MILLI:.0f}"
        axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=ink, fontsize=8.5)


def _scatter(axes: Axes, rows: Sequence[Row], norm: LogNorm) -> None:
    axes.scatter(
        [row["similarity"] for row in rows],
        [row["overlap"] for row in rows],
        c=[max(row[FIRST], FLOOR) for row in rows],
        norm=norm,
        cmap=CMAP,
        s=34,
        ec="white",
        lw=0.5,
    )
    axes.set_xlabel("cosine of donor and target, MiniLM")
    axes.set_ylabel("target tokens in the common subsequence")


def check(cfg: DictConfig) -> list[str]:
    """Raise `SettingError` for what cannot be measured; returns the kinds of changes."""
    check_keys(cfg, {str(k): None for k in OmegaConf.load(Path(__file__).with_suffix(".yaml"))})
    kinds = list(KINDS) if cfg.kinds is None else list(cfg.kinds)
    for kind in kinds:
        if kind not in KINDS:
            raise SettingError("kinds", kind, f"names out of {', '.join(KINDS)}")
    if not cfg.ratios:
        raise SettingError("ratios", [], "at least one")
    for ratio in cfg.ratios:
        check_range("ratios", ratio, 0.0, 1.0)
    for name in (*FILES.values(), PROMPTS):
        data_file(cfg, name)
    return kinds


def perform(cfg: DictConfig) -> None:
    kinds = check(cfg)
    torch.set_num_threads(cfg.threads)
    pairs = made(ROOT / cfg.data, kinds, cfg.n, cfg.max_words, cfg.seed)
    parts = arms(cfg.ratios)
    lm: LM = load(cfg.model, packaged=True)
    bench = Bench(lm, cfg.system, parts.values())

    def measure(pair: Pair) -> Iterator[Row]:
        for (gate, ratio), row in zip(parts, bench.rows(pair), strict=True):
            yield row | {"gate": gate, "ratio": ratio}

    about: Mapping[str, Any] = {"model": lm.name, "namespace": lm.namespace()}
    rows = collected(cfg, pairs, measure, **about)
    folder = record(cfg, rows, summarise(rows), {"map": figure(rows)}, **about)
    for key in ("kl_first_nats", "kl_nats", "top1_agreement", "flop_ratio"):
        print("\n".join(["", *table(rows, "kind", key)]))
        print("\n".join(["", *table(binned(rows), BIN, key)]))
    print(f"\nstudy: {folder}")


@hydra.main(version_base="1.3", config_path=".", config_name="map")
def main(cfg: DictConfig) -> None:
    attempt(perform, cfg)


if __name__ == "__main__":
    sys.exit(entry(main))
