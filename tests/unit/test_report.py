"""The page, the figures and the terminal table, on synthetic rows."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hydra.utils import instantiate
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox
from omegaconf import OmegaConf
from rich.console import Console

from kvsem import plots
from kvsem.errors import SettingError
from kvsem.labels import Label, freeze, place, spread
from kvsem.report import columns_of, number, short, terminal_table, write_report
from kvsem.results import RunData, RunDir, load_run, summarise

KL = "quality/kl_first_nats"
ARMS = {  # kl, flop_ratio, share recomputed
    "exact": (0.0, 1.0, 0.0),
    "exact_again": (0.0, 1.0, 0.0),
    "none": (0.3, 0.2, 0.0),
    "epic": (0.08, 0.3, 0.2),
    "$odd<arm>": (0.05, 0.35, 0.2),
    "zero_kv": (5.0, 0.2, 0.0),
    "no_context": (2.0, 0.1, 0.0),
}
CONFIG = "model:\n  name: tiny\nworkload:\n  _target_: kvsem.workloads.Jsonl\n  path: qa.jsonl\n"
SUPPORT = {
    "moved_chunk": {"ok": True, "reason": "relative error 1e-6"},
    "heads": {"ok": False, "reason": "no plan <for> this model"},
}
STATUS = {"state": "finished", "notes": ["exact's times come from an earlier run"]}


def rows(n: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(1)
    for i in range(n):
        for arm, (kl, flops, share) in ARMS.items():
            recomputed = int(200 * share)
            values: dict[str, Any] = {
                "request": f"q$_{i}",
                "group": None,
                "arm": arm,
                "n_tokens": 300,
                "text": "<script>alert(1)</script>",
                "settings": {"dtype": "float32", "rule": arm},
                KL: kl * (0.5 + rng.random()),
                "quality/f1": rng.random(),
                "quality/answer_nll_nats": 2.0 + kl,
                "cost/flop_ratio": flops,
                "cost/ttft_speedup": 1 / (flops + 0.1 * rng.random()),
                "reuse/prefix_tokens": 40,
                "reuse/chunk_tokens": 200 - recomputed,
                "reuse/recomputed_tokens": recomputed,
                "reuse/new_tokens": 60,
                "reuse/hit_rate": 0.8,
                "reuse/refused": {"number <differs>": 2} if arm == "epic" else {},
            }
            if arm != "no_context":
                values["kv_error_rel_per_layer"] = [kl * (1 + layer) / 9 for layer in range(4)]
            if (i, arm) == (0, "none"):
                values["quality/f1"] = float("nan")
            yield values


def make(path: Path, n: int = 5) -> RunDir:
    with RunDir.create(path, config=CONFIG, env={"cpu": "Synthetic", "threads": 2}) as run:
        for values in rows(n):
            run.append(values)
        run.write_summary(summarise(run.rows(), {"epic": 3.0}, SUPPORT, STATUS))
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make(tmp_path_factory.mktemp("run") / "out")


@pytest.fixture(scope="module")
def data(run: RunDir) -> RunData:
    return load_run(run.path)


@pytest.fixture(scope="module")
def page(run: RunDir) -> str:
    return write_report(run).read_text(encoding="utf-8")


class Checker(HTMLParser):
    """Collects text, tags and attributes; every tag that needs closing must be closed."""

    void = frozenset({"meta", "link", "img", "br", "hr", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_stands_alone(page: str) -> None:
    checker = Checker(page)
    assert checker.open == []
    assert not {"script", "link", "img", "iframe"} & set(checker.tags)
    assert "http" not in page
    assert "@import" not in page
    targets = [v or "" for k, v in checker.attributes if k in ("src", "href", "xlink:href")]
    assert all(target.startswith("#") for target in targets)


def test_ids_in_the_page_are_unique_and_found(page: str) -> None:
    ids = re.findall(r'\sid="([^"]*)"', page)
    used = set(re.findall(r'(?:href="#|url\(#)([\w-]+)', page))
    assert len(ids) == len(set(ids))
    assert used <= set(ids)


def test_the_page_says_what_it_must(page: str) -> None:
    text = " ".join(" ".join(Checker(page).words).split())
    for expected in (
        "tiny",
        "qa.jsonl",
        "Synthetic",
        "5 requests",
        "exact's times come from an earlier run",
        "no plan <for> this model",
        "number <differs>",
        "$odd<arm>",
        "only 5 documents",
        "How to read this",
        "What differs between the arms",
    ):
        assert expected in text


def test_every_mean_of_the_table_has_its_interval_and_n(page: str, data: RunData) -> None:
    body = page[page.index('<table class="results">') : page.index("How to read this")]
    means = re.findall(r"<b>([^<]*)</b> <span class=\"ci\">(.*?)</span>", body)
    assert len(means) == body.count("<b>")
    assert all(" … " in interval for _, interval in means)
    assert f"<b>{number(data.summary['arms']['epic'][KL]['mean'])}</b>" in body
    assert "n&nbsp;=&nbsp;4" in body  # the F1 that was not a number
    assert body.count('data-label="n">5<') == len(ARMS)


def test_what_was_left_out_is_counted(page: str) -> None:
    section = page[page.index("Left out of the means") :]
    assert re.search(r"<th>none</th><td>quality/f1</td><td>0</td><td>1</td>", section)


def test_a_killed_run_and_an_empty_one_have_a_page(tmp_path: Path) -> None:
    make(tmp_path / "killed", n=1)
    (tmp_path / "killed" / "summary.json").unlink()
    assert "unfinished" in write_report(tmp_path / "killed").read_text(encoding="utf-8")
    RunDir.create(tmp_path / "empty", config=CONFIG, env={}).close()
    assert "No row has been written" in write_report(tmp_path / "empty").read_text("utf-8")
    assert plots.write_plots(tmp_path / "empty") == []


def test_a_run_of_exact_alone_has_a_page(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, config="", env={}) as run:
        run.append({"request": "q", "arm": "exact", KL: 0.0})
        run.append({"request": "q", "arm": "exact_again", KL: 0.0})
    assert "<svg" in write_report(tmp_path).read_text(encoding="utf-8")


def test_the_terminal_table_fits_and_loses_nothing(data: RunData) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal_table(data.summary))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    epic = data.summary["arms"]["epic"][KL]
    assert number(epic["mean"]) in text
    assert f"{short(epic['low'])}..{short(epic['high'])}" in text
    assert "n=4" in text
    assert all(arm in text for arm in ARMS)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0"), (0.12345, "0.123"), (1.2e-9, "1.2e-9"), (-2.5, "-2.5"), (12345.6, "12346")],
)
def test_numbers_are_short(value: float, expected: str) -> None:
    assert number(value) == expected


def test_plots_are_files_that_stand_alone(run: RunDir) -> None:
    paths = plots.write_plots(run)
    assert sorted(path.stem for path in paths) == sorted(plots.FIGURES)
    first = {path: path.read_bytes() for path in paths}
    for path in paths:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    plots.write_plots(run)
    assert {path: path.read_bytes() for path in paths} == first


def test_bars_of_provenance_add_up_to_the_prompt(data: RunData) -> None:
    (axes,) = plots.provenance(data, ["epic"]).axes
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    assert max(bar.get_x() + bar.get_width() for bar in bars) == 300
    assert sum(bar.get_width() for bar in bars) == 5 * 300


def test_an_unknown_arm_is_named(data: RunData) -> None:
    with pytest.raises(SettingError, match="arms='nope'"):
        plots.provenance(data, ["nope"])


def test_exact_is_drawn_on_the_floor_of_the_log_axis(data: RunData) -> None:
    axes = plots.quality_against_cost(data).axes[0]
    floor = axes.get_ylim()[0]
    triangles = [line for line in axes.lines if line.get_marker() == "v"]
    assert 0 < floor < 0.05
    assert sum(floor in np.asarray(line.get_ydata()) for line in triangles) == 2


def test_every_arm_is_named_beside_its_point(data: RunData) -> None:
    figure = plots.quality_against_cost(data)
    for axes in figure.axes:
        assert {text.get_text() for text in axes.texts} == set(ARMS)
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not any(_covers(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_labels_of_one_point_do_not_cover_each_other() -> None:
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    freeze(figure)
    labels = [Label(0.5, 0.5 + i * 0.01, f"some_arm_{i}", "black") for i in range(7)]
    boxes = place(axes, labels)
    assert not any(_covers(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


def _covers(a: Bbox, b: Bbox) -> bool:
    return bool(min(a.x1, b.x1) > max(a.x0, b.x0) and min(a.y1, b.y1) > max(a.y0, b.y0))


def test_spread_keeps_order_and_distance() -> None:
    moved = spread([0.0, 0.01, 0.02, 5.0], 1.0)
    gaps = [b - a for a, b in pairwise(moved)]
    assert all(gap >= 1 - 1e-3 for gap in gaps)
    assert moved[3] == 5.0


def test_a_metric_of_ones_own_has_a_column_and_an_empty_one_has_none(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, config=CONFIG, env={}) as run:
        for i, row in enumerate(rows(2)):
            del row["quality/f1"]
            run.append(row | {"quality/own_rank": float(i), "quality/kv_error_rel": 0.1})
        summary = summarise(run.rows(), {}, {}, STATUS)
        run.write_summary(summary)
    assert [c.key for c in columns_of(summary)] == [
        KL, "quality/answer_nll_nats", "quality/own_rank", "cost/flop_ratio", "cost/ttft_speedup",
        "reuse/hit_rate", "reuse/recomputed_tokens",
    ]  # fmt: skip
    page = write_report(run).read_text(encoding="utf-8")
    assert "<th>own_rank<small>own metric</small></th>" in page
    assert "<th>F1" not in page
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal_table(summary))
    assert "own_rank" in console.export_text()


def test_no_metric_of_kvsem_is_taken_for_somebody_elses() -> None:
    folder = Path(__file__).parents[2] / "conf/metric"
    metrics = [instantiate(OmegaConf.load(path)) for path in sorted(folder.glob("*.yaml"))]
    keys: dict[str, dict[str, float]] = {
        key: {} for metric in metrics for key in metric.higher_is_better
    }
    assert len(keys) > 8
    assert not [c for c in columns_of({"arms": {"a": keys}}) if c.unit == "own metric"]


def test_a_figure_with_nothing_in_it_is_left_out(tmp_path: Path) -> None:
    """As of a run whose only arm reuses exact prefix pages: its distance is zero."""
    with RunDir.create(tmp_path, config="", env={}) as run:
        for row in rows(2):
            if row["arm"] in ("exact", "none"):
                zeros = [0.0] * len(row["kv_error_rel_per_layer"])
                run.append(row | {KL: 0.0, "kv_error_rel_per_layer": zeros})
        run.write_summary(summarise(run.rows(), {}, {}, STATUS))
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots/kl_per_request.svg").write_text("of an earlier state", encoding="utf-8")
    plots.write_plots(run)
    drawn = {path.stem for path in (tmp_path / "plots").iterdir()}
    assert drawn == {"quality_against_cost", "provenance"}
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert page.count("Not drawn, as no arm is above zero there") == 2


def test_arms_look_different() -> None:
    arms = [f"method_{i}" for i in range(20)]
    assert len(set(plots.styles(arms).values())) == 20 + 2 + 5


def test_a_setting_that_exact_has_no_value_for_is_shown(tmp_path: Path) -> None:
    made = [
        next(rows(1)) | {"request": "q", "arm": arm, "settings": {"dtype": "float32"} | own}
        for arm, own in (
            ("exact", {}),
            ("none", {"context": "alone"}),
            ("epic", {"context": "own"}),
        )
    ]
    with RunDir.create(tmp_path / "run", config="a: 1\n", env={}) as run:
        for row in made:
            run.append(row)
        run.write_summary(summarise(run.rows(), {}, {}, STATUS))
    page = write_report(run).read_text(encoding="utf-8")
    assert "<td>alone</td>" in page
    assert "<td>own</td>" in page
