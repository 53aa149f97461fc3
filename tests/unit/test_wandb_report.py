"""The W&B Report, built offline: no network, no login. Numbers are synthetic."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsem.cli import main
from kvsem.errors import KvsemError, SettingError
from kvsem.results import RunData, RunDir, load_run, summarise
from kvsem.tracking import scalars
from kvsem.wandb_report import build, markdown, send, specification

KL = "quality/kl_first_nats"
NAMES = ("ratio=0.15,x<1", "it's a run")  # the library rewrites = and < inside quotes
CONFIG = "model: {name: tiny}\nworkload: {_target_: kvsem.workloads.jsonl.JsonlWorkload}\n"


def make(path: Path, scale: float) -> RunDir:
    with RunDir.create(path, config=CONFIG, env={"cpu": "Synthetic", "threads": 1}) as run:
        for i in range(4):
            for arm, kl, flops in (("exact", 0.0, 1.0), ("epic", 0.1 * (i + 1) * scale, 0.25)):
                row: dict[str, Any] = {"request": f"q{i}", "group": None, "arm": arm}
                row |= {KL: kl, "cost/flop_ratio": flops, "quality/answer_nll_nats": 1 + kl}
                run.append(row | {"reuse/refused": {"number": 1}})
        support = {"moved_chunk": {"ok": False, "reason": "learned positions"}}
        status = {"state": "finished", "n_requests": 4, "notes": ["a | note"]}
        run.write_summary(summarise(run.rows(), {}, support, status))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[RunData]:
    return [load_run(make(tmp_path / name, i + 1).path) for i, name in enumerate(NAMES)]


@pytest.fixture(autouse=True)
def _no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a connection was tried")

    for name in [name for name in os.environ if name.startswith("WANDB") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def spec(runs: list[RunData], **more: Any) -> dict[str, Any]:
    return specification(build(runs, "project", "entity", **more))


def blocks(found: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    return (block for block in found["spec"]["blocks"] if block["type"] == kind)


def panels(found: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [
        panel["config"]
        for grid in blocks(found, "panel-grid")
        for panel in grid["metadata"]["panelBankSectionConfig"]["panels"]
        if panel["viewType"] == kind
    ]


def test_the_report_says_where_it_goes_and_what_it_is_of(runs: list[RunData]) -> None:
    found = spec(runs)
    assert (found["entity"], found["project"]) == ("entity", "project")
    assert all(name in found["title"] for name in NAMES)
    assert "tiny on JsonlWorkload" in found["description"]
    headings = [block["children"][0]["text"] for block in blocks(found, "heading")]
    assert headings == [*NAMES, "Panels", "Settings"]
    assert spec(runs, title="Ratios")["title"] == "Ratios"


def test_tables_hold_the_means_of_the_files(runs: list[RunData]) -> None:
    _, *tables = [block["content"] for block in blocks(spec(runs), "markdown-block")]
    assert tables == [markdown(run.summary) for run in runs]
    head, _, exact, epic = tables[0].splitlines()
    assert head.startswith("| arm | n | KL first (nats) |")
    assert "FLOP ratio" in head  # no quality without its cost
    assert exact.startswith("| `exact` | 4 | 0 (0 … 0) |")
    assert epic.startswith("| `epic` | 4 | 0.25 (0.15 … 0.35) | 0.25 (0.15 … 0.35) | 0.25 (")
    assert epic.count("|") == head.count("|")


def test_notes_and_what_is_off_are_in_it(runs: list[RunData]) -> None:
    text = json.dumps(spec(runs)["spec"])
    assert "a | note" in text
    assert "moved_chunk is off: learned positions" in text


def test_panels_ask_for_names_that_were_mirrored(runs: list[RunData]) -> None:
    mirrored = set(scalars(runs[0].summary))
    bars = [name for panel in panels(spec(runs), "Bar Chart") for name in panel["metrics"]]
    assert {f"epic/{KL}", "epic/cost/flop_ratio", f"exact/{KL}"} <= set(bars)
    assert set(bars) <= mirrored
    (scatter,) = panels(spec(runs), "Scatter Plot")  # exact is no method
    assert scatter["xAxis"].removeprefix("summary:") in mirrored
    assert scatter["yAxis"] == f"summary:epic/{KL}"


def test_panels_show_these_runs_and_no_others(runs: list[RunData]) -> None:
    grids = list(blocks(spec(runs), "panel-grid"))
    assert len(grids) == 2
    for grid in grids:
        (runset,) = grid["metadata"]["runSets"]
        (chosen,) = runset["filters"]["filters"]
        assert chosen["key"] == {"section": "run", "name": "displayName"}
        assert (chosen["op"], chosen["value"]) == ("IN", list(NAMES))
        assert not chosen["disabled"]


def test_a_title_has_a_limit(runs: list[RunData]) -> None:
    with pytest.raises(SettingError, match="at most 128 characters"):
        build(runs, "project", "entity", "x" * 129)
    assert len(build(runs * 20, "project", "entity").title) == 128


def test_without_a_key_nothing_is_sent_and_nobody_is_asked(
    runs: list[RunData], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(KvsemError, match="no W&B API key"):
        send(build(runs, "project", "entity"))


def test_a_failure_at_wandb_is_one_line(
    runs: list[RunData], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def save(self) -> None:
            raise OSError("no route\nto host")

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with pytest.raises(KvsemError, match=r"^W&B did not take the report: no route$"):
        send(Broken())  # type: ignore[arg-type]


def test_without_the_library_one_line_says_what_to_install(
    runs: list[RunData], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith("wandb_workspaces")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(KvsemError, match=r"pip install 'kvsem\[report\]'"):
        build(runs, "project", "entity")


def test_the_command_prints_it_or_says_that_there_is_no_key(
    runs: list[RunData], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(run.path) for run in runs]
    assert main(["report", "--wandb", "--dry-run", "--project", "p", *paths]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["entity"], printed["project"]) == ("", "p")
    assert main(["report", "--wandb", *paths]) == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert done.err.startswith("error: no W&B API key")
    assert done.err.count("\n") == 1
