"""Figures of a run. Each returns a matplotlib Figure and draws without pyplot's global state.

Colours are Okabe and Ito's, safe for colour-blind readers; every arm also has its own marker, and
labels stand next to what they name.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from kvsem.errors import SettingError
from kvsem.labels import Label, freeze, place, spread
from kvsem.results import RunData, RunDir, load_run, write_atomic
from kvsem.summary import BASELINES, CONTROLS, Floats, bootstrap, cluster

KL = "quality/kl_first_nats"
FLOPS = "cost/flop_ratio"
SPEEDUP = "cost/ttft_speedup"
PER_LAYER = "kv_error_rel_per_layer"
PROVENANCE = {  # in the order of the bars: exact first, computed last
    "prefix": "#0072B2",
    "chunk": "#56B4E9",
    "semantic": "#009E73",
    "recomputed": "#E69F00",
    "new": "#C8C8C8",
}
METHOD_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#B8860B", "#3A9BD9")
METHOD_MARKERS = "osD^vP"
CONTROL_MARKERS = "X*ph8"
GREY = "#6B6B6B"
ZERO_NATS = 1e-6  # fp32 noise of a KL over a whole vocabulary: drawn as zero
ZERO_ERROR = 1e-4  # relative; computed keys and values of fp32 lie below
MAX_BARS = 40
COLUMNS = 3
STYLE: Any = {  # matplotlib types its keys as literals
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",  # text stays text: small, and can be searched
}
Estimates = dict[str, dict[str, Any]]  # by arm


def quality_against_cost(run: RunData) -> Figure:
    """KL at the first token against flop_ratio, and against TTFT relative to exact."""
    with mpl.rc_context(STYLE):
        figure, (left, right) = _figure(9.4, 4.5, 1, 2, sharey=True)
        quality = _estimates(run, KL)
        floor = _log_axis(left, (e[p] for e in quality.values() for p in ("mean", "low", "high")))
        left.set_ylabel("KL(exact ‖ arm), first token [nats]")
        left.set_xlabel("multiplications, arm ÷ exact (flop_ratio)")
        right.set_xlabel("time to first token, arm ÷ exact")
        _caption(
            figure,
            f"{_n(run)}; bars: 95 % bootstrap of the mean. "
            f"▽ KL up to {ZERO_NATS:g}, below the axis. "
            "Dotted: the cost of exact. Down and left is better.",
        )
        marked = []
        for axes, cost in ((left, _estimates(run, FLOPS)), (right, _relative_ttft(run))):
            axes.axvline(1.0, color=GREY, linewidth=0.9, linestyle=":")
            marked.append((axes, *_points(axes, cost, quality, floor)))
            axes.set_xlim(0, max(1.1, axes.get_xlim()[1]))
        freeze(figure)
        for axes, labels, bars in marked:
            place(axes, labels, bars)
    return figure


def provenance(run: RunData, arms: Sequence[str] | None = None) -> Figure:
    """Tokens of each request by where their KV came from, one panel per arm."""
    arms = _methods(run) if arms is None else _known(run, arms)
    everything = list(dict.fromkeys(run.samples["request"]))
    requests = everything[:MAX_BARS]
    rows, columns = -(-len(arms) // COLUMNS), min(COLUMNS, len(arms))
    with mpl.rc_context(STYLE):
        height = rows * (0.45 + max(0.17 * len(requests), 0.9)) + 0.9
        figure, panels = _figure(9.4, height, rows, columns, sharey=True, sharex=True)
        for axes, arm in zip(panels, arms, strict=False):
            _stack(axes, _arm(run, arm).set_index("request").reindex(requests))
            axes.set_title(arm, parse_math=False)
        panels[0].invert_yaxis()
        for i, axes in enumerate(panels):
            axes.set_visible(i < len(arms))
            if len(arms) - columns <= i < len(arms):
                axes.set_xlabel("prompt tokens")
                axes.xaxis.set_tick_params(labelbottom=True)
        patches = [Patch(color=colour, label=name) for name, colour in PROVENANCE.items()]
        figure.legend(handles=patches, loc="outside upper left", ncols=5, frameon=False)
        n = len(everything)
        shown = f"n = {n}" if n == len(requests) else f"the first {len(requests)} of n = {n}"
        _caption(figure, f"One bar per request ({shown}); its parts add up to the prompt.")
    return figure


def kv_error_per_layer(run: RunData) -> Figure:
    """Relative error of K and V against exact, layer by layer, with the interval of the mean."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(7.8, 4.3)
        ends: list[Label] = []
        for arm in run.arms:
            layers, groups = _per_layer(run, arm)
            if not np.isfinite(layers).any() or np.nanmax(layers) <= ZERO_ERROR:
                continue
            colour, marker = styles(run.arms)[arm]
            ends.append(_band(axes, arm, layers, groups, colour, marker))
        axes.set_xlabel("layer")
        axes.set_ylabel("relative error of K and V")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _caption(
            figure,
            f"{_n(run)}; bands: 95 % bootstrap of the mean. Arms below {ZERO_ERROR:g} left out.",
        )
        _label_ends(figure, axes, ends)
    return figure


