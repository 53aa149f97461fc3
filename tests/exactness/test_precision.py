"""Exactness is claimed in fp32; bf16 is judged by a control: plain, run twice with other splits.

transformers#25420, #31267; llama.cpp#7859; TensorRT-LLM#15503 (H2).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from kvsem.harness import Arm, Harness
from kvsem.lm import CACHE, LM
from kvsem.metrics.base import Observation
from kvsem.metrics.divergence import DivergenceMetric
from kvsem.metrics.greedy import GreedyMetric
from kvsem.types import Request
from tests.tiny import (
    KINDS,
    SYSTEM,
    every,
    exact,
    plain_logits,
    prose,
    tiny_engine,
    tiny_lm,
    tiny_model,
    tokens,
)

N = 64
IDS = tokens(N, seed=21)
BF16 = torch.bfloat16


@cache
def both(kind: str, dtype: torch.dtype) -> tuple[LM, Any]:
    return tiny_lm(kind, dtype), tiny_model(kind, dtype)


@torch.no_grad()
def split_plain(model: Any, split: int) -> torch.Tensor:
    """Last logits of plain transformers with its own cache, in two forwards."""
    ids = torch.from_numpy(IDS)[None]
    head = model(input_ids=ids[:, :split], use_cache=True)
    logits: torch.Tensor = model(input_ids=ids[:, split:], **{CACHE: head[CACHE]}).logits
    return logits[0, -1].float()


def split_ours(lm: LM, split: int) -> torch.Tensor:
    kv = lm.buffer(N)
    lm.prefill(IDS[:split], kv, lambda _: every(split))
    return lm.prefill(IDS, kv, lambda _: torch.arange(N) >= split)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [1, 8, 30, N - 1])
def test_fp32_splits_agree(kind: str, split: int) -> None:
    lm, plain = both(kind, torch.float32)
    want = plain_logits(plain, IDS)[-1]
    assert (split_ours(lm, split) - want).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [1, 8, 30, N - 1])
def test_bf16_splits_err_as_plain_ones_do(kind: str, split: int) -> None:
    """At most twice what plain transformers does to itself, over all splits of the table."""
    lm, plain = both(kind, BF16)
    want = plain_logits(plain, IDS)[-1]
    scale = float(want.abs().max())
    control = max(float((split_plain(plain, at) - want).abs().max()) for at in (1, 8, 30, N - 1))
    got = float((split_ours(lm, split) - want).abs().max())
    assert got <= 2 * control + 0.01 * scale
    assert control < 0.1 * scale


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_support_and_reuse(kind: str) -> None:
    """The self-check passes in bf16, KV stays bf16, and logits come out in fp32."""
    lm, _ = both(kind, BF16)
    assert all(lm.support[name] == (True, "") for name in ("exact_prefix", "moved_chunk", "blend"))
    kv, logits = exact(lm, IDS)
    assert kv.keys[0].dtype == BF16
    assert logits.dtype == torch.float32
    request = Request.rag("r", [prose(1), prose(2)], "Why?", system=SYSTEM)
    engine = tiny_engine(lm)
    engine.ingest([request])
    output = engine.generate(request)
    assert output.counts()["chunk"] > 0
    assert all(t.dtype == BF16 for e in engine.store for t in (*e.keys, *e.values))
    assert output.logits.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_namespace_is_another(kind: str) -> None:
    assert both(kind, BF16)[0].namespace() != both(kind, torch.float32)[0].namespace()


def kl_nats(want: torch.Tensor, got: torch.Tensor) -> float:
    """As the harness reports it, of one row of logits."""
    exact, arm = (Observation(row[None], (), "", (), None) for row in (want, got))
    return DivergenceMetric().compare(exact, arm)["quality/kl_first_nats"]


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_calls_after_the_first_are_judged_by_kl_and_top1(kind: str) -> None:
    """H2: pages that another kernel left one step of bf16 off are no fault; they are reported as a
    distance, of the size that plain transformers has from itself."""
    lm, plain = both(kind, BF16)
    want = plain_logits(plain, IDS)[-1]
    control = max(kl_nats(want, split_plain(plain, at)) for at in (8, 30, N - 1))
    engine = tiny_engine(lm, reuse=("prefix",))
    asked = Request.rag("first", [prose(1), prose(2)], "Why?", system=SYSTEM)
    metrics = (DivergenceMetric(), GreedyMetric())
    exact_engine = tiny_engine(lm, admit="none", reuse=())
    harness = Harness(lm, exact_engine, [Arm("prefix", engine)], metrics)
    runs = harness.run([replace(asked, id=name) for name in ("first", "second", "third")])
    first = next(runs)[-1]
    for tensor in (*engine.memory.pages.keys, *engine.memory.pages.values):
        step_up(tensor[:, ::3])
    second, third = (rows[-1] for rows in runs)
    assert first["reuse/prefix_tokens"] == 0
    for row in (second, third):
        assert row["reuse/prefix_tokens"] > 100
        assert 0 < row["quality/kl_first_nats"] <= 4 * control
        assert row["quality/top1_agreement"] >= 13 / 16
        tie = row["first_divergence"]
        assert tie is None or tie["margin_nats"] < 0.2
    for key in ("quality/kl_nats", "quality/kl_first_nats", "quality/top1_agreement", "text"):
        assert second[key] == third[key]  # all later calls are one call


def step_up(tensor: torch.Tensor) -> None:
    """Every bf16 number one step away from zero, in place."""
    bits = tensor.view(torch.int16)
    bits += 1
