"""Direct labels beside points and line ends, placed so that none covers another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

RADII = (8, 13, 20, 30, 42, 56, 74, 96)  # pixels between a point and its label
LEADER_FROM = 20  # a label this far away gets a line to its point


@dataclass(frozen=True)
class Label:
    """``text`` beside the point (``x``, ``y``) of the data."""

    x: float
    y: float
    text: str
    colour: str


def freeze(figure: Figure) -> None:
    """Settle the layout: labels are placed in pixels, and must not move the axes afterwards."""
    if not hasattr(figure.canvas, "get_renderer"):
        FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def place(axes: Axes, labels: Sequence[Label], bars: Sequence[Bbox] = ()) -> list[Bbox]:
    """Put each label at the nearest free place around its point; returns their boxes in pixels.

    ``bars`` (data coordinates) are kept free too. Greedy; the layout must be frozen.
    """
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    frame = axes.get_window_extent(renderer)
    points = [axes.transData.transform((label.x, label.y)) for label in labels]
    taken = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    taken += [axes.transData.transform_bbox(bar) for bar in bars]
    boxes = []
    for label, point in zip(labels, points, strict=True):
        text = axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8.5,
            color=label.colour,
            parse_math=False,
            annotation_clip=False,
        )
        text.set_in_layout(False)
        size = text.get_window_extent(renderer)
        box, radius = _free(point, (size.width + 4, size.height + 2), taken, frame)
        centre = np.array([(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2])
        text.set_position(tuple((centre - point) * 72 / axes.figure.dpi))
        if radius >= LEADER_FROM:
            _leader(axes, point, box)
        taken.append(box)
        boxes.append(box)
    return boxes


def spread(values: Sequence[float], gap: float) -> list[float]:
    """``values`` moved apart, in their order, until neighbours are ``gap`` from each other."""
    order = np.argsort(values, kind="stable")
    moved = np.array(values, float)
    for _ in range(200):
        overlaps = gap - np.diff(moved[order])
        if not (overlaps > 1e-6).any():
            break
        push = np.maximum(overlaps, 0) / 2
        moved[order[:-1]] -= push
        moved[order[1:]] += push
    return [float(value) for value in moved]


def _free(
    point: np.ndarray, size: tuple[float, float], taken: Sequence[Bbox], frame: Bbox
) -> tuple[Bbox, float]:
    """The nearest place that covers nothing, or the one that covers least."""
    best: tuple[float, Bbox, float] | None = None
    for box, radius in _places(point, size):
        cost = sum(_overlap(box, other) for other in taken)
        cost += 10 * (box.width * box.height - _overlap(box, frame))
        if cost < 1e-6:
            return box, radius
        if best is None or cost < best[0]:
            best = (cost, box, radius)
    assert best is not None
    return best[1], best[2]


def _places(point: np.ndarray, size: tuple[float, float]) -> Iterator[tuple[Bbox, float]]:
    width, height = size
    for radius in RADII:
        for angle in np.linspace(0, 2 * np.pi, 16, endpoint=False):
            x = point[0] + np.cos(angle) * (radius + width / 2)
            y = point[1] + np.sin(angle) * (radius + height / 2)
            yield Bbox.from_bounds(x - width / 2, y - height / 2, width, height), radius


def _overlap(a: Bbox, b: Bbox) -> float:
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return float(max(width, 0) * max(height, 0))


def _leader(axes: Axes, point: np.ndarray, box: Bbox) -> None:
    near = np.array([np.clip(point[0], box.x0, box.x1), np.clip(point[1], box.y0, box.y1)])
    ends = axes.transData.inverted().transform([point, near])
    axes.plot(ends[:, 0], ends[:, 1], color="#9A9A9A", linewidth=0.6, zorder=1, clip_on=False)
