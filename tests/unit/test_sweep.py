"""Sweeps: names, states, failures and launchers. `perform` is replaced: no model, no numbers."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig

from experiments.compose import config_text
from experiments.run import entry
from experiments.sweep import LONGEST, Job, failures, job_name, jobs_of, sweep_folder
from kvsem.errors import SettingError
from kvsem.results import STATUS, RunDir, read_status, write_status

CONF = Path(__file__).parents[2] / "conf"
LAUNCHERS = sorted(path.stem for path in (CONF / "hydra" / "launcher").glob("*.yaml"))


def jobs(folder: Path, *arguments: str) -> list[Job]:
    return jobs_of(OverridesParser.create().parse_overrides(list(arguments)), folder)


# --- names -----------------------------------------------------------------------------------


def test_a_job_is_named_after_what_is_swept(tmp_path: Path) -> None:
    found = jobs(tmp_path, "seed=1,2", "threads=1", "recompute_ratio=0.05,0.1", "out=x")
    assert [job.path.name for job in found] == [
        f"recompute_ratio={ratio},seed={seed}" for seed in (1, 2) for ratio in ("0.05", "0.1")
    ]
    assert found[0].overrides == ("seed=1", "threads=1", "recompute_ratio=0.05")
    assert found[0].arguments[-1] == f"out='{tmp_path}/recompute_ratio=0.05,seed=1'"


def test_the_order_of_settings_and_of_values_changes_no_name(tmp_path: Path) -> None:
    first = {job.path for job in jobs(tmp_path, "seed=1,2", "recompute_ratio=0.05,0.1")}
    again = {job.path for job in jobs(tmp_path, "recompute_ratio=0.1,0.05", "seed=2,1")}
    assert first == again


def test_lists_and_paths_make_one_folder_each(tmp_path: Path) -> None:
    found = jobs(tmp_path, "arms=[none],[none,epic]", "workload.path=/a/b.jsonl,/a/b-jsonl")
    assert len({job.path for job in found}) == 4
    assert {job.path.parent for job in found} == {tmp_path}
    assert all(re.fullmatch(r"[\w.,=+@-]+", job.path.name) for job in found)
    assert found[-1].path.name.startswith("arms=none,epic,workload.path=-a-b-jsonl-")


def test_a_point_that_is_named_twice_is_one_job(tmp_path: Path) -> None:
    assert len(jobs(tmp_path, "seed=1,2,1")) == 2
    assert [job.path.name for job in jobs(tmp_path, "seed=1,2", "seed=3")] == ["job"]


@pytest.mark.parametrize("argument", ["out=a,b", "memory.salt=s3cret,other"])
def test_what_no_job_can_be_named_after_is_refused(tmp_path: Path, argument: str) -> None:
    with pytest.raises(SettingError, match="one value in a sweep") as caught:
        jobs(tmp_path, argument)
    assert "s3cret" not in str(caught.value)


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=150)


@given(st.dictionaries(st.sampled_from(["seed", "arms", "a.b"]), WORDS, min_size=1), WORDS)
def test_a_name_is_a_folder_and_tells_values_apart(values: dict[str, str], other: str) -> None:
    name = job_name(values)
    assert Path(name).name == name
    assert name.isascii()
    assert len(name) <= LONGEST + 9
    key = next(iter(values))
    assert (job_name(values | {key: other}) == name) == (values[key] == other)


# --- the folder of a sweep -------------------------------------------------------------------


def test_sweeps_without_a_folder_get_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # K3
    monkeypatch.setattr("experiments.sweep.ROOT", tmp_path)
    assert len({sweep_folder(None) for _ in range(4)}) == 4


def test_a_folder_that_cannot_hold_a_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    RunDir.create(tmp_path / "run", config="a: 1\n", env={}).close()
    for out, words in (("file", "a folder"), ("run", "a run's"), ("file/x", "can be written")):
        with pytest.raises(SettingError, match=words):
            sweep_folder(str(tmp_path / out))
    with pytest.raises(SettingError, match="can be written"):
        sweep_folder("/proc/nowhere/x")


def test_a_status_does_not_keep_a_run_from_its_folder(tmp_path: Path) -> None:
    write_status(tmp_path / "job", "running", ["seed=1"])
    RunDir.create(tmp_path / "job", config="a: 1\n", env={}).close()
    assert read_status(tmp_path / "job") == {"state": "running", "overrides": ["seed=1"]}


def test_every_way_not_to_finish_has_its_line(tmp_path: Path) -> None:
    found = jobs(tmp_path, "seed=1,2,3,4,5")
    for job, state in zip(found, ("finished", "running", "failed", "finished"), strict=False):
        write_status(job.path, state, job.overrides, **{"error": "no"} if state == "failed" else {})  # type: ignore[arg-type]
    assert failures(found, {found[3]: "another run"}) == [
        "seed=2: it ended without a word (killed?)",
        "seed=3: no",
        "seed=4: another run",
        "seed=5: it was not started",
    ]


# --- a whole sweep ---------------------------------------------------------------------------

BROKEN: dict[int, Exception] = {2: SettingError("seed", 2, "odd"), 4: ZeroDivisionError("by\nzero")}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The seeds that were run, by a `perform` that makes a run's folder or raises."""
    seeds: list[int] = []

    def perform(cfg: DictConfig) -> None:
        seeds.append(cfg.seed)
        assert read_status(Path(cfg.out))["state"] == "running"
        if cfg.seed in BROKEN:
            raise BROKEN[cfg.seed]
        with RunDir.create(Path(cfg.out), config=config_text(cfg), env={}) as run:
            if not run.finished():
                run.append({"request": "q", "arm": "exact"})

    monkeypatch.setattr("experiments.run.perform", perform)
    yield seeds
    GlobalHydra.instance().clear()


