"""Recompute rules as plain functions of a state; no model."""

from __future__ import annotations

from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import get_class, instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kvsem.errors import SettingError
from kvsem.recompute import krige
from kvsem.recompute.all import AllRecompute
from kvsem.recompute.base import Adjusts, State
from kvsem.recompute.cacheblend import CacheBlendRecompute
from kvsem.recompute.epic import EpicRecompute
from kvsem.recompute.fusionrag import FusionRAGRecompute
from kvsem.recompute.krige import KrigeRecompute
from kvsem.recompute.kvshare import KVShareRecompute
from kvsem.recompute.none import NoRecompute
from kvsem.recompute.random import RandomRecompute
from kvsem.recompute.random_kv import RandomKV
from kvsem.recompute.refine import RefineRecompute
from kvsem.recompute.zero_kv import ZeroKV

N, LAYERS = 40, 4
CONF = Path(__file__).parents[2] / "conf" / "recompute"
YAMLS = sorted(CONF.glob("*.yaml"))


def state(matched: list[int] | range = range(5, 30), **more: Any) -> State:
    """Tokens 5 … 29 matched in chunks of unequal length, the rest new."""
    mask = torch.zeros(N, dtype=torch.bool)
    mask[list(matched)] = True
    spans = [(0, 5), (5, 12), (12, 20), (20, 30)]
    chunks = [span for span in spans if bool(mask[slice(*span)].any())]
    return State(N, mask, ~mask, chunks, **more)


def with_deviation(
    values: torch.Tensor, dtype: torch.dtype = torch.float32, layer: int = 1
) -> State:
    """Fresh V of token i is off by ``values[i]`` in one channel."""
    fresh = torch.zeros(2, N, 4, dtype=dtype)
    fresh[0, :, 1] = values.to(dtype)
    zeros = torch.zeros(2, N, 4, dtype=dtype)
    return state(reused={layer: (zeros, zeros)}, fresh={layer: (zeros, fresh)})


def ran(rule: Any, given: State) -> list[torch.Tensor]:
    """What a rule chooses at each layer, asked as the engine asks."""
    zeros, noise = torch.zeros(2, N, 4), torch.Generator().manual_seed(0)
    for layer in rule.needs.fresh_layers:
        given.reused.setdefault(layer, (zeros, zeros))
        given.fresh.setdefault(layer, (zeros, zeros))
    given.n_layers = LAYERS
    if rule.needs.question_attention and given.question_attention is None:
        given.question_attention = torch.rand(LAYERS, N, generator=noise)
    if rule.needs.exact and given.kv_error is None:
        given.kv_error = torch.rand(LAYERS, N, generator=noise)
    chosen = []
    for layer in range(LAYERS):
        if rule.needs.watch and layer:
            given.watched.append(torch.rand(N, generator=noise))
        given.previous = rule.tokens(layer, given)
        chosen.append(given.previous)
    return chosen


def test_yamls_are_found() -> None:
    assert len(YAMLS) >= 7


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: p.stem)
def test_a_yaml_names_all_settings(path: Path) -> None:
    given = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(given, dict)
    assert {*signature(get_class(given["_target_"])).parameters} <= {*given}


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: p.stem)
@pytest.mark.parametrize("matched", [[], [7], range(5, 30), range(N - 1)], ids=len)
def test_contract(path: Path, matched: list[int]) -> None:
    """Matched tokens only, on the CPU, a subset of the layer before, the same when asked again."""
    rule, again = (instantiate(OmegaConf.load(path)) for _ in range(2))
    chosen = ran(rule, state(matched, seed=3))
    for layer, mask in enumerate(chosen):
        assert mask.shape == (N,)
        assert mask.dtype == torch.bool
        assert mask.device.type == "cpu"
        assert not (mask & ~state(matched).matched).any()
        if layer:
            assert not (mask & ~chosen[layer - 1]).any()
    for a, b in zip(chosen, ran(again, state(matched, seed=3)), strict=True):
        assert torch.equal(a, b)
    assert all(layer >= 0 for layer in rule.needs.fresh_layers)


