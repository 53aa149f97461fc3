"""Sweeps and resuming, for real: a tiny saved model, real runs, kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.run import entry
from kvsem.results import RunDir, load_run, read_status
from tests.tiny import prose, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.ci]
ROWS = 2 * 3  # requests, each in exact, exact_again and one arm
# The experiment in a process that kills itself once it has written so many rows.
DYING = """
import os, signal, sys
from kvsem.results import RunDir
append, left = RunDir.append, [int(sys.argv[1])]
def last(run, row):
    append(run, row)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
RunDir.append = last
from experiments import run
if "--multirun" in sys.argv:  # as in the test that starts it again
    run.write_plots = run.write_report = lambda run: None
run.entry(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny model and two requests, as a user of a model of their own would name them."""
    folder = tmp_path_factory.mktemp("given")
    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    records = [
        {"id": str(n), "passages": [prose(n), prose(n + 1)], "question": "Which bridge?"}
        for n in range(2)
    ]
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return [
        "model=hub", f"model.name={folder / 'model'}", "workload=jsonl", f"workload.path={path}",
        "arms=[epic]", "embedder=hashing", "context=behind_system", "metrics=[divergence]",
        "threads=1",
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("KVSEM_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    torch.set_num_threads(1)


def killed_after(n_rows: int, *arguments: str) -> None:
    command = [sys.executable, "-c", DYING, str(n_rows), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == -signal.SIGKILL, done.stderr


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_twelve_jobs_killed_after_five_run_seven_more(
    settings: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # K1
    for name in ("write_plots", "write_report"):  # drawing is most of a tiny run's time
        monkeypatch.setattr(f"experiments.run.{name}", lambda run: None)
    ratios = [str(n / 100) for n in range(5, 65, 5)]
    command = ["--multirun", *settings, f"recompute_ratio={','.join(ratios)}", f"out={tmp_path}"]
    killed_after(5 * ROWS + 4, *command)
    folders = [tmp_path / f"recompute_ratio={ratio}" for ratio in ratios]
    states = [read_status(folder).get("state") for folder in folders]
    assert states == ["finished"] * 5 + ["running"] + [None] * 6
    before = [contents(folder) for folder in folders[:5]]
    torn = (folders[5] / "samples.jsonl").read_bytes()
    assert torn.count(b"\n") == 4

    assert entry(command) == 0
    assert "12 jobs, 5 finished before, 7 to run" in capsys.readouterr().out
    assert [contents(folder) for folder in folders[:5]] == before
    assert (folders[5] / "samples.jsonl").read_bytes().startswith(torn)
    assert {read_status(folder)["state"] for folder in folders} == {"finished"}
    runs = [load_run(folder) for folder in folders]
    assert [run.config["recompute_ratio"] for run in runs] == [float(ratio) for ratio in ratios]
    assert {len(run.samples) for run in runs} == {ROWS}
    recomputed = [run.summary["arms"]["epic"]["reuse/recomputed_tokens"]["mean"] for run in runs]
    assert recomputed == sorted(recomputed)
    assert recomputed[0] < recomputed[-1]

    after = contents(tmp_path)
    assert entry(command) == 0
    assert "12 finished before, 0 to run" in capsys.readouterr().out
    assert contents(tmp_path) == after


def test_a_killed_run_is_complete_to_its_last_row_and_mirrored_once(
    settings: list[str], tmp_path: Path
) -> None:  # K5
    out = tmp_path / "run"
    command = [*settings, f"out={out}", "tracking=wandb"]
    killed_after(4, *command)
    torn = (out / "samples.jsonl").read_bytes()
    assert len(list(RunDir.open(out).rows())) == 4
    assert not (out / "wandb").exists()  # the files come first
    assert entry(command) == 0
    assert (out / "samples.jsonl").read_bytes().startswith(torn)
    assert len(load_run(out).samples) == ROWS
    assert load_run(out).summary["status"]["state"] == "finished"
    assert len(list((out / "wandb").glob("offline-run-*/*.wandb"))) == 1


def test_a_cache_that_fills_does_not_resume(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*settings, f"out={tmp_path}", "workload.ingest=false"]
    assert entry(command) == 0
    samples = tmp_path / "samples.jsonl"
    samples.write_bytes(b"".join(samples.read_bytes().splitlines(keepends=True)[:4]))
    capsys.readouterr()
    assert entry(command) == 2
    assert "a cache that fills cannot resume" in capsys.readouterr().err


def test_the_jobs_of_a_sweep_are_runs_of_one_group(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # K4
    import wandb

    seen: dict[str, wandb.Run] = {}
    artifacts: dict[str, wandb.Artifact] = {}
    finish, log_artifact = wandb.Run.finish, wandb.Run.log_artifact

    def remember(run: wandb.Run) -> None:
        seen[str(run.name)] = run
        finish(run)

    def logged(run: wandb.Run, artifact: wandb.Artifact) -> Any:
        artifacts[str(run.name)] = artifact
        return log_artifact(run, artifact)

    monkeypatch.setattr(wandb.Run, "finish", remember)
    monkeypatch.setattr(wandb.Run, "log_artifact", logged)
    out = tmp_path / "ratios"
    swept = f"recompute_ratio={','.join(ratios := ['0.1', '0.2', '0.3'])}"
    assert entry(["--multirun", *settings, swept, f"out={out}", "tracking=wandb"]) == 0
    assert sorted(seen) == [f"recompute_ratio={ratio}" for ratio in ratios]
    assert len({run.id for run in seen.values()}) == 3
    for name, run in seen.items():
        assert run.group == "ratios"
        assert run.config["config"]["recompute_ratio"] == float(name.split("=")[1])
        assert len(list((out / name / "wandb").glob("offline-run-*/*.wandb"))) == 1
        held = artifacts[name].manifest.entries
        assert {"samples.jsonl", "summary.json", "report.html", "config.yaml"} <= set(held)
        assert any(path.startswith("plots/") for path in held)
    assert len({artifact.name for artifact in artifacts.values()}) == 3


@pytest.mark.skipif(
    find_spec("hydra_plugins.hydra_joblib_launcher") is None,
    reason="hydra-joblib-launcher is not installed: pip install -e '.[joblib]'",
)
def test_jobs_side_by_side_have_their_own_threads_and_a_failure_of_their_own(
    settings: list[str], tmp_path: Path
) -> None:
    swept = [*settings[:-1], "threads=1,2,0", "hydra/launcher=processes", f"out={tmp_path}"]
    command = [sys.executable, "experiments/run.py", "--multirun", *swept]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "failed: threads=0: threads=0: expected a whole number" in done.stderr
    for n in (1, 2):
        run = load_run(tmp_path / f"threads={n}")
        assert run.env["threads"] == n
        assert len(run.samples) == ROWS
