"""Requests in flight together answer as they would alone, and hold exactly what they should."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from kvsem.engine import Engine, Loaded, Prefilled
from kvsem.errors import KvsemError, SettingError
from kvsem.lm import LM
from kvsem.memory.memory import MemorySettings
from kvsem.memory.pool import PoolFullError
from kvsem.serving.loop import Loop, Served
from kvsem.types import Request
from tests.tiny import SYSTEM, plain_generate, prose, tiny_engine, tiny_lm

PAGE = 4


def ask(i: int, passage: int, n: int = 8, words: int = 16) -> Request:
    return Request.rag(
        f"r{i}", [prose(passage, words)], f"Why {i}?", system=SYSTEM, max_new_tokens=n
    )


def engine_of(lm: LM, pool_tokens: int | None = None, **more: Any) -> Engine:
    settings = MemorySettings(page_size=PAGE, pool_tokens=pool_tokens)
    return tiny_engine(lm, **{"reuse": {"prefix"}, "memory": settings} | more)


def watched(loop: Loop) -> Iterator[Served]:
    """Run to the end; after every iteration the books balance and count what is in flight."""
    pool = loop.engine.memory.pool
    while loop.n_left:
        yield from loop.step()
        pool.check()
        held = {p for f in loop.running if f.done for p in f.done.kv.pages}
        assert pool.n_active == len(held)
    assert pool.n_active == 0


def alone(plain: Any, engine: Engine, request: Request) -> list[int]:
    """What plain transformers answers, up to and with an end token."""
    tokens = plain_generate(plain, engine.render(request).ids, request.max_new_tokens)
    stop = engine.lm.stop_tokens
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize(("pool_tokens", "batch"), [(None, 1), (600, 10_000), (160, 200)])
def test_answers_are_those_of_one_at_a_time(
    lm: LM, plain: Any, pool_tokens: int | None, batch: int
) -> None:
    """Shared prefixes, lengths that differ, a pool for all, for some and hardly for one."""
    engine = engine_of(lm, pool_tokens)
    requests = [ask(i, i % 4, n=1 + i % 9, words=8 + 3 * (i % 4)) for i in range(16)]
    loop = Loop(engine, max_batch_tokens=batch)
    for request in requests:
        loop.submit(request)
    served = {s.request.id: s for s in watched(loop)}
    assert len(served) == len(requests)
    for request in requests:
        got = served[request.id]
        assert not got.error
        assert list(got.tokens) == alone(plain, engine, request)
        assert got.latency_ms >= got.ttft_ms > 0
    again = engine.generate(ask(99, 3))
    assert again.counts()["prefix"] > 0


def test_several_are_in_flight_at_once(llama: LM) -> None:
    loop = Loop(engine_of(llama))
    for i in range(5):
        loop.submit(ask(i, i))
    most = 0
    while loop.n_left:
        loop.step()
        most = max(most, len(loop.running))
    assert most == 5


def sizes_of_batches(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Filled as ``loop`` runs: rows of each request of each forward."""
    found: list[list[int]] = []
    compute = loop.engine.compute

    def noted(loaded: Sequence[Loaded]) -> list[Prefilled]:
        found.append([one.n_rows for one in loaded])
        return compute(loaded)

    monkeypatch.setattr(loop.engine, "compute", noted)
    return found