def sweep(out: Path, *arguments: str) -> int:
    return entry(["--multirun", f"out={out}", "arms=[none]", *arguments])


def test_a_failing_job_does_not_end_the_sweep_and_all_failures_are_listed(
    ran: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # K2
    assert sweep(tmp_path, "seed=1,2,3,4,5", "memory.salt=s3cret") == 1
    assert ran == [1, 2, 3, 4, 5]
    states = {n: read_status(tmp_path / f"seed={n}") for n in ran}
    assert [states[n]["state"] for n in ran] == [
        "finished", "failed", "finished", "failed", "finished",
    ]  # fmt: skip
    assert states[2]["error"] == "seed=2: expected odd"
    assert "traceback" not in states[2]
    assert states[4]["error"] == "ZeroDivisionError: by zero"
    assert "Traceback" in states[4]["traceback"]
    seen = capsys.readouterr()
    assert "5 jobs, 0 finished before, 5 to run" in seen.out
    assert "3 of 5 jobs finished" in seen.out
    lines = seen.err.splitlines()
    assert "failed: seed=2: seed=2: expected odd" in lines
    assert "failed: seed=4: ZeroDivisionError: by zero" in lines
    assert "Traceback" not in seen.err
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "s3cret" not in written + seen.out + seen.err


def test_the_same_sweep_again_runs_what_is_not_finished(
    ran: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(tmp_path, "seed=1,2,3")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("seed=[13]/*")}
    assert len(before) >= 8
    ran.clear()
    assert sweep(tmp_path, "seed=1,2,3") == 1
    assert ran == [2]
    write_status(tmp_path / "seed=3", "running", [])  # as a killed one leaves it
    assert sweep(tmp_path, "seed=3,1,5") == 0
    assert ran == [2, 3, 5]
    assert "3 jobs, 1 finished before, 2 to run" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before if path.name != STATUS} == {
        path: time for path, time in before.items() if path.name != STATUS
    }


def test_a_job_of_other_settings_is_left_alone_and_said(
    ran: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(tmp_path, "seed=1")
    sweep(tmp_path, "seed=1,3")
    before = {path: path.read_bytes() for path in tmp_path.glob("seed=1/*")}
    ran.clear()
    assert sweep(tmp_path, "seed=1,3", "baselines=measure") == 1
    assert ran == []
    assert "seed=1: out=" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_a_sweep_may_stand_in_a_file(ran: list[int], tmp_path: Path) -> None:
    assert sweep(tmp_path, '+hydra.sweeper.params={seed: "7,9"}') == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed=7", "seed=9"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recompute_ration=0.1,0.2"], ["recompute_ration", "did you mean"]),
        (["model=smollm2,nowhere"], ["model", "nowhere", "hub"]),
        (["context=alone,nowhere"], ["context", "nowhere", "in_company"]),
        (["seed=interval(1,2)"], ["INTERVAL_SWEEP", "not support"]),
        (["seed=1,2", "hydra/launcher=nowhere"], ["launcher", "nowhere", "slurm"]),
    ],
)
def test_a_mistake_in_the_command_ends_it_before_anything_runs(
    ran: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    assert sweep(tmp_path, *arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert ran == []


# --- launchers -------------------------------------------------------------------------------


@pytest.fixture
def _conf() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def plugin(name: str) -> Any:
    """The class of a launcher; skips where it is not installed."""
    target = yaml.safe_load((CONF / "hydra" / "launcher" / f"{name}.yaml").read_text())["_target_"]
    module, _, kind = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), kind)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed: pip install -e '.[{name.partition('_')[0]}]'")


def test_there_are_launchers() -> None:
    assert LAUNCHERS == ["processes", "ray_tasks", "slurm"]


@pytest.mark.usefixtures("_conf")
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_composes_for_its_plugin(name: str) -> None:
    kind = plugin(name)
    overrides = [f"hydra/launcher={name}", "threads=3"]
    cfg = compose("run", overrides=overrides, return_hydra_config=True)
    settings = {key: value for key, value in cfg.hydra.launcher.items() if key != "_target_"}
    assert kind(**settings)
    if name != "processes":  # a task asks for as many cores as it has threads
        remote = settings.get("ray", {"remote": {}})["remote"]
        assert settings.get("cpus_per_task", remote.get("num_cpus")) == 3


def test_a_launcher_that_is_not_installed_says_what_to_install(
    ran: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher"):
        pytest.skip("the plugin is installed")
    assert sweep(tmp_path, "seed=1,2", "hydra/launcher=slurm") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "pip install -e '.[slurm]'" in line


def test_help_says_how_a_sweep_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry(["--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--multirun", "out=runs/ratios", "hydra/launcher=processes", "status.json"):
        assert word in text


def test_states_are_whole_json(tmp_path: Path) -> None:
    write_status(tmp_path / "a" / "job", "failed", ["seed=1"], error="naïve")
    assert json.loads((tmp_path / "a" / "job" / STATUS).read_text())["error"] == "naïve"
    assert read_status(tmp_path) == {}