def test_none_and_all() -> None:
    assert not torch.stack(ran(NoRecompute(), state())).any()
    assert all(torch.equal(mask, state().matched) for mask in ran(AllRecompute(), state()))


@given(n=st.integers(0, N), ratio=st.floats(0, 1))
def test_budget(n: int, ratio: float) -> None:
    budget = state(range(n)).budget(ratio)
    assert 0 <= budget <= n
    assert budget >= (1 if ratio > 0 and n else 0)
    assert abs(budget - ratio * n) <= 1


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.15, 0.5, 1.0])
def test_random_draws_its_share(ratio: float) -> None:
    chosen = ran(RandomRecompute(ratio), state(seed=1))
    assert all(torch.equal(chosen[0], mask) for mask in chosen)
    assert int(chosen[0].sum()) == state().budget(ratio)
    other = ran(RandomRecompute(ratio), state(seed=2))[0]
    assert torch.equal(chosen[0], other) == (ratio in (0.0, 1.0))


def test_random_reaches_every_token() -> None:
    seen = torch.zeros(N, dtype=torch.bool)
    for seed in range(100):
        seen |= ran(RandomRecompute(0.2), state(seed=seed))[0]
    assert torch.equal(seen, state().matched)


def test_epic_takes_the_head_of_each_chunk() -> None:
    """Chunks of 7, 8 and 10 tokens at 0.3: 2, 2 and 3 of them."""
    chosen = ran(EpicRecompute(0.3), state())[0]
    assert chosen.nonzero()[:, 0].tolist() == [5, 6, 12, 13, 20, 21, 22]
    by_count = ran(EpicRecompute(k=1), state())[0]
    assert by_count.nonzero()[:, 0].tolist() == [5, 12, 20]
    whole = ran(EpicRecompute(k=64), state())[0]
    assert torch.equal(whole, state().matched)
    for rule in (EpicRecompute(k=0), EpicRecompute(0.0)):
        assert not ran(rule, state())[0].any()


def test_epic_counts_matched_tokens_only() -> None:
    """New edges and exact prefix are passed over: the head is of what was matched."""
    matched = [7, 8, 9, 10, 14, 15, 19]
    chosen = ran(EpicRecompute(0.5), state(matched))[0]
    assert chosen.nonzero()[:, 0].tolist() == [7, 8, 14, 15]


def test_cacheblend_takes_what_deviates_most() -> None:
    deviation = torch.zeros(N)
    deviation[[6, 11, 28]] = torch.tensor([3.0, -5.0, 4.0])
    deviation[[1, 35]] = 100.0  # not matched
    chosen = ran(CacheBlendRecompute(0.12), with_deviation(deviation))
    for layer in (0, 1):
        assert torch.equal(chosen[layer], state().matched)
    for layer in (2, 3):
        assert chosen[layer].nonzero()[:, 0].tolist() == [6, 11, 28]


def test_cacheblend_looks_at_another_layer() -> None:
    deviation = torch.zeros(N)
    deviation[9] = 1.0
    rule = CacheBlendRecompute(0.01, probe_layer=2)
    assert rule.needs.fresh_layers == (2,)
    chosen = ran(rule, with_deviation(deviation, layer=2))
    assert torch.equal(chosen[2], state().matched)
    assert chosen[3].nonzero()[:, 0].tolist() == [9]
    first = ran(CacheBlendRecompute(0.01, probe_layer=0), with_deviation(deviation, layer=0))
    assert first[1].nonzero()[:, 0].tolist() == [9]


def test_ties_go_to_the_earlier_token() -> None:
    chosen = ran(CacheBlendRecompute(0.2), with_deviation(torch.ones(N)))[2]
    assert chosen.nonzero()[:, 0].tolist() == [5, 6, 7, 8, 9]


