"""Several prompts in one forward are what each is alone; padding, beams and hit lengths change
nothing.

unsloth PR 3795, TransformerLens#1609 (A23); transformers#34232, #27449 (A24); vLLM PR 46592 (H4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from kvsem.batch import Packed, unpad
from kvsem.engine import Engine
from kvsem.errors import DataError, KvsemError, ModelError
from kvsem.forward import Forward, Job, KVBuffer, Select
from kvsem.lm import CACHE, LM
from kvsem.memory.memory import MemorySettings
from kvsem.memory.pool import PoolFullError
from kvsem.recompute.cacheblend import CacheBlendRecompute
from kvsem.recompute.epic import EpicRecompute
from kvsem.types import Request
from tests.tiny import (
    SYSTEM,
    copy_of,
    every,
    exact,
    only,
    plain_generate,
    plain_logits,
    prose,
    relative,
    tiny_engine,
    tiny_tokenizer,
    tokens,
)

LENGTHS = (37, 1, 52, 12, 24)
PAD = 3


def noise(lm: LM, ids: np.ndarray, seed: int) -> KVBuffer:
    """Wrong KV under every token."""
    kv = exact(lm, ids)[0]
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*kv.keys, *kv.values):
        tensor += 0.5 * torch.randn(tensor.shape, generator=generator)
    return kv


def shrinking(n: int, seed: int) -> Select:
    """Nested random sets by layer, the second and third the same object."""
    order = torch.randperm(n - 1, generator=torch.Generator().manual_seed(seed))
    sets = [only(n, order[: n * share // 8]) for share in (6, 4, 2)]
    return lambda layer: (sets[0], sets[1], sets[1], sets[2])[layer]


def resume(n: int, start: int) -> Select:
    rest = torch.arange(n) >= start
    return lambda _: rest


def mixed(lm: LM) -> list[Job]:
    """Cold, one token, sets that shrink, behind a prefix, and a set that never changes."""
    ids = [tokens(n, seed=n) for n in LENGTHS]
    behind = exact(lm, ids[3])[0]
    return [
        Job(ids[0], lm.buffer(LENGTHS[0]), lambda _: every(LENGTHS[0])),
        Job(ids[1], lm.buffer(LENGTHS[1]), lambda _: every(1)),
        Job(ids[2], noise(lm, ids[2], 2), shrinking(LENGTHS[2], 5)),
        Job(ids[3], behind, resume(LENGTHS[3], 7)),
        Job(ids[4], noise(lm, ids[4], 4), shrinking(LENGTHS[4], 6)),
    ]


def same_kv(a: Any, b: Any, n: int | None = None) -> None:
    for mine, theirs in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
        assert relative(mine[:, :, :n], theirs[:, :, :n]) <= 1e-5


def test_each_is_what_it_is_alone(lm: LM) -> None:
    together, alone = mixed(lm), mixed(lm)
    results = lm.prefill_many(together)
    assert len({int(computed[0].sum()) for _, computed in results}) > 2
    for job, apart, (logits, computed) in zip(together, alone, results, strict=True):
        want, ran = lm.prefill(*apart[:3])
        assert (logits - want).abs().max() <= 1e-4
        assert (computed == ran).all()
        assert job[1].length == len(job[0])
        same_kv(job[1], apart[1])


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 1, 3)])
def test_nobody_sees_another_prompt(lm: LM, order: Sequence[int]) -> None:
    """Another neighbour, or its KV full of poison: not a bit of difference to the last digits."""
    jobs = mixed(lm)
    want = lm.prefill_many([jobs[2], jobs[0]])[0][0]
    jobs = [mixed(lm)[i] for i in order]
    at = order.index(2)
    for i, job in enumerate(jobs):
        kv = job.kv
        assert isinstance(kv, KVBuffer)
        if i != at and kv.length:
            for tensor in (*kv.keys, *kv.values):
                tensor += 100.0
    assert (lm.prefill_many(jobs)[at][0] - want).abs().max() <= 1e-4


def test_no_prompt_is_no_forward(llama: LM) -> None:
    assert llama.prefill_many([]) == []


@pytest.mark.parametrize("at", [0, 1])
def test_one_that_is_refused_changes_none(llama: LM, at: int) -> None:
    """A set that grows with depth, in either place: no length changes and no hook is left."""
    n = LENGTHS[2]
    growing: Select = lambda layer: only(n, [3] if layer < 2 else [3, 4])  # noqa: E731
    jobs = [
        Job(tokens(n), noise(llama, tokens(n), 1), growing),
        Job(tokens(9), llama.buffer(9), lambda _: every(9)),
    ]
    with pytest.raises(KvsemError, match="layer before left out"):
        llama.prefill_many([jobs[at], jobs[1 - at]])
    assert jobs[1].kv.length == 0
    assert llama.prefill_many(jobs[1:])[0][0].isfinite().all()


def test_what_cannot_be_a_batch_is_refused(llama: LM) -> None:
    kv, ids = llama.buffer(9), tokens(9)
    with pytest.raises(KvsemError, match="cannot share one KV"):
        llama.prefill_many([Job(ids, kv, lambda _: every(9))] * 2)
    for wrong in (ids[None], np.stack([ids, ids]), ids[:0]):
        with pytest.raises(ModelError, match=r"kvsem\.batch\.unpad"):
            llama.prefill(wrong, kv, lambda _: every(9))
    with pytest.raises(KvsemError, match="9 tokens do not fit a buffer of 8"):
        llama.prefill_many([Job(ids, each, lambda _: every(9)) for each in (kv, llama.buffer(8))])


def test_keys_that_change_behind_the_cache_are_noticed(llama: LM) -> None:
    """An architecture that works on K after caching it would attend over the wrong keys."""
    kvs = [llama.buffer(3), llama.buffer(2)]
    parts = [
        Forward(kv.capacity, torch.arange(kv.capacity), llama.n_layers, llama.device, kv=kv)
        for kv in kvs
    ]
    packed, shape = Packed(parts), llama.shapes[0]
    k = torch.randn(1, shape.kv_heads, 5, shape.key_dim)
    query = torch.randn(1, shape.query_heads, 5, shape.key_dim)
    keys, values = packed.put(k, k)
    assert packed.attend(query, keys, values, None, 1.0).shape == query.shape
    with pytest.raises(ModelError, match="one prompt at a time"):
        packed.attend(query, keys * 1, values, None, 1.0)
    with pytest.raises(ModelError, match="computed 4 tokens, asked for 5"):
        packed.put(k[:, :, :4], k[:, :, :4])


# Engine ---------------------------------------------------------------------------------------


def ask(i: int, passages: Sequence[int], question: str = "Why?", **more: Any) -> Request:
    texts = [prose(passage, 14 + passage) for passage in passages]
    return Request.rag(f"r{i}", texts, f"{question} {i}", system=SYSTEM, **more)


def requests() -> list[Request]:
    return [
        ask(0, [1, 2], "Where was the museum?"),  # chunks, moved
        ask(1, [7]),  # cold behind the system prompt
        Request("plain", text=prose(40, 9)),  # cold, another prompt
        ask(2, [3, 4]),  # a prefix hit
        ask(3, [5, 1, 8], prompt_logprobs=True),  # every token, every row of logits
        ask(4, [4, 3, 1]),  # chunks and a new one
    ]


def served_before(lm: LM, rule: Any) -> Engine:
    """An engine that knows passages 1 to 5 and has answered request 2."""
    engine = tiny_engine(lm, recompute=rule, memory=MemorySettings(page_size=4))
    engine.ingest([ask(90 + i, [i]) for i in (1, 2, 3, 4, 5)])
    engine.generate(ask(2, [3, 4]))
    return engine


@pytest.mark.parametrize(
    "rule", [CacheBlendRecompute(0.3), EpicRecompute(0.2)], ids=["cacheblend", "epic"]
)
def test_mixed_reuse_is_what_it_is_one_by_one(lm: LM, rule: Any) -> None:
    together = served_before(lm, rule).prefill_many(requests())
    single = served_before(lm, rule)
    kinds = set()
    for request, done in zip(requests(), together, strict=True):
        want = single.prefill(request)
        single.drop(want)
        counts = done.computed.sum(axis=1)
        kinds |= {str(match.kind) for match in done.plan.matches}
        kinds |= {"narrowed"} if counts[0] > counts[-1] > 0 else set()
        assert (done.logits - want.logits).abs().max() <= 1e-4
        assert done.first == want.first
        assert (done.computed == want.computed).all()
        assert (done.plan.provenance == want.plan.provenance).all()
        counted = ("multiplications", "recomputed_layer_tokens")
        assert [getattr(done.cost, c) for c in counted] == [getattr(want.cost, c) for c in counted]
        if request.prompt_logprobs:
            assert done.prompt_logprobs is not None
            assert want.prompt_logprobs is not None
            assert (done.prompt_logprobs - want.prompt_logprobs).abs().max() <= 1e-4
    assert {"prefix", "chunk", "none"} <= kinds
    assert ("narrowed" in kinds) == isinstance(rule, CacheBlendRecompute)


def test_kv_and_answers_of_a_batch(lm: LM, plain: Any) -> None:
    """The pages of each hold what they hold alone, decoding goes on from there, and what a batch
    leaves behind is exact prefix for the next."""
    batch = [ask(0, [6]), ask(1, [7, 9]), Request("plain", text=prose(40, 9))]
    engine = tiny_engine(lm, memory=MemorySettings(page_size=4))
    for _ in range(2):
        together = engine.prefill_many(batch)
        for done in together:
            cold, _ = exact(lm, done.prompt.ids)
            same_kv(done.kv, cold)
            answer = lm.decode(done.first, done.kv, 6)
            assert answer == plain_generate(plain, done.prompt.ids, 6)
            engine.leave(done, answer)
    assert all(done.plan.n_paged == len(done.prompt.ids) - 1 for done in together)
    assert engine.memory.pool.n_active == 0


def test_times_are_the_batch_s_and_counts_the_request_s(llama: LM) -> None:
    engine = tiny_engine(llama)
    short, long = engine.prefill_many([ask(0, [1]), ask(1, [2, 3, 4])])
    assert short.cost.ttft_ms == long.cost.ttft_ms
    assert short.cost.ttft_ms > short.cost.plan_ms + short.cost.load_ms + short.cost.prefill_ms
    assert short.cost.multiplications < long.cost.multiplications


def test_a_batch_without_room_holds_nothing(llama: LM) -> None:
    batch: list[Request] = [ask(i, [i]) for i in range(4)]
    n = len(tiny_engine(llama).render(batch[0]).ids)
    engine = tiny_engine(llama, memory=MemorySettings(page_size=4, pool_tokens=2 * n + 40))
    with pytest.raises(PoolFullError):
        engine.prefill_many(batch)
    engine.memory.pool.check()
    assert engine.memory.pool.n_active == 0
    assert len(engine.prefill_many(batch[:2])) == 2


def test_a_batch_that_breaks_gives_everything_back(
    llama: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(llama)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(llama), "prefill_many", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.prefill_many([ask(0, [1]), ask(1, [2])])
    assert engine.memory.pool.n_active == 0


# Padding --------------------------------------------------------------------------------------

PROMPTS = [tokens(n, seed=n).tolist() for n in (5, 21, 13)]


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` as a tokenizer gives them."""
    rows = [torch.tensor(ids) for ids in PROMPTS]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side=side)
    ones = [torch.ones_like(row) for row in rows]
    return ids, pad_sequence(ones, batch_first=True, padding_side=side)


