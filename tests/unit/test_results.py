"""Run directories and the summary. All numbers are synthetic."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsem.errors import DataError, KvsemError, SettingError
from kvsem.results import RunDir, bootstrap, comparable, load_run, summarise

KL = "quality/kl_first_nats"
CONFIG = "model:\n  name: synthetic\n"


def row(request: str, arm: str, values: dict[str, Any] | None = None, group: Any = None) -> Any:
    common = {"request": request, "group": group, "arm": arm, "n_tokens": 9, "settings": {}}
    return common | (values or {})


def create(out: Path | None = None, root: Path = Path("runs"), config: str = CONFIG) -> RunDir:
    return RunDir.create(out, root, config=config, env={"threads": 1})


# --- run directories -----------------------------------------------------------------------


def test_eight_starts_in_one_second_get_eight_folders(tmp_path: Path) -> None:  # K3
    script = (
        "import sys, time; from pathlib import Path; from kvsem.results import RunDir\n"
        "time.sleep(max(0.0, float(sys.argv[2]) - time.time()))\n"
        "with RunDir.create(None, Path(sys.argv[1]), config='a: 1\\n', env={}) as run:\n"
        "    run.append({'request': 'q', 'arm': 'exact'}); print(run.path)\n"
    )
    start = str(time.time() + 6)
    command = [sys.executable, "-c", script, str(tmp_path), start]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    paths = {job.communicate(timeout=120)[0].strip() for job in jobs}
    assert all(job.returncode == 0 for job in jobs)
    assert len(paths) == 8
    assert all(len(list(RunDir.open(path).rows())) == 1 for path in paths)


def test_names_stay_apart_within_one_second(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvsem.results.time.strftime", lambda _: "20200101-000000")
    runs = [create(root=tmp_path) for _ in range(3)]
    for run in runs:
        run.close()
    assert [run.path.name for run in runs] == [
        "run-20200101-000000" + end for end in ("", "-2", "-3")
    ]


def test_an_empty_folder_is_accepted_and_described_first(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    with create(out) as run:
        assert run.path == out
        assert (out / "config.yaml").read_text() == CONFIG
        assert json.loads((out / "env.json").read_text()) == {"threads": 1}
        assert list(run.rows()) == []


@pytest.mark.parametrize("name", ["notes.txt", "config.yaml"])
def test_somebody_elses_folder_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("model:\n  name: other\n")
    with pytest.raises(SettingError) as caught:
        create(tmp_path)
    assert caught.value.field == "out"
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_as_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="a folder"):
        create(tmp_path / "file")


def test_two_writers_never_share_a_folder(tmp_path: Path) -> None:
    with create(tmp_path), pytest.raises(SettingError, match="no other run"):
        create(tmp_path)
    create(tmp_path).close()


def test_a_killed_run_resumes_and_keeps_its_rows(tmp_path: Path) -> None:  # K1, K5
    with create(tmp_path) as run:
        run.append(row("q1", "exact", {"text": "naïve\u2028line"}))
        run.append(row("q1", "epic"))
    samples = tmp_path / "samples.jsonl"
    whole = samples.read_bytes()
    samples.write_bytes(whole + b'{"request": "q2", "arm": "exa')
    assert len(list(RunDir.open(tmp_path).rows())) == 2
    assert samples.read_bytes() != whole  # reading changes nothing

    with create(tmp_path) as run:
        assert samples.read_bytes() == whole
        assert run.finished() == {("q1", "exact"), ("q1", "epic")}
        run.append(row("q2", "exact"))
    assert samples.read_bytes().startswith(whole)
    assert [r["request"] for r in RunDir.open(tmp_path).rows()] == ["q1", "q1", "q2"]


def test_rows_are_on_disk_when_the_process_is_killed(tmp_path: Path) -> None:  # K5
    script = (
        "import os, sys; from pathlib import Path; from kvsem.results import RunDir\n"
        "run = RunDir.create(Path(sys.argv[1]), config='a: 1\\n', env={})\n"
        "for i in range(5): run.append({'request': str(i), 'arm': 'exact'})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert len(list(RunDir.open(tmp_path / "out").rows())) == 5


def test_a_row_is_written_once(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.append(row("q1", "exact"))
        with pytest.raises(DataError, match="finished already"):
            run.append(row("q1", "exact"))


def test_reading_does_not_write(tmp_path: Path) -> None:
    create(tmp_path).close()
    with pytest.raises(DataError, match="reading"):
        RunDir.open(tmp_path).append(row("q", "exact"))
    with pytest.raises(DataError, match="not a run directory"):
        RunDir.open(tmp_path / "nowhere")


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    create(tmp_path).close()
    (tmp_path / "samples.jsonl").write_text('{"request": "q", "arm": "exact"}\nnonsense\n')
    with pytest.raises(DataError, match=r"samples.jsonl:2"):
        RunDir.open(tmp_path)


def test_files_are_strict_json(tmp_path: Path) -> None:
    broken = row("q", "epic", {KL: math.inf, "kv_error_rel_per_layer": [0.5, math.nan]})
    with create(tmp_path) as run:
        run.append(row("q", "exact", {KL: np.float32(0.5), "n": np.int64(3)}))
        run.append(broken)
        run.write_summary(summarise(run.rows(), {}, {}, {"bad": math.nan}))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    exact, epic = (json.loads(line, parse_constant=refuse) for line in lines)
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert exact[KL] == 0.5
    assert epic[KL] is None
    assert epic["non_finite"] == {KL: "inf"}
    assert epic["kv_error_rel_per_layer"] == [0.5, None]
    assert summary["status"]["non_finite"] == {"epic": {KL: 1}}


def test_the_summary_replaces_the_old_one_whole(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.write_summary({"arms": {}, "long": "x" * 9999})
        run.write_summary({"arms": {}})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"arms": {}}
    assert not list(tmp_path.glob(".*"))


def test_load_run_returns_what_was_written(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.append(row("q", "exact", {KL: 0.0}))
        killed = load_run(tmp_path)
        run.write_summary(summarise(run.rows(), {}, {"blend": {"ok": True}}, {"state": "finished"}))
    data = load_run(tmp_path)
    assert killed.summary["status"]["state"] == "unfinished"
    assert data.config == {"model": {"name": "synthetic"}}
    assert data.env == {"threads": 1}
    assert data.samples[KL].tolist() == [0.0]
    assert data.summary["status"]["state"] == "finished"
    assert data.arms == ["exact"]


# --- summary -------------------------------------------------------------------------------


def run_rows(n: int = 12, per_group: int = 1) -> Iterator[dict[str, Any]]:
    rng = random.Random(3)
    for i in range(n):
        hard = rng.random()
        for arm, base in (("epic", 0.1), ("exact", 0.0), ("exact_again", 0.0), ("none", 0.4)):
            value = base * (1 + hard + 0.1 * rng.random())
            values = {KL: value, "cost/ttft_ms": 5.0 + i}
            yield row(f"q{i:02d}", arm, values, f"d{i // per_group}")


def test_form_is_that_of_the_contract() -> None:
    support, status = {"blend": {"ok": True, "reason": ""}}, {"state": "finished", "n_requests": 12}
    summary = summarise(run_rows(), {"epic": 7.0, "unknown": 1.0}, support, status)
    assert set(summary) == {"arms", "pairs", "memory", "support", "status"}
    assert list(summary["arms"]) == ["exact", "exact_again", "epic", "none"]
    assert set(summary["arms"]["epic"][KL]) == {"mean", "median", "low", "high", "n"}
    assert set(summary["pairs"]["epic-none"][KL]) == {"mean", "low", "high", "n"}
    assert len(summary["pairs"]) == 12
    expected = {"mean": 7.0, "median": 7.0, "low": 7.0, "high": 7.0, "n": 1}
    assert summary["arms"]["epic"]["cost/build_ms"] == expected
    assert "cost/build_ms" not in summary["arms"]["none"]
    assert summary["support"] == support
    assert status.items() <= summary["status"].items()
    json.dumps(summary, allow_nan=False)


def test_means_medians_and_pairs_by_hand() -> None:
    values: dict[str, list[float | None]] = {"a": [1.0, 2.0, 6.0], "b": [0.5, None, 1.0]}
    rows = [
        row(f"q{i}", arm, {KL: v} if v is not None else {})
        for arm, column in values.items()
        for i, v in enumerate(column)
    ]
    summary = summarise(rows, {}, {}, {})
    a, difference = summary["arms"]["a"][KL], summary["pairs"]["a-b"][KL]
    assert (a["mean"], a["median"], a["n"]) == (3.0, 2.0, 3)
    assert summary["arms"]["b"][KL]["n"] == 2
    assert (difference["mean"], difference["n"]) == (2.75, 2)  # (0.5 + 5.0) / 2: q1 has no pair
    back = summary["pairs"]["b-a"][KL]
    assert back == {"mean": -2.75, "low": -difference["high"], "high": -difference["low"], "n": 2}


def test_missing_and_non_finite_are_left_out_and_counted() -> None:
    rows = [row(f"q{i}", "exact", {KL: 0.0, "quality/f1": 0.5}) for i in range(4)]
    rows += [row("q0", "epic", {KL: math.nan}), row("q1", "epic", {KL: math.inf})]
    rows += [row("q2", "epic", {KL: 2.0}), row("q3", "epic", {KL: None})]
    summary = summarise(rows, {}, {}, {})
    assert summary["arms"]["epic"][KL]["mean"] == 2.0
    assert summary["arms"]["epic"][KL]["n"] == 1
    assert "quality/f1" not in summary["arms"]["epic"]
    assert summary["status"]["non_finite"] == {"epic": {KL: 2}}
    assert summary["status"]["missing"] == {"epic": {KL: 1, "quality/f1": 4}}


def test_refused_candidates_are_summed_by_reason() -> None:
    rows = [row(f"q{i}", "epic", {"reuse/refused": {"number": i, "date": 1}}) for i in (1, 2)]
    rows.append(row("q1", "exact", {"reuse/refused": {}}))
    arms = summarise(rows, {}, {}, {})["arms"]
    assert arms["epic"]["reuse/refused"] == {"number": 3, "date": 2}
    assert arms["exact"]["reuse/refused"] == {}


def test_a_request_twice_in_one_arm_is_an_error() -> None:
    with pytest.raises(KvsemError, match="twice"):
        summarise([row("q", "exact"), row("q", "exact")], {}, {}, {})


def test_order_of_rows_changes_nothing() -> None:
    rows = list(run_rows(per_group=3))
    shuffled = sorted(rows, key=lambda r: (r["arm"], r["request"]))[::-1]
    first, second = (summarise(r, {}, {}, {}) for r in (rows, shuffled))
    assert first["pairs"] == second["pairs"]
    assert first["arms"] == second["arms"]


def test_no_rows_make_an_empty_summary() -> None:
    summary = summarise([], {"epic": 1.0}, {}, {"state": "unfinished"})
    assert summary["arms"] == summary["pairs"] == {}


# --- bootstrap -----------------------------------------------------------------------------


def slow_bootstrap(values: list[float], groups: list[str], resamples: int) -> tuple[float, float]:
    """The definition, written out: draw documents, pool their records, take the mean."""
    rng = random.Random(0)
    documents: dict[str, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        documents.setdefault(group, []).append(value)
    names, means = list(documents), []
    for _ in range(resamples):
        drawn = [v for name in rng.choices(names, k=len(names)) for v in documents[name]]
        means.append(sum(drawn) / len(drawn))
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


@pytest.mark.parametrize("per_group", [1, 2, 5])
def test_bootstrap_agrees_with_its_definition(per_group: int) -> None:
    rng = random.Random(per_group)
    values = [rng.expovariate(1.0) for _ in range(33)]  # the last document is smaller
    groups = [f"d{i // per_group}" for i in range(33)]
    low, high = bootstrap(np.array(values)[:, None], groups)
    slow = slow_bootstrap(values, groups, 20_000)
    assert (low[0], high[0]) == pytest.approx(slow, abs=0.03 * (slow[1] - slow[0]))


def test_columns_are_drawn_from_the_documents_that_have_them() -> None:
    rng = np.random.default_rng(5)
    values = rng.normal(size=(20, 2))
    values[12:, 1] = np.nan
    groups = [f"q{i}" for i in range(20)]
    low, high = bootstrap(values, groups)
    alone = bootstrap(values[:12, 1:], groups[:12])
    assert (low[1], high[1]) == (alone[0][0], alone[1][0])


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    low, high = bootstrap(rng.normal(size=(30, 600)), [f"q{i}" for i in range(30)])
    covered = float(((low <= 0) & (high >= 0)).mean())
    assert 0.90 <= covered <= 0.98


def test_clusters_widen_the_interval_of_clustered_data() -> None:
    rng = np.random.default_rng(11)
    values = np.repeat(rng.normal(size=10), 6)[:, None]  # six identical records a document
    low, high = bootstrap(values, [f"d{i // 6}" for i in range(60)])
    low_apart, high_apart = bootstrap(values, [f"q{i}" for i in range(60)])
    assert (high - low)[0] > 2 * (high_apart - low_apart)[0]


def test_bootstrap_is_deterministic_and_seeded() -> None:
    values, groups = np.arange(9.0)[:, None] ** 2, [f"q{i}" for i in range(9)]
    assert bootstrap(values, groups) == bootstrap(values, groups)
    assert bootstrap(values, groups) != bootstrap(values, groups, seed=1)


def test_a_group_is_not_mistaken_for_a_request() -> None:
    rows = [row("1", "exact", {KL: 0.0}), row("2", "exact", {KL: 1.0}, "1")]
    assert summarise(rows, {}, {}, {})["status"]["n_clusters"] == 2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), st.integers(1, 3))
def test_the_mean_lies_in_a_finite_interval(values: list[float], per_group: int) -> None:
    rows = [row(f"q{i}", "epic", {KL: v}, f"d{i // per_group}") for i, v in enumerate(values)]
    estimate = summarise(rows, {}, {}, {})["arms"]["epic"][KL]
    assert min(values) - 1e-6 <= estimate["low"] <= estimate["mean"]
    assert estimate["mean"] <= estimate["high"] <= max(values) + 1e-6
    assert estimate["n"] == len(values)


# --- settings ------------------------------------------------------------------------------


def test_settings_that_differ_are_told_from_those_that_do_not() -> None:  # K6
    rows = [
        row("q", "exact") | {"settings": {"dtype": "float32"}},
        row("q", "none") | {"settings": {"dtype": "float32", "context": "alone"}},
        row("q", "epic") | {"settings": {"dtype": "float32", "context": "alone", "ratio": 0.1}},
        row("r", "epic")
        | {"settings": {"dtype": "float32", "context": "in_company", "ratio": 0.1}},
    ]
    found = comparable(rows)
    assert found["equal"] == {"dtype": "float32"}
    assert found["differ"] == {"ratio": {"none": None, "epic": 0.1}}  # exact has no such thing
    assert found["mixed"] == {"context": {"none": ["alone"], "epic": ["alone", "in_company"]}}
    assert summarise(rows, {}, {}, {})["status"]["settings"] == found


def test_a_setting_of_another_type_is_another_setting() -> None:
    rows = [row("q", "a") | {"settings": {"x": 1}}, row("q", "b") | {"settings": {"x": "1"}}]
    assert comparable(rows)["differ"] == {"x": {"a": 1, "b": "1"}}
