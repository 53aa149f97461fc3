"""Every index, step by step, against a dictionary and numpy."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvsem.errors import KvsemError
from kvsem.index.base import ChunkIndex
from kvsem.index.flat import FlatIndex
from kvsem.index.hnsw import HnswIndex

DIM = 4
BIG = 2**63 - 1
IDS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 2**40, BIG])
GRID = st.lists(st.integers(-2, 2), min_size=DIM, max_size=DIM)  # many of the same direction
VALUES = GRID.filter(any).map(lambda v: np.array(v, np.float32))
BAD = st.sampled_from([0.0, np.nan, np.inf, -np.inf]).map(lambda x: np.full(DIM, x, np.float32))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


class AgainstDictionary(RuleBasedStateMachine):
    """Any order of add, replace and remove; whoever is found is there, with its own cosine."""

    approximate = False
    recalled: ClassVar[list[bool]] = []  # of every search: has the first hit the best cosine?

    def __init__(self) -> None:
        super().__init__()
        self.index = self.made()
        self.oracle: dict[int, np.ndarray] = {}
        self.rng = np.random.default_rng(0)

    def made(self) -> ChunkIndex:
        return FlatIndex(DIM, "e")

    @rule(entries=st.lists(st.tuples(IDS, VALUES), max_size=6), scale=st.sampled_from([1, 1e20]))
    def add(self, entries: list[tuple[int, np.ndarray]], scale: float) -> None:
        vectors = np.array([v * scale for _, v in entries], np.float32).reshape(-1, DIM)
        self.index.add([i for i, _ in entries], vectors)
        self.oracle |= dict(entries)

    @rule(start=st.integers(100, 300), n=st.integers(1, 60), seed=st.integers(0, 9))
    def add_many(self, start: int, n: int, seed: int) -> None:
        vectors = np.random.default_rng(seed).normal(size=(n, DIM)).astype(np.float32)
        vectors[n // 2 :] = vectors[0]  # half of them the same
        self.index.add(range(start, start + n), vectors)
        self.oracle |= dict(zip(range(start, start + n), vectors, strict=True))

    @rule(id=IDS, good=VALUES, bad=BAD)
    def add_what_has_no_direction(self, id: int, good: np.ndarray, bad: np.ndarray) -> None:
        with pytest.raises(KvsemError, match="zero or not finite"):
            self.index.add([id, 99], np.array([good, bad]))

    @rule(ids=st.lists(IDS, max_size=4))
    def remove(self, ids: list[int]) -> None:
        assert self.index.remove(ids) == len(self.oracle.keys() & set(ids))
        self.oracle = {i: v for i, v in self.oracle.items() if i not in ids}

    @rule(start=st.integers(100, 300), n=st.integers(1, 60))
    def remove_many(self, start: int, n: int) -> None:
        self.remove(list(range(start, start + n)))

    @rule(query=VALUES, k=st.sampled_from([1, 2, 5, 50, 1000]))
    def search_for(self, query: np.ndarray, k: int) -> None:
        self.search(query, k)

    def search(self, query: np.ndarray, k: int) -> None:
        cosines = {i: cosine(v, query) for i, v in self.oracle.items()}
        best = sorted(cosines.values(), reverse=True)[:k]
        hits = self.index.search(query, k)
        scores = [score for _, score in hits]
        assert len({i for i, _ in hits}) == len(hits) == len(best)
        assert {i for i, _ in hits} <= self.oracle.keys()
        assert scores == pytest.approx([cosines[i] for i, _ in hits], abs=1e-6)
        assert hits == sorted(hits, key=lambda hit: (-hit[1], hit[0]))
        assert all(-1 <= score <= 1 for score in scores)
        if not self.approximate:
            assert scores == pytest.approx(best, abs=1e-6)
        elif best:
            self.recalled.append(scores[0] >= best[0] - 1e-6)

    @rule(query=BAD)
    def search_for_what_has_no_direction(self, query: np.ndarray) -> None:
        assert self.index.search(query, 3) == []

    @invariant()
    def as_many(self) -> None:
        assert len(self.index) == len(self.oracle)
        assert set(self.index.ids()) == self.oracle.keys()

    @invariant()
    def finds(self) -> None:
        self.search(self.rng.normal(size=DIM), 3)


class HnswAgainstDictionary(AgainstDictionary):
    """So narrow a graph that it is one: with the default, these few vectors are all compared."""

    approximate = True

    def made(self) -> ChunkIndex:
        return HnswIndex(DIM, "e", m=6, ef_construction=32, ef_search=32, rebuild_share=0.3)


STEPS = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_flat_against_dictionary() -> None:
    run_state_machine_as_test(AgainstDictionary, settings=STEPS)


def test_hnsw_against_dictionary() -> None:
    recalled: list[bool] = []
    HnswAgainstDictionary.recalled = recalled
    run_state_machine_as_test(HnswAgainstDictionary, settings=STEPS)
    assert len(recalled) > 100
    assert np.mean(recalled) >= 0.95
