"""Only the named rows are computed, each from exactly the tokens ahead of it.

LMCache#2918, #950, #1152; sparkinfer#3.
"""

from __future__ import annotations

import hashlib

import pytest
import torch

from kvsem.forward import KVBuffer
from kvsem.lm import LM
from tests.tiny import WINDOW, copy_of, exact, only, relative, tokens

N = 48
IDS = tokens(N, seed=8)
ROWS = (3, 17, 29)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def rest() -> torch.Tensor:
    return ~only(N, ROWS)


def noisy(kv: KVBuffer, seed: int = 0) -> KVBuffer:
    generator = torch.Generator().manual_seed(seed)
    other = copy_of(kv)
    for tensor in (*other.keys, *other.values):
        tensor += torch.randn(tensor.shape, generator=generator)
    return other


def test_exactly_the_named_rows_change(lm: LM) -> None:
    before = noisy(exact(lm, IDS)[0])
    after = copy_of(before)
    _, computed = lm.prefill(IDS, after, lambda _: only(N, ROWS))
    assert (torch.from_numpy(computed) == only(N, ROWS)).all()
    for old, new in zip((*before.keys, *before.values), (*after.keys, *after.values), strict=True):
        assert digest(old[:, :, rest()]) == digest(new[:, :, rest()])
        for row in (*ROWS, N - 1):
            assert not torch.equal(old[:, :, row], new[:, :, row])


def test_rows_are_exact_over_exact_kv(lm: LM) -> None:
    """A middle subset with exact KV elsewhere: the cold rows within 1e-5, whatever they held."""
    want, logits = exact(lm, IDS)
    got = copy_of(want)
    rows = only(N, ROWS)
    for tensor in (*got.keys, *got.values):
        tensor[:, :, rows] = 9.0
    again, _ = lm.prefill(IDS, got, lambda _: rows)
    for mine, cold in zip((*got.keys, *got.values), (*want.keys, *want.values), strict=True):
        assert relative(mine[:, :, rows], cold[:, :, rows]) <= 1e-5
    assert (again - logits).abs().max() <= 1e-4


@pytest.mark.parametrize("poisoned", [4, 18, 30, N - 2])
def test_a_later_token_changes_no_earlier_row(lm: LM, poisoned: int) -> None:
    base = exact(lm, IDS)[0]
    clean, dirty = copy_of(base), copy_of(base)
    for tensor in (*dirty.keys, *dirty.values):
        tensor[:, :, poisoned] += 100.0
    want, _ = lm.prefill(IDS, clean, lambda _: only(N, ROWS))
    got, _ = lm.prefill(IDS, dirty, lambda _: only(N, ROWS))
    for mine, theirs in zip(
        (*dirty.keys, *dirty.values), (*clean.keys, *clean.values), strict=True
    ):
        assert torch.allclose(mine[:, :, :poisoned], theirs[:, :, :poisoned], atol=1e-6)
    assert (got - want).abs().max() > 0.05  # the last token does see it


def test_a_window_hides_what_lies_behind_it(lm: LM) -> None:
    """Row 29 of a sliding layer sees 22 … 29; a full layer sees everything ahead."""
    base = exact(lm, IDS)[0]
    for layer in range(lm.n_layers):
        window = lm.shapes[layer].window
        for poisoned, seen in ((29 - WINDOW, window is None), (29 - WINDOW + 1, True)):
            clean, dirty = copy_of(base), copy_of(base)
            dirty.values[layer][:, :, poisoned] += 10.0
            for kv in (clean, dirty):
                lm.prefill(IDS, kv, lambda _: only(N, [29]))
            if layer + 1 < lm.n_layers:
                above = dirty.keys[layer + 1][:, :, 29] - clean.keys[layer + 1][:, :, 29]
                assert (above.abs().max() > 1e-3) == seen


def test_decoding_changes_no_prompt_row(lm: LM) -> None:
    kv, logits = exact(lm, IDS, room=10)
    before = [digest(t[:, :, :N]) for t in (*kv.keys, *kv.values)]
    first = int(logits.argmax())
    tokens_ = lm.decode(first, kv, 10)
    assert kv.length == N + 9
    assert [digest(t[:, :, :N]) for t in (*kv.keys, *kv.values)] == before
    kv.truncate_to(N)
    assert lm.decode(first, kv, 10) == tokens_
