"""The store against a dictionary (DESIGN rule 8 and 9)."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsem.memory.store import ChunkStore
from kvsem.types import ChunkKV


def entry(key: str, n: int = 3, fill: float = 1.0) -> ChunkKV:
    keys = tuple(torch.full((2, n, 4), fill) for _ in range(2))
    values = tuple(torch.full((2, n, 4), fill) for _ in range(2))
    ids = np.arange(n)
    return ChunkKV(key, "ns", "text", ids, (0, n), 0, "alone", "", 0, keys, values)


def test_nbytes_of_an_entry() -> None:
    assert entry("a", n=3).nbytes == 2 * 2 * (2 * 3 * 4) * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("slot", ["keys", "values"])
@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_not_finite_is_a_miss(bad: float, slot: str, layer: int) -> None:
    store = ChunkStore()
    poisoned = entry("a")
    getattr(poisoned, slot)[layer][1, 2, 3] = bad
    assert not store.put(poisoned)
    assert store.get("a") is None
    assert (len(store), store.nbytes, store.n_not_finite) == (0, 0, 1)
    assert store.put(entry("a"))  # a later, whole one is welcome


def test_the_first_entry_of_a_key_stays() -> None:
    store = ChunkStore()
    first, second = entry("a", fill=1.0), entry("a", fill=2.0, n=9)
    assert store.put(first)
    assert not store.put(second)
    assert store.get("a") is first
    assert store.nbytes == first.nbytes


def test_an_entry_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        entry("a").depth = 1  # type: ignore[misc]


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "bad", "forget", "get"]), st.sampled_from("abcd")),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_as_a_dictionary(steps: list[tuple[str, str]]) -> None:
    store, oracle, n_bad = ChunkStore(), dict[str, ChunkKV](), 0
    for verb, key in steps:
        if verb == "put":
            new = entry(key, n=1 + len(oracle))
            assert store.put(new) == (key not in oracle)
            oracle.setdefault(key, new)
        elif verb == "bad":
            assert not store.put(entry(key, fill=math.nan))
            n_bad += key not in oracle
        elif verb == "forget":
            assert store.forget(key) == (oracle.pop(key, None) is not None)
        assert store.get(key) is oracle.get(key)
        assert [e.key for e in store] == list(oracle)
        assert len(store) == len(oracle)
        assert store.nbytes == sum(e.nbytes for e in oracle.values())
        assert store.n_not_finite == n_bad
