"""Aligners: the true longest common subsequence, in order, in few runs, and fast."""

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsem.aligners.edit import EditAligner
from kvsem.aligners.identical import IdenticalAligner

FEW = st.lists(st.integers(0, 3), max_size=14)
SOME = st.lists(st.integers(0, 12), max_size=40)


def align(target: list[int], donor: list[int]) -> list[int]:
    source: list[int] = EditAligner().align(np.array(target, int), np.array(donor, int)).tolist()
    return source


def lcs_length(a: list[int], b: list[int]) -> int:
    """The textbook table."""
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            longer = max(table[i, j + 1], table[i + 1, j])
            table[i + 1, j + 1] = table[i, j] + 1 if x == y else longer
    return int(table[-1, -1])


@given(st.one_of(st.tuples(FEW, FEW), st.tuples(SOME, SOME)))
def test_longest_common_subsequence(pair: tuple[list[int], list[int]]) -> None:
    target, donor = pair
    source = align(target, donor)
    used = [j for j in source if j >= 0]
    assert len(source) == len(target)
    assert all(a < b for a, b in pairwise(used))
    assert all(target[i] == donor[j] for i, j in enumerate(source) if j >= 0)
    assert len(used) == lcs_length(target, donor)


@pytest.mark.parametrize(
    ("target", "donor", "source"),
    [
        ([], [1], []),
        ([1, 2], [], [-1, -1]),
        ([1, 2, 3], [1, 2, 3], [0, 1, 2]),
        ([1, 9, 3], [1, 2, 3], [0, -1, 2]),
        ([1, 2, 9, 9, 3], [1, 2, 3], [0, 1, -1, -1, 2]),
        ([1, 3], [1, 2, 3], [0, 2]),
        ([4, 5, 6], [1, 2, 3], [-1, -1, -1]),
    ],
)
def test_edits(target: list[int], donor: list[int], source: list[int]) -> None:
    assert align(target, donor) == source


def test_long_runs_are_preferred() -> None:
    assert align([1, 2, 3], [1, 9, 1, 2, 3]) == [2, 3, 4]
    assert align([1, 2, 3], [1, 2, 3, 9, 3]) == [0, 1, 2]
    assert align([1, 9, 1, 2, 3], [1, 2, 3]) == [-1, -1, 0, 1, 2]
    assert align([1, 2, 3, 9, 3], [1, 2, 3]) == [0, 1, 2, -1, -1]
    assert align([7, 1, 2, 3, 9, 3], [8, 1, 2, 3]) == [-1, 1, 2, 3, -1, -1]


def fastest(work: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return min(once() for _ in range(5))


@pytest.mark.parametrize("edits", [0.1, 1.0])
def test_fast_enough_for_a_plan(edits: float) -> None:
    """Under a tenth of the textbook table's time, of which 150 of 1,500 rows are run."""
    rng = np.random.default_rng(0)
    donor = rng.integers(0, 40_000, 1500)
    target = np.where(rng.random(1500) < edits, rng.integers(0, 40_000, 1500), donor)
    row = donor.tolist()
    tenth = fastest(lambda: [max(a, b) if a != b else a + 1 for b in row[:150] for a in row])
    assert fastest(lambda: EditAligner().align(target, donor)) < tenth


@given(FEW, FEW)
def test_identical_is_all_or_nothing(target: list[int], donor: list[int]) -> None:
    source = IdenticalAligner().align(np.array(target, int), np.array(donor, int)).tolist()
    assert source == (list(range(len(target))) if target == donor else [-1] * len(target))


def test_no_broadcast_of_lengths() -> None:
    source = IdenticalAligner().align(np.array([1, 1, 1]), np.array([1]))
    assert source.tolist() == [-1, -1, -1]
