"""A metric outside the repository, found with ``--config-dir``; what a run says is kept."""

import json
from pathlib import Path

import pytest

from experiments.run import entry
from tests.tiny import prose, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.ci]
METRIC = """
class Rank:
    def __init__(self) -> None:
        self.higher_is_better = {"quality/first_rank": False}

    def compare(self, exact, arm):
        token = exact.logits[0].argmax()
        return {"quality/first_rank": float((arm.logits[0] > arm.logits[0][token]).sum()) + 1}
"""
NOTE = "context=in_company: no company for 3 of 3 passages"


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run of a tiny saved model, settings ahead of the flag as well as behind it."""
    monkeypatch.setenv("KVSEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "mine")
    (tmp_path / "mine/conf/metric").mkdir(parents=True)
    (tmp_path / "mine/outside_rank.py").write_text(METRIC, encoding="utf-8")
    own = tmp_path / "mine/conf/metric/rank.yaml"
    own.write_text("_target_: outside_rank.Rank\n", encoding="utf-8")
    model = tmp_path / "model"
    tiny_model("llama").save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    passages = [prose(seed) for seed in range(3)]
    row = {"id": "a", "passages": passages, "question": "What was built?"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row), encoding="utf-8")
    return [
        "--config-dir", str(tmp_path / "mine/conf"), "metrics=[divergence,rank]", "model=hub",
        f"model.name={model}", "workload=jsonl", f"workload.path={tmp_path}/a.jsonl",
        "arms=[none]", "embedder=hashing", "threads=1",
    ]  # fmt: skip


def test_a_metric_from_outside_is_shown_and_notes_are_kept(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert entry([*arguments, f"out={out}"]) == 0
    seen = capsys.readouterr()
    assert "first_rank" in seen.out
    assert "F1" not in seen.out  # nothing in it
    assert seen.err.count(NOTE) == 1
    found = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert found["arms"]["none"]["quality/first_rank"]["mean"] >= 1
    assert any(NOTE in note for note in found["status"]["notes"])
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<th>first_rank<small>own metric</small></th>" in page
    assert NOTE in page

    assert entry([*arguments, f"out={out}"]) == 0  # nothing is left to do
    again = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert again["status"]["notes"] == found["status"]["notes"]

    assert entry([*arguments, f"out={tmp_path}/other"]) == 0
    (tmp_path / "other/summary.json").unlink()  # as if it had been killed ahead of that
    assert entry([*arguments, f"out={tmp_path}/other"]) == 0
    other = json.loads((tmp_path / "other/summary.json").read_text(encoding="utf-8"))
    assert any("1 requests come from an earlier run" in n for n in other["status"]["notes"])


def test_an_unknown_name_lists_what_is_outside_too(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry([*arguments, "metrics=[divergence,rnk]"]) == 2
    assert "rank" in capsys.readouterr().err


def test_a_flag_may_stand_between_settings(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry([*arguments, "--multirun", "seed=0,0", f"out={tmp_path}/sweep"]) == 0
    seen = capsys.readouterr()
    assert "1 of 1 jobs finished" in seen.out
    assert "job seed=0" in seen.out
