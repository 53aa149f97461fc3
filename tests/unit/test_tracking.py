"""W&B as a mirror: real offline runs, no network, no login. Numbers are synthetic."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsem.errors import SettingError
from kvsem.results import RunDir, summarise
from kvsem.tracking import NoTracking, WandbTracking, scalars, track

CONF = Path(__file__).parents[2] / "conf" / "tracking"
KL = "quality/kl_first_nats"


def make(path: Path) -> RunDir:
    with RunDir.create(path, config="model:\n  name: tiny\n", env={"threads": 1}) as run:
        for i in range(3):
            for arm, kl in (("exact", 0.0), ("epic", 0.1 * (i + 1))):
                row: dict[str, Any] = {"request": f"q{i}", "group": None, "arm": arm, "text": "hi"}
                row |= {KL: kl, "settings": {"seed": 0}, "reuse/chunk_tokens": 7}
                row |= {"reuse/refused": {"number": 1}, "kv_error_rel_per_layer": [0.1, kl]}
                run.append(row)
        run.write_summary(summarise(run.rows(), {"epic": 2.5}, {}, {"state": "finished"}))
    return run


@pytest.fixture
def quiet_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("WANDB") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tmp_path


def test_configs_name_their_classes_and_parameters() -> None:
    expected = {"none": NoTracking(), "wandb": WandbTracking()}
    assert {path.stem for path in CONF.glob("*.yaml")} == set(expected)
    for name, default in expected.items():
        values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
        target = values.pop("_target_")
        assert target == f"kvsem.tracking.{type(default).__name__}"
        assert type(default)(**values | {"tags": ()} if values else {}) == default


def test_a_wrong_mode_is_named() -> None:
    with pytest.raises(SettingError, match=r"tracking.mode='onlin'"):
        WandbTracking(mode="onlin")  # type: ignore[arg-type]


def test_scalars_are_the_summary() -> None:
    estimate = {"mean": 0.5, "median": 0.4, "low": 0.1, "high": 0.9, "n": 3}
    flat = scalars({"arms": {"epic": {KL: estimate, "reuse/refused": {"number": 2}}}})
    assert flat == {
        f"epic/{KL}": 0.5,
        f"epic/{KL}/median": 0.4,
        f"epic/{KL}/low": 0.1,
        f"epic/{KL}/high": 0.9,
        f"epic/{KL}/n": 3,
        "epic/reuse/refused/number": 2,
    }


def written_in(log: Path, word: bytes) -> bool:
    """W&B's own process may write a little later."""
    for _ in range(100):
        if word in log.read_bytes():
            return True
        time.sleep(0.2)
    return False


def test_wandb_holds_the_numbers_of_the_files(
    quiet_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    mirrored: dict[str, dict[str, Any]] = {}  # by W&B run
    finish = wandb.Run.finish

    def remember(remote: wandb.Run) -> None:
        mirrored[remote.id] = {"name": remote.name, **remote.config, **remote.summary}
        finish(remote)

    monkeypatch.setattr(wandb.Run, "finish", remember)
    runs = [make(quiet_home / name) for name in ("first", "second")]
    for run in runs:
        track(run, WandbTracking())
    assert len(mirrored) == 2  # K4: a sweep's runs stay apart
    for run, remote in zip(runs, mirrored.values(), strict=True):
        written = json.loads((run.path / "summary.json").read_text())
        assert remote["name"] == run.path.name
        assert remote["config"] == {"model": {"name": "tiny"}}
        assert scalars(written).items() <= remote.items()
        assert remote[f"epic/{KL}"] == written["arms"]["epic"][KL]["mean"]
        (log,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
        assert written_in(log, f"epic/{KL}".encode())
        (table,) = (run.path / "wandb").glob("offline-run-*/files/media/table/*.json")
        assert len(json.loads(table.read_text())["data"]) == 6


SCRIPT = """
import sys
from kvsem.tracking import WandbTracking, track
track(sys.argv[1], WandbTracking(mode=None, init_timeout_s=3.0))
print("done", "torch" in sys.modules)
"""


def start(home: Path, path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and k != "NETRC"}
    clean |= {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), **env}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)],
        env=clean,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,  # no terminal to ask on
        check=False,
    )


def test_without_key_and_terminal_it_goes_offline(tmp_path: Path) -> None:  # J2
    run = make(tmp_path / "run")
    done = start(tmp_path, run.path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("done")
    assert "Traceback" not in done.stderr
    assert "login" not in done.stderr
    assert list((run.path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize(
    "env",
    [
        {"WANDB_MODE": "online"},  # asked for, but there is no key
        {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},  # nobody answers
    ],
)
def test_a_failure_is_one_warning_and_the_files_stay(tmp_path: Path, env: dict[str, str]) -> None:
    run = make(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    done = start(tmp_path, run.path, **env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if "tracking failed" in line]) == 1
    assert {name: (run.path / name).read_bytes() for name in before} == before


def test_any_mirror_may_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def mirror(self, run: object) -> None:
            raise OSError("no route\nto host")

    run = make(tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        track(run, Broken())
    (record,) = caplog.records
    assert record.getMessage() == f"tracking failed (no route); the run is complete in {run.path}"


def test_none_tracks_nothing(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    before = sorted(path.name for path in run.path.iterdir())
    track(run, NoTracking())
    assert sorted(path.name for path in run.path.iterdir()) == before


def test_wandb_is_imported_only_where_it_is_used(tmp_path: Path) -> None:
    script = "import sys, kvsem.tracking, kvsem.report; assert 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