@pytest.mark.parametrize("side", ["left", "right"])
def test_kv_of_a_padded_batch_is_that_of_unpadded_prompts(lm: LM, plain: Any, side: str) -> None:
    """A23: shifted positions would leave the logits alone and the stored keys wrong."""
    ids, mask = padded(side)
    prompts = unpad(ids, mask)
    assert [prompt.tolist() for prompt in prompts] == PROMPTS
    kvs = [lm.buffer(len(prompt)) for prompt in prompts]
    jobs = [Job(p, kv, resume(len(p), 0)) for p, kv in zip(prompts, kvs, strict=True)]
    results = lm.prefill_many(jobs)
    for prompt, kv, (logits, _) in zip(prompts, kvs, results, strict=True):
        assert (logits - plain_logits(plain, prompt)[-1]).abs().max() <= 1e-4
        same_kv(kv, exact(lm, prompt)[0])


def test_a_plain_forward_over_left_padding_stores_other_keys(plain: Any) -> None:
    """What the test above would find, were padding taken for tokens' places."""
    ids, mask = padded("left")
    with torch.no_grad():
        batch = plain(input_ids=ids, attention_mask=mask, use_cache=True)[CACHE]
        alone = plain(input_ids=torch.tensor([PROMPTS[0]]), use_cache=True)[CACHE]
    n = len(PROMPTS[0])
    assert relative(batch.layers[0].keys[:1, :, -n:], alone.layers[0].keys) > 0.1
    assert relative(batch.layers[0].values[:1, :, -n:], alone.layers[0].values) <= 1e-5


