"""The experiment on the real small model: two requests, from the command line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.ci]
KEYS = {
    "quality/kl_first_nats", "quality/kl_nats", "quality/top1_agreement",
    "quality/exact_match_greedy", "quality/answer_nll_nats", "quality/f1",
    "quality/f1_exact_arm", "quality/perplexity_ratio", "quality/kv_error_rel",
    "cost/ttft_ms", "cost/ttft_speedup", "cost/plan_ms", "cost/load_ms", "cost/prefill_ms",
    "cost/decode_ms_per_token", "cost/flop_ratio", "cost/recomputed_layer_tokens",
    "cost/kv_bytes", "cost/store_ms", "reuse/prefix_tokens",
    "reuse/chunk_tokens", "reuse/semantic_tokens",
    "reuse/recomputed_tokens", "reuse/new_tokens", "reuse/matched_tokens", "reuse/hit_rate",
    "reuse/refused",
}  # fmt: skip


def run(out: Path, cache: Path, *more: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The experiment without a key, a terminal or a network; models come from the user's cache."""
    models = Path(os.environ.get("KVSEM_CACHE") or Path.home() / ".cache" / "kvsem") / "models"
    cache.mkdir(parents=True, exist_ok=True)
    if models.is_dir() and not (cache / "models").exists():
        (cache / "models").symlink_to(models)
    blocked = "import socket\ndef no(*a, **k): raise OSError('no network here')\n"
    blocked += "socket.socket.connect = no\nsocket.getaddrinfo = no\n"
    (cache / "sitecustomize.py").write_text(blocked, encoding="utf-8")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "HF_"))}
    env = kept | {"KVSEM_CACHE": str(cache), "PYTHONPATH": str(cache)}
    command = [sys.executable, "experiments/run.py", f"out={out}", "workload.limit=2", *more]
    return subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, timeout=500,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    out = tmp_path_factory.mktemp("first")
    done = run(out, cache, "arms=[zero_kv,none,cacheblend]", "tracking=wandb")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return out


def test_the_run_directory_is_complete(first: Path) -> None:
    for name in ("config.yaml", "env.json", "samples.jsonl", "summary.json", "report.html"):
        assert (first / name).stat().st_size > 100
    assert len((first / "samples.jsonl").read_text(encoding="utf-8").splitlines()) == 2 * 5
    env = json.loads((first / "env.json").read_text(encoding="utf-8"))
    assert {"versions", "cpu", "threads", "git_revision", "seed", "namespace"} <= set(env)
    assert any("minilm" in identity for identity in env["embedders"])
    config = (first / "config.yaml").read_text(encoding="utf-8")
    assert "CacheBlendRecompute" in config  # an arm is recorded by what it is, not by its name
    assert any((first / "wandb").glob("offline-run-*"))


def test_the_summary_has_every_key_with_its_interval(first: Path) -> None:
    arms = summary(first)["arms"]
    assert set(arms) == {"exact", "exact_again", "zero_kv", "none", "cacheblend"}
    for name, keys in arms.items():
        assert KEYS - set(keys) == set(), name
        for key in KEYS - {"reuse/refused"}:
            assert set(keys[key]) == {"mean", "median", "low", "high", "n"}
            assert keys[key]["n"] == 2
    assert arms["none"]["cost/build_ms"]["mean"] > 0


def test_the_numbers_are_in_order(first: Path) -> None:
    found = summary(first)
    kl = {a: keys["quality/kl_first_nats"]["mean"] for a, keys in found["arms"].items()}
    assert kl["exact_again"] < 1e-5
    assert kl["zero_kv"] > 3 * kl["none"] > 0
    assert found["pairs"]["zero_kv-none"]["quality/kl_first_nats"]["low"] > 0
    ratio = {a: keys["cost/flop_ratio"]["mean"] for a, keys in found["arms"].items()}
    assert ratio["none"] < ratio["cacheblend"] < ratio["exact"] == 1.0
    assert found["support"]["moved_chunk"]["ok"]
    assert found["support"]["blend"]["ok"]


def test_a_second_run_of_other_arms_costs_only_those(
    first: Path, cache: Path, tmp_path: Path
) -> None:
    done = run(tmp_path / "second", cache, "arms=[epic]")
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path / "second")
    assert any("2 requests come from an earlier run" in note for note in found["status"]["notes"])
    old = summary(first)["arms"]["exact"]["cost/ttft_ms"]
    assert found["arms"]["exact"]["cost/ttft_ms"] == old


def test_a_run_that_was_killed_goes_on_and_keeps_its_rows(
    first: Path, cache: Path, tmp_path: Path
) -> None:
    out = tmp_path / "resumed"
    shutil.copytree(first, out, ignore=shutil.ignore_patterns("wandb", "summary.json"))
    lines = (out / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (out / "samples.jsonl").write_bytes(b"".join(lines[:6]) + lines[6][:20])
    done = run(out, cache, "arms=[zero_kv,none,cacheblend]", "tracking=wandb")
    assert done.returncode == 0, done.stderr
    again = (out / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert again[:6] == lines[:6]
    assert len(again) == 10
    assert summary(out)["arms"]["none"]["quality/kl_nats"]["n"] == 2


def test_jsonl_and_a_cache_that_fills(cache: Path, tmp_path: Path) -> None:
    passages = ["The bridge over the river was opened in 1847.", "The market closes at seven."]
    records = [
        {"id": "a", "passages": passages, "question": "When was the bridge opened?"},
        {"id": "b", "passages": passages[::-1], "question": "When does the market close?"},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    more = ["workload=jsonl", f"workload.path={path}", "workload.ingest=false", "arms=[none]"]
    done = run(tmp_path / "out", cache, *more)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {(r["request"], r["arm"]): r for r in map(json.loads, lines)}
    assert rows["a", "none"]["reuse/hit_rate"] == 0.0
    assert rows["b", "none"]["reuse/hit_rate"] > 0.5


def test_a_method_of_ones_own_is_one_file_and_one_yaml(cache: Path, tmp_path: Path) -> None:
    """What the README says, done in a copy of the project."""
    root = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "runs", "tests", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, root, ignore=ignored)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Add your own method", 1)[1]
    code = section.split("```python\n", 1)[1].split("```", 1)[0]
    config = section.split("```yaml\n", 1)[1].split("```", 1)[0]
    (root / "kvsem/recompute/stripes.py").write_text(code, encoding="utf-8")
    (root / "conf/recompute/stripes.yaml").write_text(config, encoding="utf-8")
    done = run(tmp_path / "out", cache, "arms=[stripes]", root=root)
    assert done.returncode == 0, done.stderr
    row = summary(tmp_path / "out")["arms"]["stripes"]
    assert row["reuse/recomputed_tokens"]["mean"] > 0
