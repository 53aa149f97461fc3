"""The README's snippet runs as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def snippet() -> str:
    return README.split("## In ten lines", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]


def test_the_snippet_is_at_most_ten_lines() -> None:
    assert len([line for line in snippet().splitlines() if line.strip()]) <= 10


@pytest.mark.slow
@pytest.mark.ci
def test_the_snippet_reuses_both_passages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", snippet()],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "passage" in done.stdout
    counts = done.stdout.strip().splitlines()[-1]
    assert "'prefix': 0" not in counts
    assert "'chunk': 0" not in counts