def test_a_tokenizer_s_batch_is_taken_apart() -> None:
    tokenizer = tiny_tokenizer()
    texts = ["the river", "a market of the northern village", "bridge"]
    want = [tokenizer(text)["input_ids"] for text in texts]
    n = max(map(len, want))
    ids = np.array([row + [PAD] * (n - len(row)) for row in want])
    mask = np.array([[1] * len(row) + [0] * (n - len(row)) for row in want])
    assert [row.tolist() for row in unpad(ids, mask)] == want
    assert [row.tolist() for row in unpad(want[0:1])] == want[0:1]
    assert all(row.dtype == np.int64 for row in unpad(ids.astype(np.int32), mask.astype(bool)))


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[1, 2, 3]], [[1, 0, 1]], "row 0 has padding between its tokens"),
        ([[1, 2], [3, 4]], [[1, 1], [0, 0]], "row 1 has no token"),
        ([[1, 2]], [[1, 2]], "1 for a token and 0 for padding"),
        ([1, 2], None, r"got \[2\]"),
        ([[1, 2]], [[1]], r"got \[1, 2\] and \[1, 1\]"),
        ([[1.0, 2.0]], None, "input_ids: expected whole numbers, got float64"),
        ([[1, 2]], [[0.0, -3e38]], "attention_mask: expected whole numbers"),
        ([[[1]]], [[[1]]], r"\[rows, n\]"),
    ],
)
def test_a_batch_that_is_none_is_refused_in_one_line(ids: Any, mask: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        unpad(ids, mask)
    assert "\n" not in str(caught.value)


# Beams and batches from one prefix --------------------------------------------------------------


@pytest.mark.parametrize(("beams", "rows"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 3)])
def test_beams_and_batches_from_one_prefix(lm: LM, plain: Any, beams: int, rows: int) -> None:
    """A24: a cache of one row, repeated, answers like no cache, and nothing of it is kept."""
    request = ask(0, [1, 2], max_new_tokens=4)
    engine = tiny_engine(lm)
    engine.generate(request)
    done = engine.prefill(request)
    assert done.plan.n_paged > 0
    length, n_pages = done.kv.length, engine.memory.pool.n_cached_tokens
    before = [t.clone() for t in (*done.kv.keys, *done.kv.values)]
    done.kv.truncate_to(length - 1)
    cache = lm.to_cache(done.kv)
    cache.batch_repeat_interleave(beams * rows)
    ids = torch.from_numpy(done.prompt.ids)[None].repeat(rows, 1)

    def answers(**more: Any) -> list[list[int]]:
        out = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            num_beams=beams,
            do_sample=False,
            pad_token_id=PAD,
            **more,
        )
        rows_: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return rows_

    with torch.no_grad():
        assert answers(**{CACHE: cache}) == answers()
    for old, new in zip(before, (*done.kv.keys, *done.kv.values), strict=True):
        assert torch.equal(old[:, :, : length - 1], new)
    done.kv.length = length
    engine.leave(done)
    assert engine.memory.pool.n_cached_tokens == n_pages


# Hit lengths ------------------------------------------------------------------------------------


def test_every_hit_length_gives_one_answer(lm: LM, plain: Any) -> None:
    """H4: where the prefill resumes changes its last bits, and nothing that is seen."""
    n = 18
    ids = tokens(n, seed=3)
    cold, logits = exact(lm, ids)
    want = plain_generate(plain, ids, 6)
    jobs = []
    for hit in range(n):
        kv = copy_of(exact(lm, ids, room=6)[0])
        for tensor in (*kv.keys, *kv.values):
            tensor[:, :, hit:] = 7.0
        kv.length = hit
        jobs.append((ids, kv, resume(n, hit)))
    for got, _ in lm.prefill_many([Job(ids, copy_of(kv), select) for ids, kv, select in jobs]):
        assert (got - logits).abs().max() <= 1e-4
    for _, kv, select in jobs:
        got, _ = lm.prefill(ids, kv, select)
        assert (got - logits).abs().max() <= 1e-4
        same_kv(kv, cold, n)
        assert lm.decode(int(got.argmax()), kv, 6) == want