def kl_per_request(run: RunData) -> Figure:
    """KL at the first token, one dot per request, the same request joined across arms."""
    with mpl.rc_context(STYLE):
        quality = {arm: e for arm, e in _estimates(run, KL).items() if e["mean"] > ZERO_NATS}
        arms = sorted(quality, key=lambda arm: float(quality[arm]["mean"]))
        table = _wide(run, KL).reindex(columns=arms)
        figure, (axes,) = _figure(max(7.0, 1.15 * len(arms) + 1.5), 4.5)
        floor = _log_axis(axes, table.to_numpy(float).ravel())
        table = table.clip(lower=floor)
        x = np.arange(len(arms))
        for line in table.to_numpy(float):
            axes.plot(x, line, color="#9A9A9A", linewidth=0.6, alpha=0.5, zorder=1)
        for i, arm in enumerate(arms):
            colour, marker = styles(run.arms)[arm]
            axes.scatter(np.full(len(table), i), table[arm], s=15, color=colour, alpha=0.6, lw=0)
            _bar(axes, i + 0.18, quality[arm], floor, colour, marker)
        axes.set_xticks(x, arms, rotation=20 if len(arms) > 6 else 0, parse_math=False)
        axes.set_xlim(-0.5, max(len(arms) - 0.5, 0.5))
        axes.grid(False, axis="x")
        axes.set_ylabel("KL(exact ‖ arm), first token [nats]")
        _caption(
            figure,
            f"{_n(run)}, joined by lines; beside the dots the mean with its 95 % bootstrap. "
            f"Arms up to {ZERO_NATS:g} left out.",
        )
    return figure


FIGURES = {
    "quality_against_cost": quality_against_cost,
    "kl_per_request": kl_per_request,
    "provenance": provenance,
    "kv_error_per_layer": kv_error_per_layer,
}


def is_empty(figure: Figure) -> bool:
    """Whether no point was drawn, as where every arm is at zero."""
    return not any(np.isfinite(axes.dataLim.get_points()).all() for axes in figure.axes)


