"""The store against a dictionary (DESIGN rule 8 and 9); its KV lies in pages of a pool."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsem.errors import KvsemError
from kvsem.types import ChunkKV
from tests.tiny import tiny_store


def entry(key: str, n: int = 3, fill: float = 1.0) -> ChunkKV:
    keys = tuple(torch.full((2, n, 4), fill) for _ in range(2))
    values = tuple(torch.full((2, n, 4), -fill) for _ in range(2))
    ids = np.arange(n)
    return ChunkKV(key, "ns", "text", ids, (0, n), 0, "alone", "", 0, keys, values)


def assert_same(stored: ChunkKV | None, given: ChunkKV) -> None:
    """All but where the KV lies."""
    assert stored is not None
    for name in ("key", "namespace", "text", "inner", "position", "context", "depth", "nbytes"):
        assert getattr(stored, name) == getattr(given, name)
    assert (stored.ids == given.ids).all()
    for mine, theirs in ((stored.keys, given.keys), (stored.values, given.values)):
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_nbytes_of_an_entry() -> None:
    assert entry("a", n=3).nbytes == 2 * 2 * (2 * 3 * 4) * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("slot", ["keys", "values"])
@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_not_finite_is_a_miss(bad: float, slot: str, layer: int) -> None:
    store = tiny_store()
    poisoned = entry("a")
    getattr(poisoned, slot)[layer][1, 2, 3] = bad
    assert not store.put(poisoned)
    assert store.get("a") is None
    assert (len(store), store.nbytes, store.n_not_finite) == (0, 0, 1)
    assert store.pool.n_active == store.pool.n_cached == 0
    assert store.put(entry("a"))  # a later, whole one is welcome


def test_the_first_entry_of_a_key_stays() -> None:
    store = tiny_store()
    first, second = entry("a", fill=1.0), entry("a", fill=2.0, n=9)
    assert store.put(first)
    stored = store.get("a")
    assert not store.put(second)
    assert store.get("a") is stored
    assert_same(stored, first)
    assert store.nbytes == first.nbytes


def test_an_entry_is_a_copy() -> None:
    """What the caller does to its tensors afterwards, or another entry, changes nothing."""
    store, given = tiny_store(), entry("a", n=6)
    store.put(given)
    for tensor in (*given.keys, *given.values):
        tensor.zero_()
    store.put(entry("b", n=7, fill=5.0))
    assert_same(store.get("a"), entry("a", n=6))


def test_an_entry_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        entry("a").depth = 1  # type: ignore[misc]


def test_an_entry_that_is_gone_cannot_be_read() -> None:
    """Its pages are free; bytes that are still there are nobody's (vllm PR 4761)."""
    told: list[str] = []
    store = tiny_store(forgotten=told.append)
    store.put(entry("a", n=5))
    stored = store.get("a")
    assert stored is not None
    assert store.pool.n_cached == 2
    assert store.forget("a")
    assert told == ["a"]
    assert store.get("a") is None
    assert not store.was_evicted("a")  # forgotten on purpose is not evicted
    assert store.pool.n_cached == 0
    with pytest.raises(KvsemError, match="given back"):
        _ = stored.keys[0]
    with pytest.raises(KvsemError, match="given back"):
        _ = stored.values[1]


def test_a_full_pool_evicts_the_oldest_and_refuses_what_never_fits() -> None:
    told: list[str] = []
    store = tiny_store(page_size=4, n_pages=3, forgotten=told.append)
    assert all(store.put(entry(key, n=4, fill=float(i))) for i, key in enumerate("abc"))
    store.use(["a"])
    assert store.put(entry("d", n=5, fill=9.0))  # two pages: b and c go, not a
    assert (told, store.pool.evictions["capacity"]) == (["b", "c"], 2)
    assert [store.was_evicted(key) for key in "abcd"] == [False, True, True, False]
    assert_same(store.get("a"), entry("a", n=4, fill=0.0))
    assert_same(store.get("d"), entry("d", n=5, fill=9.0))
    assert not store.put(entry("e", n=13))
    assert store.n_refused == 1
    assert {e.key for e in store} == {"a", "d"}
    assert store.put(entry("b", n=1))
    assert not store.was_evicted("b")
    store.pool.check()


def test_an_entry_that_is_held_stays() -> None:
    """Readers hold its pages: eviction takes others or refuses (LMCache PR 3130)."""
    store = tiny_store(page_size=4, n_pages=2)
    store.put(entry("a", n=6, fill=3.0))
    held = store.pages_of(["a"])
    store.pool.touch(held)
    assert not store.put(entry("b", n=4))
    assert_same(store.get("a"), entry("a", n=6, fill=3.0))
    store.pool.release(held)
    assert store.put(entry("b", n=4))
    assert store.get("a") is None
    store.pool.check()


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "bad", "forget", "get"]), st.sampled_from("abcd")),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_as_a_dictionary(steps: list[tuple[str, str]]) -> None:
    store, oracle, n_bad = tiny_store(page_size=2), dict[str, ChunkKV](), 0
    for i, (verb, key) in enumerate(steps):
        if verb == "put":
            new = entry(key, n=1 + len(oracle), fill=float(i))
            assert store.put(new) == (key not in oracle)
            oracle.setdefault(key, new)
        elif verb == "bad":
            assert not store.put(entry(key, fill=math.nan))
            n_bad += key not in oracle
        elif verb == "forget":
            assert store.forget(key) == (oracle.pop(key, None) is not None)
        assert [e.key for e in store] == list(oracle)
        for known in "abcd":
            if known in oracle:
                assert_same(store.get(known), oracle[known])
            else:
                assert store.get(known) is None
        assert len(store) == len(oracle)
        assert store.nbytes == sum(e.nbytes for e in oracle.values())
        assert store.n_not_finite == n_bad
        assert store.pool.n_cached == sum(-(-len(e.ids) // 2) for e in oracle.values())
        assert store.pool.n_active == 0
        store.pool.check()
