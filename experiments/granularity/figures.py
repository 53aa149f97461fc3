"""Two figures: how much is found at each granularity, and what it costs in time and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from experiments.granularity.estimate import REFERENCE
from kvsem.labels import spread
from kvsem.plots import GREY, STYLE

WHOLE, INSIDE, SEGMENT = "#0072B2", "#D55E00", "#009E73"
TITLES = {"service": "customer service", "rag": "RAG", "chat": "chat"}
PARTS = {"tokens, once": "#56B4E9", "tokens held again": "#E69F00", "empty slots": "#C8C8C8"}
MEGABYTE = 1e6
Row = Mapping[str, Any]


def hit_rate(summary: Row, sizes: Sequence[int]) -> Figure:
    """Share of the prompt found, by page size; whole pages, inside pages, whole segments."""
    with mpl.rc_context(STYLE):
        found = summary["workloads"]
        figure = Figure(figsize=(4.4 * len(found), 4.2), layout="constrained")
        for axes, (name, workload) in zip(
            _panels(figure, 1, len(found)), found.items(), strict=True
        ):
            ends = []
            for pool in workload["pool_tokens"]:
                ends += _lines(axes, workload["arms"], "hit_rate", pool, sorted(sizes))
            axes.set_title(f"{TITLES[name]} (n = {workload['n_requests']})")
            axes.set_ylim(0, 1)
            _axis(axes, sizes)
            _label(axes, ends)
        figure.axes[0].set_ylabel("hit tokens ÷ prompt tokens")
        _caption(
            figure,
            "Mean over requests; bars: 95 % bootstrap over tasks, articles or dialogues. "
            "Solid: pool without limit. Dashed, open: LRU pool of the share named.",
        )
    return figure


def costs(summary: Row, rows: Sequence[Row], sizes: Sequence[int]) -> Figure:
    """Bookkeeping time relative to 16-token pages, and KV held at the end (pool without limit)."""
    with mpl.rc_context(STYLE):
        found = summary["workloads"]
        figure = Figure(figsize=(4.4 * len(found), 7.2), layout="constrained")
        panels = _panels(figure, 2, len(found))
        for axes, below, name in zip(panels, panels[len(found) :], found, strict=False):
            workload = found[name]
            arms = {
                arm: workload["pairs"].get(f"{arm}-{REFERENCE}/unlimited", {})
                for arm in workload["arms"]
            }
            arms[f"{REFERENCE}/unlimited"] = {
                "bookkeeping_ratio": {"mean": 1.0, "low": 1.0, "high": 1.0}
            }
            ends = _lines(axes, arms, "bookkeeping_ratio", "unlimited", sorted(sizes))
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axes.minorticks_off()
            axes.axhline(1.0, color=GREY, linewidth=0.9, linestyle=":", zorder=0)
            axes.set_title(f"{TITLES[name]} (n = {workload['n_requests']})")
            _axis(axes, sizes)
            _label(axes, ends)
            mine = [r for r in rows if r["workload"] == name and r["pool"] == "unlimited"]
            _held(below, mine, sorted(sizes), summary["kv_bytes_per_token"], workload)
        panels[0].set_ylabel("bookkeeping time ÷ 16-token whole pages")
        panels[len(found)].set_ylabel("KV held at the end ÷ every token once")
        patches = [Patch(color=colour, label=name) for name, colour in PARTS.items()]
        panels[len(found)].legend(handles=patches[::-1], loc="upper left", frameon=False)
        _caption(
            figure,
            "Pool without limit. Above: geometric mean of paired ratios, bars: 95 % bootstrap. "
            "Below: left bar whole pages (w), right bar inside pages (i).",
        )
    return figure


def _panels(figure: Figure, rows: int, columns: int) -> list[Axes]:
    found: list[Axes] = figure.subplots(rows, columns, squeeze=False, sharey="row").ravel().tolist()
    return found


def _lines(
    axes: Axes, arms: Row, key: str, pool: str, sizes: Sequence[int]
) -> list[tuple[float, str, str]]:
    """Draws one pool's arms; returns (y, name, colour) of the right ends."""
    limited = pool != "unlimited"
    suffix = f", {pool.removeprefix('pool_')} % pool" if limited else ""
    ends: list[tuple[float, str, str]] = []
    kinds = (("", WHOLE, "whole pages", -0.06), ("_partial", INSIDE, "inside pages", 0.06))
    for ending, colour, name, shift in kinds:
        at = {
            i + shift: arms[arm][key]
            for i, size in enumerate(sizes)
            if (arm := f"page_{size}{ending if size > 1 else ''}/{pool}") in arms
        }
        _points(axes, list(at), list(at.values()), colour, limited, "o" if not ending else "s")
        ends.append((at[max(at)]["mean"], name + suffix, colour))
    segment = arms[f"segment/{pool}"][key]
    _points(axes, [len(sizes)], [segment], SEGMENT, limited, "D")
    return ends


