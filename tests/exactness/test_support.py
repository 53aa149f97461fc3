"""Support is checked, not assumed: what a model cannot do is off, with the reason.

LMCache#4666; vllm PR 14369; llama.cpp PR 10401.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvsem import rope
from kvsem.errors import ModelError
from kvsem.lm import LM
from kvsem.prompt import render
from kvsem.types import Output, Request
from tests.families import FAMILIES, family_lm, family_plain
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
REFUSED = [name for name, family in FAMILIES.items() if family.moved and not family.prefix]
RECURRENT = [name for name, family in FAMILIES.items() if family.prefix]


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
    lm, said = family_lm(name), FAMILIES[name].moved
    ok, reason = lm.support["moved_chunk"]
    assert not ok
    assert said in reason
    assert lm.support["exact_prefix"] == (True, "")
    first, second = served(lm)
    assert_exact(lm, family_plain(name), first)
    assert_exact(lm, family_plain(name), second)
    assert second.counts()["prefix"] > first.counts()["prefix"] > 0
    assert any(said in why for why in first.plan.refused)
    assert any(said in match.reason for match in first.plan.matches)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_model_that_keeps_no_kv_of_tokens_says_so(name: str) -> None:
    """Everything is off with one reason; plain transformers answers."""
    lm, plain, said = family_lm(name), family_plain(name), FAMILIES[name].prefix
    for capability in CAPABILITIES:
        ok, reason = lm.support[capability]
        assert not ok
        assert said in reason
        assert "\n" not in reason
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


@pytest.mark.parametrize("turned", [0.0, 0.5])
def test_every_layer_is_tried(monkeypatch: pytest.MonkeyPatch, turned: float) -> None:
    """A last layer that is not turned at all is never moved; one that is turned by other angles
    than the architecture's is caught."""
    model = tiny_model("llama")
    last = model.model.layers[3].self_attn
    forward = last.forward

    def other(*args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        angle = torch.atan2(sin, cos) * turned
        return forward(*args, position_embeddings=(angle.cos(), angle.sin()), **kwargs)

    monkeypatch.setattr(last, "forward", other)
    lm = wrap(model)
    ok, reason = lm.support["moved_chunk"]
    if turned:
        assert not ok
        assert reason.startswith("layer 3")
    else:
        assert ok, reason
        assert lm.pairs == ["half"] * 3 + [rope.NO_TURN]


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
    mistral = family_lm("Mistral")
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
