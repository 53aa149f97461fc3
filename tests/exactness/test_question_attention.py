"""The question's attention over the assembled cache is what eager attention reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvsem.lm import LM
from tests.tiny import exact, tiny_model, tokens

N = 40
IDS = tokens(N, seed=2)


@torch.no_grad()
def eager(kind: str, rows: np.ndarray) -> torch.Tensor:
    """Mean over heads and ``rows`` of `output_attentions`, fp32 ``[layers, N]``."""
    model: Any = tiny_model(kind)
    model.set_attn_implementation("eager")
    out = model(input_ids=torch.from_numpy(IDS)[None], output_attentions=True)
    return torch.stack([layer[0][:, rows].mean(dim=(0, 1)) for layer in out.attentions])


@pytest.mark.parametrize("rows", [[N - 1], [36, 37, 38, 39], [5, 20, 39]], ids=str)
def test_equals_eager_attention(lm: LM, kind: str, rows: list[int]) -> None:
    at = np.array(rows)
    kv, _ = exact(lm, IDS)
    got = lm.question_attention(IDS, kv, at)
    want = eager(kind, at)
    assert got.shape == (lm.n_layers, N)
    assert (got - want).abs().max() <= 1e-5
    assert torch.allclose(got.sum(-1), torch.ones(lm.n_layers), atol=1e-5)


def test_windows_are_seen(lm: LM) -> None:
    kv, _ = exact(lm, IDS)
    seen = lm.question_attention(IDS, kv, np.array([N - 1])) > 0
    for layer, shape in enumerate(lm.shapes):
        assert int(seen[layer].sum()) == (shape.window or N)


def test_asking_leaves_the_answer_as_it_was(lm: LM) -> None:
    kv, logits = exact(lm, IDS)
    lm.question_attention(IDS, kv, np.arange(30, N))
    again, _ = lm.prefill(IDS, kv, lambda _: torch.arange(N) >= 30)
    assert (again - logits).abs().max() <= 1e-4
