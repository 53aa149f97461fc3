"""With nothing reused, kvsem is a plain engine: token for token `model.generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsem.lm import LM
from kvsem.prompt import render
from kvsem.types import Request
from tests.tiny import (
    SYSTEM,
    WINDOW,
    exact,
    plain_generate,
    plain_logits,
    prose,
    tiny_engine,
    tokens,
)

REQUESTS = [
    Request("short", text="A bridge.", max_new_tokens=20),
    Request("plain", text=prose(1), max_new_tokens=20),
    Request.rag("rag", [prose(2), prose(3, 60)], "When was it built?", max_new_tokens=20),
    Request.rag("system", [prose(4)], "Who?", system=SYSTEM, max_new_tokens=20),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.id)
def test_engine_equals_generate(lm: LM, plain: Any, request_: Request) -> None:
    output = tiny_engine(lm).generate(request_)
    ids = render(lm.tokenizer, request_).ids
    assert list(output.tokens) == plain_generate(plain, ids, 20)
    assert output.counts() == {
        "new": len(ids),
        "prefix": 0,
        "chunk": 0,
        "semantic": 0,
        "recomputed": 0,
    }
    assert output.computed.all()


@pytest.mark.parametrize("n", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 130])
def test_every_length_equals_generate(lm: LM, plain: Any, n: int) -> None:
    ids = tokens(n, seed=n)
    kv, logits = exact(lm, ids, room=12)
    assert lm.decode(int(logits.argmax()), kv, 12, lm.stop_tokens) == plain_generate(plain, ids, 12)


@pytest.mark.parametrize("n", [3, WINDOW, 50])
def test_logits_equal_a_plain_forward(lm: LM, plain: Any, n: int) -> None:
    """Within 1e-4 (logits reach 7): the first ones and those behind it, however they are cut."""
    ids = tokens(n + 8, seed=n)
    want = plain_logits(plain, ids)
    assert want.abs().max() > 1
    kv, first = exact(lm, ids[:n], room=8)
    assert (first - want[n - 1]).abs().max() <= 1e-4
    together = lm.extend(ids[n:].tolist(), kv)
    assert (together - want[n:]).abs().max() <= 1e-4
    kv.truncate_to(n)
    for i, token in enumerate(ids[n:].tolist()):
        assert (lm.extend([token], kv)[0] - want[n + i]).abs().max() <= 1e-4
    assert (lm.plain(ids) - want[-1]).abs().max() <= 1e-4


def test_groups_of_rows_equal_a_plain_forward(lm: LM, plain: Any) -> None:
    """Past `GROUP_KEYS` keys the rows attend in groups; sets with gaps, windows, both ends."""
    ids = tokens(512, seed=5)
    want = plain_logits(plain, ids)[-1]
    kv, logits = exact(lm, ids)
    assert (logits - want).abs().max() <= 1e-4
    rows = (torch.arange(512) % 7 == 3) | (torch.arange(512) < 3) | (torch.arange(512) > 500)
    for tensor in (*kv.keys, *kv.values):
        tensor[:, :, rows] = 0
    again, _ = lm.prefill(ids, kv, lambda _: rows)
    assert (again - want).abs().max() <= 1e-4
    few = torch.arange(512) == 511
    assert (lm.prefill(ids, kv, lambda _: few)[0] - want).abs().max() <= 1e-4


def test_stop_token_ends_the_answer(lm: LM, plain: Any) -> None:
    ids = tokens(30, seed=3)
    greedy = plain_generate(plain, ids, 6)
    kv, _ = exact(lm, ids, room=6)
    end = next(i for i, token in enumerate(greedy) if token not in greedy[:i] and i > 1)
    assert lm.decode(greedy[0], kv, 6, frozenset({greedy[end]})) == greedy[: end + 1]
