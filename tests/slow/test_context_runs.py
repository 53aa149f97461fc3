"""Every donor context in an experiment of two requests, and the control that no context changes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import experiments.run
from experiments.run import entry
from tests.tiny import SYSTEM, prose, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.ci]
CONTROLS = ("none", "zero_kv", "random_kv", "filler_kv", "no_context")
CONTEXTS = sorted(p.stem for p in (Path(__file__).parents[2] / "conf/context").glob("*.yaml"))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny model and two requests of three passages, none of which is in both."""
    folder = tmp_path_factory.mktemp("given")
    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    records = [
        {
            "id": str(n),
            "system": SYSTEM,
            "passages": [prose(3 * n + i) for i in range(3)],
            "question": "Which bridge?",
            "answers": ["the stone bridge"],
        }
        for n in range(2)
    ]
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return [
        "model=hub", f"model.name={folder / 'model'}", "model.device=cpu", "workload=jsonl",
        f"workload.path={path}", "embedder=hashing", "threads=1", "baselines=measure",
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("KVSEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(experiments.run, "write_plots", lambda run: None)
    monkeypatch.setattr(experiments.run, "write_report", lambda run: run.path)
    show = warnings.showwarning
    yield
    warnings.showwarning = show
    torch.set_num_threads(1)


def run(out: Path, given: list[str], *more: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    assert entry([*given, f"out={out}", *more]) == 0
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    return json.loads((out / "summary.json").read_text()), rows


def test_there_are_contexts() -> None:
    assert {"in_company", "similar", "in_request", "behind_filler", "behind_dummy"} <= {*CONTEXTS}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_by_override(name: str, given: list[str], tmp_path: Path) -> None:
    more = ["workload.ingest=false"] if name == "in_request" else []
    if name == "similar":
        more = ["context.embedder._target_=kvsem.embedders.hashing.HashingEmbedder"]
    found, rows = run(tmp_path / "out", given, "arms=[none]", f"context={name}", *more)
    none = [row for row in rows if row["arm"] == "none"]
    assert len(none) == 2
    if name == "in_request":
        assert "cost/build_ms" not in found["arms"]["none"]
        return  # two requests have nothing to reuse of each other but their head
    assert found["arms"]["none"]["cost/build_ms"]["mean"] > 0
    for row in none:
        assert row["reuse/chunk_tokens"] > 50
        assert row["quality/kl_nats"] > 0


def test_settings_of_a_context(given: list[str], tmp_path: Path) -> None:
    lengths = {}
    for n, draws in ((1, 1), (3, 1), (1, 2)):
        more = ("context=in_company", f"context.n={n}", f"context.draws={draws}")
        found, rows = run(tmp_path / f"{n}-{draws}", given, "arms=[none]", *more)
        assert {f"InCompany(n={n}, draws={draws})"} == {
            r["settings"]["context"] for r in rows if r["arm"] == "none"
        }
        lengths[n, draws] = found["arms"]["none"]["quality/kl_nats"]["mean"]
    assert len(set(lengths.values())) == 3


def test_filler_is_filler_whatever_the_context(given: list[str], tmp_path: Path) -> None:
    """Next to other arms that keep their own KV, under a context and a salt for all."""
    arms = "arms=[none,filler_kv,no_context]"
    more = ["context=in_company", "memory.salt=pepper"]
    found, rows = run(tmp_path / "out", given, arms, *more)
    kl = {arm: keys["quality/kl_nats"]["mean"] for arm, keys in found["arms"].items()}
    assert kl["filler_kv"] > 3 * kl["none"] > 0
    assert found["arms"]["filler_kv"]["cost/build_ms"]["mean"] > 0
    by_arm = {
        arm: [
            {key: v for key, v in row.items() if key.startswith("reuse/")}
            for row in rows
            if row["arm"] == arm
        ]
        for arm in ("none", "filler_kv")
    }
    assert by_arm["none"] == by_arm["filler_kv"]
    alone, _ = run(tmp_path / "alone", given, "arms=[none]", *more)
    assert alone["arms"]["none"]["quality/kl_nats"]["mean"] == pytest.approx(kl["none"])
    assert found["pgr"].keys() == {"exact_again", "none", "filler_kv"}
    assert found["pgr"]["exact_again"]["quality/answer_nll_nats"]["mean"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["context=in_request"], ["context", "in_request", "workload.ingest=false"]),
        (["arms=[filler_kv]", "workload.ingest=false"], ["workload.ingest", "filler"]),
        (["context=similar", "context.n=0"], ["context.n", "0", "from 1"]),
        (["context=behind_filler", "context.words=few"], ["context.words", "few", "null"]),
        (
            ["context=behind_dummy", "context.bare=maybe"],
            ["context.bare", "maybe", "true or false"],
        ),
        (["context=filler_kv"], ["context", "filler_kv", "in_company"]),
    ],
)
def test_a_context_that_cannot_be_is_one_line(
    given: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    words: list[str],
) -> None:
    assert entry([*given, f"out={tmp_path / 'out'}", *more]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert all(word in line for word in words), line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["rules", "controls", "rule_contexts"])
def test_experiments_of_the_rules_study(name: str, given: list[str], tmp_path: Path) -> None:
    """I5: as shipped, on two requests; what should recompute does."""
    found, _ = run(tmp_path / "out", given, f"experiment={name}", "embedder=hashing")
    arms = found["arms"]
    assert len(arms) >= 8
    for arm, estimates in arms.items():
        recomputes = arm not in (*CONTROLS, "exact", "exact_again")
        assert (estimates["reuse/recomputed_tokens"]["mean"] > 0) == recomputes
        if arm not in ("exact", "exact_again", "no_context"):
            assert estimates["reuse/hit_rate"]["mean"] > 0.5
    if name == "controls":
        assert found["pgr"]