def test_deviation_is_summed_in_fp32() -> None:
    """bf16 inputs and the same numbers in fp32 choose alike (kvpress#276)."""
    noise = torch.randn(N, generator=torch.Generator().manual_seed(0)).bfloat16()
    low = ran(CacheBlendRecompute(0.3), with_deviation(noise, torch.bfloat16))[2]
    high = ran(CacheBlendRecompute(0.3), with_deviation(noise.float()))[2]
    assert torch.equal(low, high)


def test_deviation_ignores_what_was_never_written() -> None:
    """Rows of new tokens are uninitialised in the reused copy: they may hold anything."""
    given = with_deviation(torch.arange(N).float())
    given.reused[1][1][:, ~given.matched] = float("nan")
    chosen = ran(CacheBlendRecompute(0.12), given)[2]
    assert chosen.nonzero()[:, 0].tolist() == [27, 28, 29]


def test_controls_replace_what_was_reused() -> None:
    keys, values = torch.randn(2, 500, 8) * 3 + 1, torch.randn(2, 500, 8)
    zero, noise = ZeroKV(), RandomKV()
    assert isinstance(zero, Adjusts)
    assert isinstance(noise, Adjusts)
    assert not isinstance(NoRecompute(), Adjusts)
    assert not torch.stack(zero.adjust(0, keys, values, state())).any()
    new, _ = noise.adjust(0, keys, values, state(seed=1))
    assert new.shape == keys.shape
    assert torch.allclose(new.mean(1), keys.mean(1), atol=0.6)
    assert torch.allclose(new.std(1), keys.std(1), atol=0.6)
    assert not torch.allclose(new, keys, atol=0.5)
    assert torch.equal(new, noise.adjust(0, keys, values, state(seed=1))[0])
    assert not torch.equal(new, noise.adjust(1, keys, values, state(seed=1))[0])
    one, _ = noise.adjust(0, keys[:, :1], values[:, :1], state())
    assert one.isfinite().all()
    assert noise.adjust(0, keys.bfloat16(), values, state())[0].dtype == torch.bfloat16


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan"), "abc", None, True])
@pytest.mark.parametrize("rule", [RandomRecompute, EpicRecompute, CacheBlendRecompute])
def test_a_ratio_out_of_range_is_refused(rule: Any, ratio: Any) -> None:
    with pytest.raises(SettingError, match=r"recompute.ratio=.*: expected a number from 0.0 to 1"):
        rule(ratio)


def test_other_settings_out_of_range_are_refused() -> None:
    with pytest.raises(SettingError, match=r"recompute\.k=-1"):
        EpicRecompute(k=-1)
    with pytest.raises(SettingError, match=r"recompute\.probe_layer=-1"):
        CacheBlendRecompute(probe_layer=-1)
    with pytest.raises(SettingError, match=r"recompute\.deviation='norm': expected value or key"):
        CacheBlendRecompute(deviation="norm")


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (EpicRecompute, "k"),
        (FusionRAGRecompute, "group"),
        (RefineRecompute, "sweeps"),
        (CacheBlendRecompute, "probe_layer"),
        (CacheBlendRecompute, "gradual"),
        (KVShareRecompute, "probe_layer"),
    ],
)
@pytest.mark.parametrize("value", [2.5, 2.0, True, "abc", float("nan")])
def test_what_is_no_whole_number_is_refused(rule: Any, name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=rf"recompute\.{name}={value!r}: expected"):
        rule(**{name: value})


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=5), ratio=st.floats(0.01, 0.99))
def test_short_chunks_keep_at_least_one_token(lengths: list[int], ratio: float) -> None:
    """``int(n * ratio)`` of a short chunk is 0; a ratio above 0 is at least one token (kvpress)."""
    n = sum(lengths)
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    mask = torch.ones(n, dtype=torch.bool)
    given = State(n, mask, ~mask, list(pairwise(edges)))
    for start, end in given.chunks:
        chosen = EpicRecompute(ratio).tokens(0, given)[start:end]
        assert 1 <= int(chosen.sum()) <= max(1, round(ratio * (end - start)))
    assert RandomRecompute(ratio).tokens(0, given).any()