def _points(
    axes: Axes, x: Sequence[float], estimates: Sequence[Row], colour: str, open_: bool, marker: str
) -> None:
    means = [e["mean"] for e in estimates]
    low, high = [e["low"] for e in estimates], [e["high"] for e in estimates]
    axes.vlines(x, low, high, color=colour, linewidth=1.1)
    axes.plot(
        x,
        means,
        linestyle="--" if open_ else "-",
        marker=marker,
        color=colour,
        markersize=5.5,
        markerfacecolor="white" if open_ else colour,
    )


def _axis(axes: Axes, sizes: Sequence[int]) -> None:
    names = [*(str(size) for size in sorted(sizes)), "whole\nsegment"]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(sizes) + 0.6)
    axes.set_xlabel("tokens a page")
    axes.grid(False, axis="x")


def _label(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names right of the panel, moved apart where lines end close together."""
    low, high = axes.get_ylim()
    linear = axes.get_yscale() == "linear"
    place = axes.transData.transform
    heights = [
        (y - low) / (high - low)
        if linear
        else axes.transAxes.inverted().transform(place((0, y)))[1]
        for y, _, _ in ends
    ]
    for (y, text, colour), height in zip(ends, spread(heights, 0.065), strict=True):
        axes.annotate(
            text,
            (len(axes.get_xticks()) - 2, y),
            xytext=(1.02, height),
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontsize=8.5,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "#9A9A9A", "linewidth": 0.6, "shrinkA": 1},
        )


def _held(
    axes: Axes, rows: Sequence[Row], sizes: Sequence[int], token_nbytes: int, workload: Row
) -> None:
    by_arm = {row["arm"]: row for row in rows}
    once = workload["n_distinct_tokens"]
    bars = [(i, f"page_{size}", -0.2, "w") for i, size in enumerate(sizes) if size > 1]
    bars += [(i, f"page_{size}_partial", 0.2, "i") for i, size in enumerate(sizes) if size > 1]
    bars += [(i, "page_1", 0.0, "") for i, size in enumerate(sizes) if size == 1]
    bars.append((len(sizes), "segment", 0.0, ""))
    for i, arm, shift, letter in bars:
        row = by_arm[arm]
        again, held = row["repeated_tokens"], row["held_tokens"]
        bottom = 0.0
        for colour, tokens in zip(
            PARTS.values(), (held - again, again, row["held_slots"] - held), strict=True
        ):
            axes.bar(i + shift, tokens / once, 0.34, bottom=bottom, color=colour, linewidth=0)
            bottom += tokens / once
        axes.annotate(letter, (i + shift, bottom), ha="center", va="bottom", fontsize=8, color=GREY)
    axes.axhline(1.0, color=GREY, linewidth=0.9, linestyle=":")
    axes.set_title(f"1 is {once * token_nbytes / MEGABYTE:,.0f} MB", fontweight="normal")
    _axis(axes, sizes)


def _caption(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=8, color=GREY, x=0.01, ha="left")