def svg(figure: Figure, name: str) -> str:
    """The figure as SVG text, the same for the same data; ``name`` keeps ids apart in a page."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def write_plots(run: RunDir | RunData | Path | str) -> list[Path]:
    """Every figure that is not empty as ``<run>/plots/<name>.svg``; none without rows."""
    if not isinstance(run, RunData):
        run = load_run(run.path if isinstance(run, RunDir) else run)
    folder = run.path / "plots"
    folder.mkdir(exist_ok=True)
    paths = []
    for name, draw in FIGURES.items() if run.arms else ():
        figure, path = draw(run), folder / f"{name}.svg"
        if is_empty(figure):
            path.unlink(missing_ok=True)  # of the run before it went on
            continue
        write_atomic(path, svg(figure, name))
        paths.append(path)
    return paths


def styles(arms: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker by arm: black and grey for exact and controls, colours for methods."""
    marks = {"exact": ("#000000", "o"), "exact_again": ("#000000", "s")}
    methods = [arm for arm in arms if arm not in BASELINES and arm not in CONTROLS]
    for i, arm in enumerate(methods):
        marks[arm] = (METHOD_COLOURS[i % 6], METHOD_MARKERS[(i + i // 6) % 6])
    return marks | {arm: (GREY, m) for arm, m in zip(CONTROLS, CONTROL_MARKERS, strict=True)}


def _figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **axes: Any
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **axes).ravel().tolist()


def _caption(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=8, color=GREY, x=0.01, ha="left")


def _n(run: RunData) -> str:
    n = run.samples["request"].nunique()
    documents = run.summary["status"].get("n_clusters", n)
    return f"n = {n} requests" + (f" in {documents} documents" if documents != n else "")


def _estimates(run: RunData, key: str) -> Estimates:
    return {
        arm: run.summary["arms"][arm][key] for arm in run.arms if key in run.summary["arms"][arm]
    }


def _arm(run: RunData, arm: str) -> pd.DataFrame:
    return run.samples[run.samples["arm"] == arm]


def _groups(samples: pd.DataFrame) -> list[str]:
    named = samples["group"] if "group" in samples else [None] * len(samples)
    pairs = zip(samples["request"], named, strict=True)
    return [cluster(r, group if isinstance(group, str) else None) for r, group in pairs]


def _wide(run: RunData, key: str) -> pd.DataFrame:
    """Requests by arms, NaN where there is no value."""
    return run.samples.pivot(index="request", columns="arm", values=key).astype(float)


def _relative_ttft(run: RunData) -> Estimates:
    """Arm ÷ exact, from each request's own pair."""
    found: Estimates = {}
    for arm in _estimates(run, SPEEDUP):
        samples = _arm(run, arm)
        ratio = 1 / samples[SPEEDUP].to_numpy(float)
        low, high = bootstrap(ratio[:, None], _groups(samples))
        found[arm] = {"mean": np.nanmean(ratio), "low": low[0], "high": high[0]}
    return found


def _per_layer(run: RunData, arm: str) -> tuple[Floats, list[str]]:
    """Errors ``[requests, layers]`` of the rows that have them, and their clusters."""
    samples = _arm(run, arm)
    if PER_LAYER in samples:
        samples = samples[samples[PER_LAYER].map(lambda value: isinstance(value, list))]
        if len(samples):
            return np.array(samples[PER_LAYER].tolist(), float), _groups(samples)
    return np.empty((0, 0)), []


def _methods(run: RunData) -> list[str]:
    methods = [arm for arm in run.arms if arm not in BASELINES and arm not in CONTROLS]
    return methods or run.arms


def _known(run: RunData, arms: Sequence[str]) -> list[str]:
    for arm in arms:
        if arm not in run.arms:
            raise SettingError("arms", arm, f"one of {', '.join(run.arms)}")
    return list(arms)


def _log_axis(axes: Axes, values: Iterable[float]) -> float:
    """Logarithmic y over the values above `ZERO_NATS`; returns where zero is drawn."""
    above = [v for v in values if np.isfinite(v) and v > ZERO_NATS] or [1e-5]
    floor = float(10 ** (np.floor(np.log10(min(above)) * 2) / 2 - 0.5))
    axes.set_yscale("log")
    axes.set_ylim(floor, max(above) * 2.5)
    return floor


def _points(
    axes: Axes, cost: Estimates, quality: Estimates, floor: float
) -> tuple[list[Label], list[Bbox]]:
    """Draws the arms; returns what names them and the data boxes of their interval bars."""
    labels, bars = [], []
    for arm in (arm for arm in quality if arm in cost):
        colour, marker = styles(list(quality))[arm]
        x, y = cost[arm], _bar(axes, cost[arm]["mean"], quality[arm], floor, colour, marker)
        axes.plot([x["low"], x["high"]], [y, y], color=colour, linewidth=1.1, clip_on=False)
        labels.append(Label(x["mean"], y, arm, colour))
        bars.append(Bbox.from_extents(x["low"], y / 1.01, x["high"], y * 1.01))
        low, high = max(quality[arm]["low"], floor), max(quality[arm]["high"], floor)
        bars.append(Bbox.from_extents(x["mean"] - 0.003, low, x["mean"] + 0.003, high))
    return labels, bars


def _bar(
    axes: Axes, x: float, estimate: Mapping[str, Any], floor: float, colour: str, marker: str
) -> float:
    """A mean with its interval at ``x``; a zero is an open triangle on the floor. Returns its y."""
    if estimate["mean"] <= ZERO_NATS:
        axes.plot([x], [floor], "v", color=colour, markerfacecolor="white", clip_on=False, zorder=4)
        return floor
    y = max(float(estimate["mean"]), floor)
    low, high = max(estimate["low"], floor), max(estimate["high"], floor)
    axes.plot([x, x], [low, high], color=colour, linewidth=1.1, zorder=3)
    axes.plot([x], [y], marker, color=colour, markersize=7, mec="white", mew=0.6, zorder=4)
    return y


def _stack(axes: Axes, samples: pd.DataFrame) -> None:
    left = np.zeros(len(samples))
    names = [str(request) for request in samples.index]
    for name, colour in PROVENANCE.items():
        column = f"reuse/{name}_tokens"
        width = samples[column].fillna(0) if column in samples else pd.Series(0.0, samples.index)
        axes.barh(range(len(samples)), width, left=left, color=colour, height=0.78, linewidth=0)
        left += width.to_numpy(float)
    axes.set_yticks(range(len(samples)), names, fontsize=7, parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def _band(
    axes: Axes, arm: str, layers: Floats, groups: list[str], colour: str, marker: str
) -> Label:
    mean, x = np.nanmean(layers, axis=0), np.arange(layers.shape[1])
    low, high = bootstrap(layers, groups)
    dashes = "--" if arm in (*BASELINES, *CONTROLS) else "-"
    axes.plot(x, mean, dashes, color=colour, marker=marker, markersize=3.5)
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    return Label(float(x[-1]), float(mean[-1]), arm, colour)


def _label_ends(figure: Figure, axes: Axes, ends: Sequence[Label]) -> None:
    """Names at the lines' right ends, moved apart where lines end close together."""
    low, high = axes.get_ylim()
    for label, y in zip(ends, spread([e.y for e in ends], (high - low) * 0.05), strict=True):
        axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(1.03, y),
            textcoords=("axes fraction", "data"),
            color=label.colour,
            va="center",
            fontsize=8.5,
            parse_math=False,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "#9A9A9A", "linewidth": 0.6, "shrinkB": 5},
        )