def test_kriging_takes_heads_and_evenly_spaced_tokens() -> None:
    """Half of 10 of 25 tokens: first, then second tokens of the three chunks; and samples."""
    rule = KrigeRecompute(0.4, heads=0.5)
    chosen = rule.tokens(0, state())
    heads, samples = (t.nonzero()[:, 0].tolist() for t in rule._choose(state())[2:])
    assert heads == [5, 6, 12, 13, 20]
    assert samples == [9, 15, 19, 24, 28]
    assert chosen.nonzero()[:, 0].tolist() == sorted(heads + samples)
    spread = rule.spread(state(previous=chosen))
    assert spread is not None
    assert spread.sources.tolist() == chosen.nonzero()[:, 0].tolist()
    assert spread.span == slice(7, 30)
    assert KrigeRecompute(1.0).tokens(0, state()).equal(state().matched)
    assert KrigeRecompute(1.0).spread(state()) is None
    assert KrigeRecompute(0.0).spread(state()) is None


@pytest.mark.parametrize("block", [1, 3, 256])
def test_kriging_is_the_best_linear_predictor(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the dense equations written out: one matrix, with what all chunks have in common."""
    monkeypatch.setattr(krige, "BLOCK", block)
    rule = KrigeRecompute(0.4, heads=0.5)
    given = state([*range(5, 18), *range(20, 30)])
    chosen, heads = rule.tokens(0, given), rule._choose(given)[2]
    spread = rule.spread(given)
    assert spread is not None
    noise = torch.Generator().manual_seed(0)
    off = torch.randn(len(spread.sources), 6, generator=noise) + torch.randn(6, generator=noise)
    carried = spread.carry(off, 3 * off[:, :2])
    samples = ~heads[spread.sources]
    chunk = torch.tensor(
        [next(i for i, (_, end) in enumerate(given.chunks) if t < end) for t in range(30)]
    )

    def common(x: torch.Tensor) -> float:
        of = {i: chunk[int(t)] for i, t in enumerate(spread.sources) if samples[i]}
        across = [float(x[i] @ x[j]) for i in of for j in of if of[i] != of[j]]
        square = [float(x[i] @ x[i]) for i in of]
        return max(0.0, float(np.mean(across)) / float(np.mean(square)))

    def covariance(a: int, b: int, p: float) -> float:
        d = abs(a - b)
        near = 0.1 + 0.2 * np.exp(-d / 8) + 0.25 * np.exp(-d / 100)
        own = (4.0 if heads[a] else 0.35) if a == b else 0.0
        return p + own + (near if chunk[a] == chunk[b] else 0.0)

    for x, found in ((off, carried[0]), (3 * off[:, :2], carried[1])):
        p, at = common(x), spread.sources.tolist()
        assert p > 0.05
        among = np.array([[covariance(a, b, p) for b in at] for a in at])
        for token in range(*spread.span.indices(spread.span.stop)):
            want = np.zeros(x.shape[1])
            if given.matched[token] and not chosen[token]:
                towards = np.array([covariance(a, token, p) for a in at])
                want = towards @ np.linalg.solve(among, x.double().numpy())
            assert np.abs(found[token - spread.span.start].numpy() - want).max() < 1e-4
    assert not any(t[~(given.matched & ~chosen)[spread.span]].any() for t in carried)


@pytest.mark.parametrize(
    "lengths", [[150] * 20, [8] * 200 + [1500], [1] * 300 + [200], [8] * 400 + [3000], [700, 5, 90]]
)
def test_kriging_costs_its_sources_times_its_tokens_whatever_the_chunks(lengths: list[int]) -> None:
    """Short chunks beside a long one are not padded to its size."""
    n, edges = sum(lengths), np.cumsum([0, *lengths]).tolist()
    mask = torch.ones(n, dtype=torch.bool)
    rule = KrigeRecompute(0.06)
    given = State(n, mask, ~mask, list(pairwise(edges)))
    spread = rule.spread(given)
    assert spread is not None
    at = spread.sources
    own = [int(((at >= a) & (at < b)).sum()) for a, b in given.chunks]
    told = sum((k + 1) * (b - a - k) for k, (a, b) in zip(own, given.chunks, strict=True))
    apart = len(at) * (len(lengths) + 1)  # sums of chunks and mean, for what the prompt shares
    assert spread.per_column <= 4 * told + apart


def test_kriging_of_one_chunk_and_of_chunks_without_samples() -> None:
    """What the prompt has in common cannot be told from one chunk; others get the mean."""
    one = state(range(12, 20))
    spread = KrigeRecompute(0.5, heads=0.0).spread(one)
    assert spread is not None
    known = torch.ones(len(spread.sources), 2)
    assert 0.3 < float(spread.carry(known, known)[0][0, 0]) < 1
    few = state()
    spread = KrigeRecompute(0.08, heads=0.0).spread(few)  # two samples, in three chunks
    assert spread is not None
    carried, _ = spread.carry(torch.ones(2, 2), torch.ones(2, 2))
    assert bool((carried[~few.nothing()[spread.span]] >= 0).all())
    assert 0 < float(carried[14 - spread.span.start, 0]) < 1
    assert not torch.isnan(spread.carry(torch.zeros(2, 2), torch.zeros(2, 2))[0]).any()


def test_kriging_recomputes_behind_the_edits_of_similar_chunks() -> None:
    """20 identical tokens and 20 of a similar chunk whose runs begin at 20, 26 and 37."""
    similar = torch.arange(N) >= 20
    runs = [(0, 20), (20, 26), (26, 37), (37, 40)]
    everything = torch.ones(N, dtype=torch.bool)
    chunks = [(0, 20), (20, 40)]
    given = State(N, everything, ~everything, chunks, runs, similar, torch.zeros(N))
    chosen = KrigeRecompute(0.2, heads=0.5).tokens(0, given)
    assert chosen.nonzero()[:, 0].tolist() == [0, 1, 6, 15, 20, 21, 26, 37]
    spread = KrigeRecompute(0.2, heads=0.5).spread(given)
    assert spread is not None
    assert spread.sources.tolist() == [0, 1, 6, 15]
    assert spread.span.stop == 20
    assert KrigeRecompute(1.0).tokens(0, given).all()
    alone = State(N, similar, ~similar, chunks[1:], runs[1:], similar, torch.zeros(N))
    assert KrigeRecompute(0.2).spread(alone) is None
    assert int(KrigeRecompute(0.2).tokens(0, alone).sum()) == 4


def test_kriging_takes_long_runs_behind_another_text_for_chunks() -> None:
    """Runs of 40, 8 and 40 tokens of a similar chunk; of what is ahead of the last two most is
    another text."""
    n, runs = 88, [(0, 40), (40, 48), (48, 88)]
    everything, apart = torch.ones(n, dtype=torch.bool), torch.zeros(n)
    apart[40:] = torch.linspace(0.5, 0.2, 48)
    given = State(n, everything, ~everything, [(0, n)], runs, everything, apart)
    rule = KrigeRecompute(0.15, heads=0.5)
    spread = rule.spread(given)
    assert spread is not None
    assert (spread.span.start, spread.span.stop) == (51, 88)  # its first three tokens are heads
    assert spread.sources.tolist() == [48, 49, 50, 57, 69, 81]
    chosen = rule.tokens(0, given).nonzero()[:, 0].tolist()
    assert set(chosen) == {0, 1, 2, 3, 40, 41, 42, *spread.sources.tolist()}
    apart[:] = 0.0
    assert rule.spread(given) is None
