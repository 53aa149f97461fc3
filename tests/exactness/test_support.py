"""Support is checked, not assumed: what a model cannot do is off, with the reason.

LMCache#4666; vllm PR 14369; llama.cpp PR 10401.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    MistralConfig,
    PhiConfig,
)

from kvsem.errors import ModelError
from kvsem.lm import LM
from kvsem.prompt import render
from kvsem.types import Output, Request
from tests.tiny import (
    SYSTEM,
    plain_generate,
    plain_logits,
    prose,
    tiny_engine,
    tiny_model,
    tiny_tokenizer,
    wrap,
)

REQUEST = Request.rag("r", [prose(1), prose(2)], "Why?", system=SYSTEM)
CAPABILITIES = ("exact_prefix", "moved_chunk", "blend")
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}


def common(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tiny_tokenizer()),
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    } | more


def small(vocab: str = "vocab_size", **more: Any) -> dict[str, Any]:
    return {
        vocab: len(tiny_tokenizer()),
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | more


def from_config(config: Any) -> Callable[[], Any]:
    def make() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            made: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            return made.eval()

    return make


# name → (how to make it, what its moved_chunk reason says)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "yarn": (lambda: tiny_model("llama", rope_parameters=YARN), "rope type 'yarn'"),
    "interleaved": (from_config(CohereConfig(**common())), "layer 0: keys moved by"),
    "partial": (from_config(PhiConfig(**common())), "partial rotary factor 0.5"),
    "learned": (
        from_config(GPT2Config(**small(n_embd=64, n_layer=4, n_head=4, n_positions=512))),
        "no rotary embedding",
    ),
}
# name → (how to make it, what the reason says)
HOOKLESS: dict[str, tuple[Callable[[], Any], str]] = {
    "softcap": (
        from_config(Gemma2Config(**common(head_dim=16, query_pre_attn_scalar=16))),
        "softcap",
    ),
    "own causal buffer": (
        from_config(
            GPTNeoConfig(
                **small(
                    hidden_size=64,
                    num_layers=2,
                    num_heads=4,
                    attention_types=[[["global", "local"], 1]],
                    max_position_embeddings=512,
                )
            )
        ),
        "another attention function",
    ),
    "latent": (
        from_config(
            DeepseekV3Config(
                **common(
                    num_key_value_heads=4,
                    kv_lora_rank=16,
                    q_lora_rank=16,
                    qk_rope_head_dim=8,
                    qk_nope_head_dim=8,
                    v_head_dim=12,
                    first_k_dense_replace=4,
                )
            )
        ),
        "size",
    ),
}


def served(lm: LM) -> tuple[Output, Output]:
    """The request twice, its passages ingested: over those, and over its own first answer."""
    engine = tiny_engine(lm)
    engine.ingest([REQUEST])
    return engine.generate(REQUEST), engine.generate(REQUEST)


def assert_exact(lm: LM, plain: Any, output: Output) -> None:
    ids = tiny_engine(lm).prefill(REQUEST).prompt.ids
    counts = output.counts()
    assert counts["chunk"] == counts["semantic"] == counts["recomputed"] == 0
    assert (output.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4
    assert list(output.tokens) == plain_generate(plain, ids, REQUEST.max_new_tokens)


def test_supported_models_can_do_it_all(lm: LM) -> None:
    for name in CAPABILITIES:
        assert lm.support[name] == (True, "")
    ok, reason = lm.support["heads"]
    assert not ok
    assert reason


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_moved_is_computed(name: str) -> None:
    """Refused with its reason; exact prefixes are still reused, and the answer is exact."""
    make, said = REFUSED[name]
    lm = wrap(make(), name)
    ok, reason = lm.support["moved_chunk"]
    assert not ok
    assert reason.startswith(said)
    assert lm.support["exact_prefix"] == (True, "")
    first, second = served(lm)
    assert_exact(lm, make(), first)
    assert_exact(lm, make(), second)
    assert second.counts()["prefix"] > first.counts()["prefix"] > 0
    assert any(said in why for why in first.plan.refused)
    assert any(said in match.reason for match in first.plan.matches)


@pytest.mark.parametrize("rope", [LONGROPE, {"rope_type": "dynamic", "factor": 4.0}])
def test_a_rope_that_looks_at_the_length_has_no_exact_prefix(rope: dict[str, Any]) -> None:
    """KV of a short prompt is not exact in a long one: frequencies change with the length."""
    rope = {"rope_theta": 10000.0} | rope
    lm, plain = (
        wrap(tiny_model("llama", rope_parameters=rope)),
        tiny_model("llama", rope_parameters=rope),
    )
    assert lm.support["exact_prefix"][0] is False
    assert "length" in lm.support["exact_prefix"][1]
    short = Request.rag("short", [prose(1, 8)], "Why?")
    long = Request.rag("long", [prose(1, 8), prose(2, 60)], "Why?")
    engine = tiny_engine(lm)
    assert engine.generate(short).plan.n_tokens < 64
    output = engine.generate(long)
    assert output.plan.n_tokens > 64
    assert output.counts()["new"] == output.plan.n_tokens
    assert "exact_prefix is off" in output.plan.matches[0].reason
    ids = engine.prefill(long).prompt.ids
    assert (output.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4


@pytest.mark.parametrize("name", HOOKLESS)
def test_a_model_that_cannot_be_prefilled_in_parts_says_so(name: str) -> None:
    """Everything is off with one reason; the plain forward is untouched by the attempt."""
    make, said = HOOKLESS[name]
    lm, plain = wrap(make(), name), make()
    for capability in CAPABILITIES:
        ok, reason = lm.support[capability]
        assert not ok
        assert said in reason
        assert "\n" not in reason
    ids = torch.arange(20).numpy()
    assert (lm.plain(ids) - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4
    engine = tiny_engine(lm)
    assert engine.ingest([REQUEST]) == 0
    output = engine.generate(REQUEST)
    rendered = render(tiny_tokenizer(), REQUEST).ids
    assert list(output.tokens) == plain_generate(plain, rendered, REQUEST.max_new_tokens)
    assert output.counts()["new"] == len(rendered)
    assert said in output.plan.refused[0]
    assert engine.generate(replace(REQUEST, max_new_tokens=0)).tokens == ()
    with pytest.raises(ModelError, match=said):
        engine.prefill(REQUEST)


def break_rotation(model: Any) -> Any:
    """Angles grow with the root of the position: no rotation group, though the model runs."""
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids.float().clamp_min(0).sqrt()[..., None] * frequencies
        both = torch.cat([angles, angles], dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    rotary.forward = forward
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_broken_rotation_is_caught(kind: str) -> None:
    lm, plain = wrap(break_rotation(tiny_model(kind))), break_rotation(tiny_model(kind))
    ok, reason = lm.support["moved_chunk"]
    assert not ok
    assert "keys moved by" in reason
    first, second = served(lm)
    assert_exact(lm, plain, first)
    assert_exact(lm, plain, second)
    assert second.counts()["prefix"] > first.counts()["prefix"] > 0
    assert any("moved_chunk is off" in why for why in first.plan.refused)


def test_one_layer_without_rotation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is tried, not the first alone."""
    model = tiny_model("llama")
    last = model.model.layers[3].self_attn
    forward = last.forward

    def unrotated(*args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        flat = torch.ones_like(cos), torch.zeros_like(sin)
        return forward(*args, position_embeddings=flat, **kwargs)

    monkeypatch.setattr(last, "forward", unrotated)
    ok, reason = wrap(model).support["moved_chunk"]
    assert not ok
    assert reason.startswith("layer 3")


def test_an_unchecked_model_reuses_nothing() -> None:
    lm = LM(tiny_model("llama"), tiny_tokenizer())
    for output in served(lm):
        assert output.counts()["new"] == output.plan.n_tokens
        assert output.plan.matches[0].reason == "exact_prefix is off: not checked"
        assert output.plan.miss == "exact_prefix is off: not checked"


def test_shapes_come_from_tensors() -> None:
    """qwen3's head_dim is not hidden / heads; mistral's window is on every layer."""
    qwen = wrap(tiny_model("qwen3"))
    assert qwen.config.hidden_size // qwen.config.num_attention_heads == 16
    for shape, keys in zip(qwen.shapes, qwen.buffer(5).keys, strict=True):
        assert (shape.key_dim, shape.value_dim, shape.kv_heads, shape.query_heads) == (32, 32, 2, 4)
        assert keys.shape == (1, 2, 5, 32)
    mistral = wrap(from_config(MistralConfig(**common(sliding_window=8)))())
    assert [shape.window for shape in mistral.shapes] == [8] * 4
    gemma = wrap(tiny_model("gemma3"))
    assert [shape.window for shape in gemma.shapes] == [8, None, 8, None]


def test_multiplications_are_counted_from_the_shapes(llama: LM) -> None:
    """One token over nothing, by hand: projections, one pair a head, the head's row."""
    hidden, inner, heads, kv_heads, dim, vocab = 64, 96, 4, 2, 16, len(tiny_tokenizer())
    linear = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    one = torch.zeros(4, 3, dtype=torch.bool).numpy()
    assert llama.multiplications(one) == vocab * hidden
    one[:, 2] = True  # sees three keys
    pairs = 3 * heads * 2 * dim
    assert llama.multiplications(one) == vocab * hidden + 4 * (linear + pairs)
