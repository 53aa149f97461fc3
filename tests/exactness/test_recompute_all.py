"""Recomputing everything forgets the donor, whatever it held; an exact prefix stays exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsem.lm import LM
from kvsem.recompute.all import AllRecompute
from kvsem.types import Provenance, Request
from tests.tiny import (
    SYSTEM,
    WINDOW,
    every,
    exact,
    only,
    plain_generate,
    plain_logits,
    prose,
    tiny_engine,
    tokens,
)

N = 60


def test_all_over_wrong_donors_is_exact(lm: LM, plain: Any) -> None:
    """Every logit within 1e-4: the first, and 8 teacher-forced ones behind it."""
    ids = tokens(N + 8)
    want = plain_logits(plain, ids)
    kv = lm.buffer(N + 8)
    for tensor in (*kv.keys, *kv.values):
        tensor.normal_(std=3.0, generator=torch.Generator().manual_seed(1))
    first, computed = lm.prefill(ids[:N], kv, lambda _: every(N))
    assert computed.all()
    assert (first - want[N - 1]).abs().max() <= 1e-4
    assert (lm.extend(ids[N:].tolist(), kv) - want[N:]).abs().max() <= 1e-4


def test_wrong_donors_are_felt(lm: LM, plain: Any) -> None:
    """The control of the test above: nothing recomputed over the same noise is not exact."""
    ids = tokens(N)
    kv = lm.buffer(N)
    for tensor in (*kv.keys, *kv.values):
        tensor.normal_(generator=torch.Generator().manual_seed(1))
    got, computed = lm.prefill(ids, kv, lambda _: only(N, []))
    assert computed.sum() == lm.n_layers
    assert (got - plain_logits(plain, ids)[-1]).abs().max() > 0.1


def test_all_through_the_engine_is_exact(lm: LM, plain: Any) -> None:
    """Chunks that were computed behind other text, all recomputed: `model.generate` again."""
    request = Request.rag("r", [prose(i) for i in range(3)], "Why?", system=SYSTEM)
    engine = tiny_engine(lm, recompute=AllRecompute())
    engine.ingest([request])
    output = engine.generate(request)
    counts = output.counts()
    assert counts["recomputed"] > 40
    assert counts["chunk"] == 0
    assert output.computed[:, output.plan.matched].all()
    done = engine.prefill(request)
    assert (output.logits - plain_logits(plain, done.prompt.ids)[-1]).abs().max() <= 1e-4
    assert list(output.tokens) == plain_generate(plain, done.prompt.ids, request.max_new_tokens)
    assert (output.provenance == Provenance.PREFIX).sum() == counts["prefix"] > 0


@pytest.mark.parametrize("kept", [1, WINDOW - 1, WINDOW, WINDOW + 1, N - 1])
def test_reused_prefix_is_exact(lm: LM, plain: Any, kept: int) -> None:
    """A prefix from a prompt that went on differently: every logit within 1e-4."""
    ids = tokens(N + 8)
    want = plain_logits(plain, ids)
    donor, _ = exact(lm, _branch(ids, kept))
    kv = lm.buffer(N + 8)
    for tensor in (*kv.keys, *kv.values):
        tensor.normal_(generator=torch.Generator().manual_seed(2))
    for mine, theirs in zip((*kv.keys, *kv.values), (*donor.keys, *donor.values), strict=True):
        mine[:, :, :kept] = theirs[:, :, :kept]
    first, computed = lm.prefill(ids[:N], kv, lambda _: torch.arange(N) >= kept)
    assert computed.sum() == lm.n_layers * (N - kept)
    assert (first - want[N - 1]).abs().max() <= 1e-4
    assert (lm.extend(ids[N:].tolist(), kv) - want[N:]).abs().max() <= 1e-4


def _branch(ids: Any, kept: int) -> Any:
    """``kept`` tokens of ``ids``, then others."""
    other = ids[: kept + 11].copy()
    other[kept:] = tokens(len(other) - kept, seed=77)
    return other


def test_growing_prompts_reuse_exact_prefix(lm: LM, plain: Any) -> None:
    """Requests that share their first passages: prefix tokens, exact logits, no chunk tokens."""
    passages = [prose(10 + i) for i in range(3)]
    engine = tiny_engine(lm)
    before = -1
    for n in (1, 2, 3):
        request = Request.rag(str(n), passages[:n], "Why?", system=SYSTEM)
        output = engine.generate(request)
        counts = output.counts()
        assert counts["chunk"] == counts["semantic"] == counts["recomputed"] == 0
        assert counts["prefix"] > before
        before = counts["prefix"]
        ids = engine.prefill(request).prompt.ids
        assert (output.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4
        assert list(output.tokens) == plain_generate(plain, ids, request.max_new_tokens)
    assert counts["prefix"] > 60
