"""model=hub: a model saved in a folder runs without code; what is wrong with one is one line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer

from experiments.run import entry
from kvsem.errors import ModelError
from kvsem.lm import load
from tests.tiny import fast, prose, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.ci]


def saved(folder: Path, kind: str = "llama", template: bool = True) -> Path:
    """A tiny random model and its tokenizer, as a user has saved them."""
    tiny_model(kind).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    if not template:
        special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        tokenizer = fast(tokenizer.backend_tokenizer, template=None, **special)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Two requests over the same passages, the second in another order."""
    passages = [prose(seed) for seed in range(3)]
    rows = [
        {"id": "a", "passages": passages, "question": "What was built?", "answers": ["bridge"]},
        {"id": "b", "passages": passages[::-1], "question": "Who wrote?", "answers": ["captain"]},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(("kind", "template"), [("llama", True), ("gemma3", False)])
def test_a_saved_model_runs_without_code(
    tmp_path: Path, records: Path, monkeypatch: pytest.MonkeyPatch, kind: str, template: bool
) -> None:
    monkeypatch.setenv("KVSEM_CACHE", str(tmp_path / "cache"))
    folder = saved(tmp_path / "mine", kind, template)
    out = tmp_path / "out"
    arguments = [
        "model=hub", f"model.name={folder}", "workload=jsonl", f"workload.path={records}",
        "arms=[none,prefix,epic]", "embedder=hashing", "threads=1", f"out={out}",
    ]  # fmt: skip
    assert entry(arguments) == 0
    found = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert found["support"]["moved_chunk"]["ok"]
    arms: dict[str, Any] = found["arms"]
    assert arms["none"]["reuse/chunk_tokens"]["mean"] > 40
    assert arms["epic"]["reuse/recomputed_tokens"]["mean"] > 0
    assert arms["prefix"]["quality/exact_match_greedy"]["mean"] == 1.0
    assert arms["exact_again"]["quality/kl_first_nats"]["mean"] < 1e-6


def test_a_folder_may_be_named_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("~/mine", device="cpu").support["exact_prefix"][0]


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def gemma_without_tokenizer(folder: Path) -> None:
    """transformers makes up a vocabulary of five special tokens for these."""
    tiny_model("gemma3").save_pretrained(folder)
    without_tokenizer(folder)


def slow_tokenizer(folder: Path) -> None:
    without_tokenizer(folder)
    ByT5Tokenizer().save_pretrained(folder)


def without_any_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    set_config(model_type="llama")(folder)


def set_config(**values: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return write


def with_code(folder: Path) -> None:
    """Its own code must not run, nor anybody be asked whether it may."""
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    set_config(model_type="own", auto_map=own)(folder)
    (folder / "own.py").write_text("open(__file__ + '.ran', 'w')\n")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_weights, "no file named model.safetensors"),
        (cut_weights, "header"),
        (without_tokenizer, "a tokenizer.json is needed"),
        (without_any_tokenizer, "a tokenizer.json is needed)"),
        (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
        (gemma_without_tokenizer, "a tokenizer.json is needed"),
        (slow_tokenizer, "ByT5Tokenizer is a slow tokenizer without offsets"),
        (set_config(model_type="nonsense"), "`nonsense`"),
        (set_config(model_type="t5"), "AutoModelForCausalLM"),
        (with_code, "contains custom code"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_line(
    tmp_path: Path, spoil: Callable[[Path], Any], words: str
) -> None:
    folder = saved(tmp_path / "mine")
    spoil(folder)
    with pytest.raises(ModelError) as caught:
        load(str(folder), device="cpu")
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(folder.glob("*.ran"))


def test_a_name_that_does_not_exist_says_what_was_searched(tmp_path: Path) -> None:
    """A process of its own: the libraries read where their cache is when they are imported."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "experiments/run.py", "model=hub", "model.name=nobody/no-such-model"]
    done = subprocess.run(
        [*command, f"out={tmp_path}/out"], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=env, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for searched in (ROOT / "nobody/no-such-model", tmp_path / "hf" / "hub"):
        assert str(searched) in done.stderr
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_hub_that_does_not_answer_is_told_once(tmp_path: Path) -> None:
    """Without the retries' own lines; that it is asked at all is said before the wait."""
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    env.pop("HF_HUB_OFFLINE", None)
    code = "import sys; from experiments.run import entry; sys.exit(entry(sys.argv[1:]))"
    quick = "import huggingface_hub.utils._http as h; h.time.sleep = lambda s: None; "
    done = subprocess.run(
        [sys.executable, "-c", quick + code, "model=hub", "model.name=nobody/none",
         f"out={tmp_path}/out"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env=env,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    first, second = done.stderr.splitlines()
    assert first == "note: asking the hub for 'nobody/none'"
    assert second.startswith("error: model 'nobody/none': there is no folder")


def test_bf16_of_a_folder(tmp_path: Path) -> None:
    lm = load(str(saved(tmp_path / "mine")), device="cpu", dtype="bfloat16")
    assert lm.dtype == torch.bfloat16
    assert lm.support["exact_prefix"][0]