def test_what_fits_is_prefilled_together(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of the queue as compute no more than the limit, in order; one above it alone."""
    engine = engine_of(llama, admit="none")
    words = [12, 12, 12, 120, 12, 12]
    requests = [ask(i, i, n=1, words=w) for i, w in enumerate(words)]
    rows = [len(engine.render(request).ids) for request in requests]
    limit = sum(rows[:2]) + rows[2] // 2
    assert rows[3] > limit > rows[4] + rows[5]
    loop = Loop(engine, max_batch_tokens=limit)
    batches = sizes_of_batches(loop, monkeypatch)
    for request in requests:
        loop.submit(request)
    served = list(watched(loop))
    assert batches == [rows[:2], rows[2:3], rows[3:4], rows[4:]]
    assert [s.request.id for s in served] == [r.id for r in requests]


def test_what_is_cached_does_not_count(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(llama)
    engine.generate(ask(0, 0, words=40))
    loop = Loop(engine, max_batch_tokens=60)
    batches = sizes_of_batches(loop, monkeypatch)
    requests = [ask(i, 0, words=40) for i in (1, 2, 3)]
    assert len(engine.render(requests[0]).ids) > 60
    for request in requests:
        loop.submit(request)
    list(watched(loop))
    assert list(map(len, batches)) == [3]


def test_one_at_a_time_stays_available(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(llama)
    loop = Loop(engine, max_batch_tokens=1)
    batches = sizes_of_batches(loop, monkeypatch)
    for i in range(4):
        loop.submit(ask(i, i))
    loop.step()
    assert len(loop.running) == 1
    list(watched(loop))
    assert list(map(len, batches)) == [1, 1, 1, 1]


def test_one_that_fails_in_a_batch_fails_alone(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(llama)
    loop = Loop(engine)
    compute = engine.compute

    def picky(loaded: Sequence[Loaded]) -> list[Prefilled]:
        if any(one.request.id == "r1" for one in loaded):
            for one in loaded:
                engine.drop(one)
            raise KvsemError("r1 is refused")
        return compute(loaded)

    monkeypatch.setattr(engine, "compute", picky)
    for i in range(5):
        loop.submit(ask(i, i))
    served = {s.request.id: s for s in watched(loop)}
    assert [i for i, s in served.items() if s.error] == ["r1"]
    assert len(served) == 5


def test_loading_that_breaks_gives_everything_back(
    llama: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(llama)
    loop = Loop(engine)
    for i in range(3):
        loop.submit(ask(i, i))
    load = engine.load

    def broken(request: Request, room: int | None = None) -> Loaded:
        if request.id == "r2":
            raise RuntimeError("out of memory")
        return load(request, room)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "load", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            loop.step()
    assert engine.memory.pool.n_active == 0
    assert {s.request.id for s in watched(loop)} == {"r0", "r1", "r2"}


def test_a_pool_that_runs_out_sends_the_last_back(llama: LM) -> None:
    """Preempted requests start anew, answer alike, and their second run is nobody's hit."""
    plain_engine = engine_of(llama, admit="none")
    requests = [ask(i, 10 + i, n=40, words=10) for i in range(4)]
    n = max(len(plain_engine.render(r).ids) for r in requests)
    engine = engine_of(llama, pool_tokens=2 * n + 40, admit="none")
    loop = Loop(engine)
    for request in requests:
        loop.submit(request)
    served = {s.request.id: s for s in watched(loop)}
    assert sum(s.n_preempted for s in served.values()) > 0
    for request in requests:
        got = served[request.id]
        assert got.tokens == plain_engine.generate(request).tokens
        assert got.prefilled is not None
        assert got.prefilled.plan.n_paged == 0


def test_reservation_holds_fewer_at_once(llama: LM) -> None:
    most = {}
    for reserve in (None, 200):
        loop = Loop(engine_of(llama, pool_tokens=400, admit="none"), reserve=reserve)
        for i in range(8):
            loop.submit(ask(i, i))
        most[reserve] = 0
        while loop.n_left:
            loop.step()
            most[reserve] = max(most[reserve], len(loop.running))
    assert most[200] == 2
    assert most[None] > 2


def test_cancelling_releases_exactly_its_references(llama: LM) -> None:
    engine = engine_of(llama)
    engine.generate(ask(0, 0))
    loop = Loop(engine, max_batch_tokens=1)
    for i in (1, 2, 3):
        loop.submit(ask(i, 0))
    loop.step()
    loop.step()
    first, second = loop.running
    assert first.done
    assert second.done
    before = {page: engine.memory.pool.references(page) for page in first.done.kv.pages}
    gone = list(second.done.kv.pages)
    assert loop.cancel("r2")
    assert not loop.cancel("r2")
    assert not loop.cancel("nobody")
    for page, references in before.items():
        assert engine.memory.pool.references(page) == references - (page in gone)
    assert loop.cancel("r3")  # it was waiting and held nothing
    served = {s.request.id: s for s in watched(loop)}
    assert served["r2"].cancelled
    assert served["r3"].cancelled
    assert not served["r1"].cancelled


def test_one_that_fails_is_over_and_the_others_go_on(llama: LM) -> None:
    engine = engine_of(llama, pool_tokens=300)
    loop = Loop(engine)
    loop.submit(ask(0, 0))
    loop.submit(Request("empty", text=" "))
    loop.submit(ask(1, 1, words=400))  # longer than the context
    loop.submit(ask(2, 2, n=300))  # fits the context, never the pool
    loop.submit(ask(3, 3))
    served = {s.request.id: s for s in watched(loop)}
    assert "prompt is empty" in served["empty"].error
    assert "context of 512" in served["r1"].error
    assert "memory.pool_tokens is 300" in served["r2"].error
    assert all("\n" not in s.error for s in served.values())
    assert not served["r0"].error
    assert not served["r3"].error


def test_an_iteration_that_breaks_gives_everything_back(
    llama: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(llama)
    loop = Loop(engine)
    for i in range(3):
        loop.submit(ask(i, i))
    loop.step()
    loop.step()
    assert engine.memory.pool.n_active > 0

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(llama), "step", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            loop.step()
    engine.memory.pool.check()
    assert engine.memory.pool.n_active == 0
    assert engine.memory.pool.n_cached == 0  # nothing was published


def test_bad_settings_and_ids_are_refused(llama: LM) -> None:
    with pytest.raises(SettingError, match="reserve=0"):
        Loop(engine_of(llama), reserve=0)
    with pytest.raises(SettingError, match="max_batch_tokens=0"):
        Loop(engine_of(llama), max_batch_tokens=0)
    loop = Loop(engine_of(llama))
    loop.submit(ask(0, 0))
    with pytest.raises(KvsemError, match="in flight already"):
        loop.submit(ask(0, 1))
    small = Loop(engine_of(llama), reserve=20)
    small.submit(ask(0, 0))
    assert "reserve=20" in next(small.run()).error


def test_a_refusal_is_an_error_of_ours() -> None:
    assert issubclass(PoolFullError, KvsemError)


def test_a_model_without_hooks_is_refused() -> None:
    lm = tiny_lm("llama")
    lm.switch_off("for the test")
    with pytest.raises(KvsemError, match="for the test"):
        Loop(engine_of(lm))
