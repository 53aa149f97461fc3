"""Caches handed out report their length, stay what they were, and always leave a token to run.

MemOS#2313, PR 2303; mlxcel#1760; transformers#36151, #38727, PR 47597, #47433.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import pytest
import torch

from kvsem.errors import KvsemError, SettingError
from kvsem.keys import chain_root
from kvsem.lm import CACHE, LM
from kvsem.memory.pages import PagedKV
from kvsem.recompute.none import NoRecompute
from kvsem.types import Message, Request, Segment
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
    tiny_model,
    tokens,
    wrap,
)

N = 30
IDS = tokens(N, seed=12)


def stored_bytes(engine: Any) -> dict[str, str]:
    return {
        entry.key: hashlib.sha256(
            b"".join(t.numpy().tobytes() for t in (*entry.keys, *entry.values))
        ).hexdigest()
        for entry in engine.store
    }


def paged_bytes(engine: Any, ids: Any) -> list[bytes]:
    """Of the prefix pages of ``ids``, tail included, by layer."""
    root = chain_root(engine.lm.namespace())
    matched = engine.memory.prefix.match(root, ids)
    kv = PagedKV(engine.memory.pages, matched.held, matched.n_tokens)
    assert kv.length == len(ids)
    return [t.numpy().tobytes() for t in (*kv.keys, *kv.values)]


@pytest.mark.parametrize("n", [0, 1, WINDOW + 1, N])
def test_cache_reports_its_length(lm: LM, n: int) -> None:
    kv, _ = exact(lm, IDS, room=3)
    kv.truncate_to(n)
    cache: Any = lm.to_cache(kv)
    assert cache.get_seq_length() == n
    for layer in cache.layers if n else []:
        assert layer.keys.shape[-2] == n
        assert layer.is_initialized


def test_cache_is_looked_at(lm: LM, plain: Any) -> None:
    """The last token over the cache: exact logits, and other ones over no cache."""
    kv, _ = exact(lm, IDS)
    kv.truncate_to(N - 1)
    last = torch.from_numpy(IDS)[None, -1:]
    at = torch.tensor([[N - 1]])
    with torch.no_grad():
        over = plain(input_ids=last, position_ids=at, **{CACHE: lm.to_cache(kv)}).logits[0, -1]
        empty = plain(input_ids=last, position_ids=at).logits[0, -1]
    want = plain_logits(plain, IDS)[-1]
    assert (over - want).abs().max() <= 1e-4
    assert (empty - want).abs().max() > 0.1


def test_generate_from_an_assembled_cache(lm: LM, plain: Any) -> None:
    """`model.generate(full_ids, cache=assembled N-1)`, on the plain model and on ours."""
    want = plain_generate(plain, IDS, 15)
    for model in (plain, lm.model):
        kv, _ = exact(lm, IDS)
        kv.truncate_to(N - 1)
        assert plain_generate(model, IDS, 15, **{CACHE: lm.to_cache(kv)}) == want


def test_cache_is_a_copy(lm: LM, plain: Any) -> None:
    kv, _ = exact(lm, IDS, room=4)
    kv.truncate_to(N - 1)
    before = [t.clone() for t in (*kv.keys, *kv.values)]
    cache: Any = lm.to_cache(kv)
    plain_generate(plain, IDS, 5, **{CACHE: cache})
    for layer in cache.layers:
        layer.keys.zero_()
    for old, new in zip(before, (*kv.keys, *kv.values), strict=True):
        assert torch.equal(old[:, :, : N - 1], new[:, :, : N - 1])


def test_three_answers_from_one_store_are_one_answer(lm: LM) -> None:
    """Stored bytes never change and never grow; the third answer is the first."""
    request = Request.rag("r", [prose(30), prose(31)], "Why?", system=SYSTEM, max_new_tokens=12)
    engine = tiny_engine(lm, admit="none")
    engine.ingest([request])
    before, lengths = stored_bytes(engine), [len(e.ids) for e in engine.store]
    outputs = [engine.generate(request) for _ in range(3)]
    assert outputs[0].tokens == outputs[1].tokens == outputs[2].tokens
    assert torch.equal(outputs[0].logits, outputs[2].logits)
    assert stored_bytes(engine) == before
    assert [e.keys[0].shape[1] for e in engine.store] == lengths
    assert engine.store.nbytes == sum(e.nbytes for e in engine.store)


def test_what_a_caller_does_to_its_kv_stays_with_it(llama: LM) -> None:
    """A request can write neither stored chunks nor the prefix pages that it shares, and nothing
    any more once it has left."""
    request = Request.rag("r", [prose(30)], "Why?", system=SYSTEM)
    engine = tiny_engine(llama)
    done = engine.prefill(request)
    length = done.kv.length
    engine.leave(done)
    with pytest.raises(KvsemError, match="given back"):
        done.kv.read(0, 1)
    with pytest.raises(KvsemError, match="given back"):
        done.kv.cut(0, 1)
    before, pages = stored_bytes(engine), paged_bytes(engine, done.prompt.ids)
    assert len(before) == 1
    again = engine.prefill(request)
    n_shared = again.kv.n_shared
    assert n_shared > 0
    keys, values = (t[:, :, :1] * 0 for t in again.kv.read(0, 1))
    for token in (0, n_shared - 1):
        with pytest.raises(KvsemError, match="shared"):
            again.kv.write(0, slice(token, token + 1), keys, values)
        with pytest.raises(KvsemError, match="shared"):
            again.kv.write(0, torch.tensor([token]), keys, values)
    for layer in range(llama.n_layers):
        for token in range(n_shared, length):
            again.kv.write(layer, slice(token, token + 1), keys, values)
    engine.drop(again)
    assert stored_bytes(engine) == before
    assert paged_bytes(engine, done.prompt.ids) == pages
    assert all(t.is_contiguous() for t in (*engine.memory.pages.keys, *engine.memory.pages.values))


@pytest.mark.parametrize("words", [1, 5, 6, 7, 12, 40])
def test_the_same_prompt_twice(lm: LM, plain: Any, words: int) -> None:
    """A plain text is wholly cached the second time: the last token still runs, same answer."""
    request = Request("p", text=prose(words, words), max_new_tokens=10)
    engine = tiny_engine(lm)
    first, second = engine.generate(request), engine.generate(request)
    n = first.plan.n_tokens
    ids = engine.prefill(request).prompt.ids
    assert list(first.tokens) == list(second.tokens) == plain_generate(plain, ids, 10)
    assert second.counts()["prefix"] == n - 1
    assert second.counts()["new"] == 1
    assert second.computed.sum() == lm.n_layers
    assert (second.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4


def test_a_prompt_of_one_token(llama: LM) -> None:
    bare = copy.deepcopy(llama.tokenizer)
    bare.chat_template = "{{ messages[0]['content'] }}"
    lm = LM(llama.model, bare)
    lm.support = llama.support
    request = Request("one", (Message("user", (Segment("passage", "?"),)),), max_new_tokens=3)
    engine = tiny_engine(lm)
    outputs = [engine.generate(request) for _ in range(2)]
    assert outputs[0].plan.n_tokens == 1
    assert outputs[0].tokens == outputs[1].tokens
    assert outputs[1].counts()["new"] == 1


def test_a_buffer_too_small_is_refused(llama: LM) -> None:
    for capacity in (1, N - 1):
        with pytest.raises(KvsemError, match=f"{N} tokens do not fit a buffer of {capacity}"):
            llama.prefill(IDS, llama.buffer(capacity), lambda _: every(N))
    kv, _ = exact(llama, IDS, room=1)
    llama.extend([5], kv)
    with pytest.raises(KvsemError, match=f"{N + 2} tokens do not fit"):
        llama.extend([5], kv)
    assert kv.length == N + 1


def test_a_prompt_past_the_context_is_refused(llama: LM) -> None:
    n = llama.max_tokens + 1
    with pytest.raises(KvsemError, match=f"{n} tokens.* context of {llama.max_tokens}"):
        llama.prefill(tokens(n), llama.buffer(n), lambda _: every(n))
    with pytest.raises(KvsemError, match="context"):
        tiny_engine(llama).generate(Request("long", text=prose(1, 900)))
    room = Request("room", text=prose(1, 30), max_new_tokens=llama.max_tokens)
    with pytest.raises(KvsemError, match="new ones"):
        tiny_engine(llama).generate(room)


@pytest.mark.parametrize("n", [0, 1, N - 1, N])
def test_truncate_to(lm: LM, n: int) -> None:
    """What is cut off is forgotten: going on from there is exact, on sliding layers too."""
    kv, _ = exact(lm, IDS, room=5)
    kv.truncate_to(n)
    assert kv.length == n
    assert lm.to_cache(kv).get_seq_length() == n
    rest = IDS[n:].tolist() or [7]
    got = lm.extend(rest, kv)[-1]
    want = exact(
        lm, IDS if n < N else torch.cat([torch.from_numpy(IDS), torch.tensor([7])]).numpy()
    )
    assert (got - want[1]).abs().max() <= 1e-4


@pytest.mark.parametrize("n", [N + 1, -1, -5])
def test_truncate_outside_the_length_is_refused(llama: LM, n: int) -> None:
    kv, _ = exact(llama, IDS, room=9)
    with pytest.raises(SettingError, match=rf"n={n}: expected 0 to .* {N}"):
        kv.truncate_to(n)
    assert kv.length == N


def test_nothing_keeps_a_graph() -> None:
    """Called in grad mode, with weights that want gradients: everything can still be copied."""
    model = tiny_model("llama").requires_grad_(True)
    lm = wrap(model)
    engine = tiny_engine(lm, recompute=NoRecompute())
    request = Request.rag("r", [prose(1), prose(2)], "Why?", system=SYSTEM)
    with torch.enable_grad():
        engine.ingest([request])
        done = engine.prefill(request)
        output = engine.generate(request)
    for entry in engine.store:
        assert not any(t.requires_grad for t in (*entry.keys, *entry.values))
        copy.deepcopy(entry)
    assert not output.logits.requires_grad
    for tensor in (*done.kv.keys, *done.kv.values, *engine.memory.pages.keys):
        assert not tensor.requires_grad
        copy.deepcopy(tensor)
    copy.deepcopy(lm.to_cache(done.kv))
    with torch.enable_grad():
        engine.leave(done)


def test_question_pass_needs_room_too(llama: LM) -> None:
    with pytest.raises(KvsemError, match="do not fit"):
        llama.question_attention(IDS, llama.buffer(N - 1), only(N, []).nonzero()[:, 0].numpy())
