"""A user's mistake is one line that says what would be right, exit code 2, and no traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.run import entry

ROOT = Path(__file__).parents[2]
GOOD = {"id": "a", "passages": ["One passage."], "question": "Which?"}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.jsonl"
    path.write_text(json.dumps(GOOD) + "\n{not json\n", encoding="utf-8")
    return path


def line_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that ``arguments`` lead to."""
    assert entry(arguments) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    lines = seen.err.strip().splitlines()
    assert len(lines) == 1, seen.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in seen.err
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recompute_ration=0.1"], ["recompute_ration", "did you mean 'recompute_ratio'"]),
        (["+recompute_ration=0.1"], ["recompute_ration", "did you mean 'recompute_ratio'"]),
        (["recompute_ratio=1.5"], ["recompute_ratio", "1.5", "0.0 to 1.0"]),
        (["recompute_ratio=lots"], ["recompute_ratio", "lots", "0 to 1"]),
        (["threads=0"], ["threads", "0", "from 1"]),
        (["arms=[cachblend]"], ["arms", "cachblend", "cacheblend"]),
        (["arms=[epic"], ["arms=[epic", "brackets closed"]),
        (["model=nowhere"], ["model", "nowhere", "smollm2", "hub"]),
        (["workload=nowhere"], ["workload", "nowhere", "jsonl", "pydoc"]),
        (["context=nowhere"], ["context", "nowhere", "in_company"]),
        (["workload.limt=3"], ["workload.limt", "limit"]),
        (["+workload.limt=3"], ["workload.limt", "limit"]),
        (["workload.limit=-3"], ["workload.limit", "-3"]),
        (["workload=jsonl"], ["path"]),
        (["model=hub"], ["model.name", "no default"]),
        (["model=hub", "model.name=/nowhere", "memory.pool_tokens=10"], ["pool_tokens", "16 up"]),
        (["metrics=[]"], ["metrics", "divergence"]),
        (["threads=true"], ["threads", "whole number"]),
        (["gate.min_score=0.5"], ["gate.min_score", "gate=NAME", "threshold"]),
        (["tracking=wandb", "tracking.mode=foo"], ["tracking.mode", "foo", "offline"]),
        (["out=/proc/nowhere/x", "arms=[]"], ["out", "/proc/nowhere/x", "can be written"]),
        (["workload=jsonl", "workload.path=/nowhere/x.jsonl"], ["/nowhere/x.jsonl"]),
    ],
)
def test_a_bad_setting_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    line = line_of(capsys, *arguments)
    for word in words:
        assert word in line


def test_an_unreadable_line_is_named_with_its_number(
    capsys: pytest.CaptureFixture[str], broken: Path
) -> None:
    assert "line 2" in line_of(capsys, "workload=jsonl", f"workload.path={broken}")


def test_a_missing_model_says_where_it_was_looked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = line_of(capsys, "model=hub", f"model.name={tmp_path}/no-model", f"out={tmp_path}/out")
    assert "no-model" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.ci
def test_what_only_the_model_can_tell_is_one_line_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A prompt past the context, and an index for vectors of another dimension."""
    path = tmp_path / "long.jsonl"
    long = GOOD | {"id": "long", "passages": ["word " * 9000]}
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(long) + "\n", encoding="utf-8")
    out = f"out={tmp_path}/out"
    line = line_of(capsys, "workload=jsonl", f"workload.path={path}", out, "arms=[none]")
    assert "request 'long' has" in line
    assert "context of 8192" in line
    line = line_of(capsys, "index=flat", "+index.dim=128", out, "arms=[none]")
    assert "128" in line
    assert "384" in line
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_something_else_is_left_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "diary.txt").write_text("mine", encoding="utf-8")
    line = line_of(capsys, f"out={tmp_path}")
    assert "out" in line
    assert [p.name for p in tmp_path.iterdir()] == ["diary.txt"]


def test_the_exit_code_and_the_line_hold_for_the_script_itself() -> None:
    run = [sys.executable, "experiments/run.py", "recompute_ratio=7"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "error: recompute_ratio=7.0: expected a number from 0.0 to 1.0"
    ]


def test_help_lists_settings_choices_and_examples() -> None:
    run = [sys.executable, "experiments/run.py", "--help"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    for word in ("recompute_ratio", "jsonl, pydoc", "cacheblend", "--multirun"):
        assert word in done.stdout
