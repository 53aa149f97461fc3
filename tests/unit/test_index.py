"""FlatIndex against a dictionary and numpy; what FAISS does wrong stays inside."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvsem.embedders.hashing import HashingEmbedder
from kvsem.errors import KvsemError, SettingError
from kvsem.index.flat import FlatIndex

DIM = 4
ROOT = Path(__file__).parents[2]
BIG = 2**63 - 1
IDS = st.sampled_from([0, 1, 2, 3, 7, 2**40, BIG])
VECTORS = st.lists(st.integers(-3, 3), min_size=DIM, max_size=DIM).filter(any)
VALUES = VECTORS.map(lambda v: np.array(v, np.float32))


def unit(vector: np.ndarray) -> np.ndarray:
    wide = vector.astype(np.float64)
    return np.asarray(wide / np.linalg.norm(wide))


def filled(n: int = 20, dim: int = DIM) -> FlatIndex:
    index = FlatIndex(dim, "e")
    index.add(range(n), np.random.default_rng(0).normal(size=(n, dim)))
    return index


class AgainstDictionary(RuleBasedStateMachine):
    """Any order of add, replace and remove gives the cosines of the vectors that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.index = FlatIndex(DIM, "e")
        self.oracle: dict[int, np.ndarray] = {}

    @rule(entries=st.lists(st.tuples(IDS, VALUES), max_size=4), scale=st.sampled_from([1, 100]))
    def add(self, entries: list[tuple[int, np.ndarray]], scale: int) -> None:
        vectors = np.array([v * scale for _, v in entries], np.float32).reshape(-1, DIM)
        self.index.add([i for i, _ in entries], vectors)
        self.oracle |= dict(entries)

    @rule(ids=st.lists(IDS, max_size=4))
    def remove(self, ids: list[int]) -> None:
        assert self.index.remove(ids) == len(self.oracle.keys() & set(ids))
        self.oracle = {i: v for i, v in self.oracle.items() if i not in ids}

    @rule(query=VALUES, k=st.integers(1, 9))
    def search(self, query: np.ndarray, k: int) -> None:
        cosines = {i: float(unit(v) @ unit(query)) for i, v in self.oracle.items()}
        hits = self.index.search(query, k)
        scores = [score for _, score in hits]
        assert len({i for i, _ in hits}) == len(hits)
        assert scores == pytest.approx(sorted(cosines.values(), reverse=True)[:k], abs=1e-6)
        assert scores == pytest.approx([cosines[i] for i, _ in hits], abs=1e-6)
        assert scores == sorted(scores, reverse=True)
        assert all(-1 <= score <= 1 for score in scores)

    @invariant()
    def as_many(self) -> None:
        assert len(self.index) == len(self.oracle)


AgainstDictionary.TestCase.settings = settings(max_examples=60, deadline=None)
test_against_dictionary = AgainstDictionary.TestCase


@pytest.mark.parametrize("n_queries", [1, 19, 20, 64])
def test_an_empty_index_has_no_candidates(n_queries: int) -> None:
    index = FlatIndex(DIM, "e")
    assert all(index.search(np.ones(DIM), 5) == [] for _ in range(n_queries))
    index.add([3], np.ones((1, DIM)))
    index.remove([3])
    assert index.search(np.ones(DIM), 5) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0])
def test_what_cannot_be_compared_finds_nothing_and_is_not_stored(bad: float) -> None:
    index = filled()
    assert index.search(np.array([bad, 0, 0, 0]), 3) == []
    assert index.search(np.full(DIM, bad), 3) == []
    with pytest.raises(KvsemError, match="zero or not finite"):
        index.add([100, 101], np.array([[1, 0, 0, 0], [bad, 0, 0, 0]]))
    assert len(index) == 20


def test_more_neighbours_than_vectors() -> None:
    hits = filled(3).search(np.ones(DIM), 50)
    assert sorted(i for i, _ in hits) == [0, 1, 2]


@pytest.mark.parametrize("scale", [100.0, 1e-30, 1e30])
def test_scale_does_not_matter(scale: float) -> None:
    vectors = np.random.default_rng(1).normal(size=(30, DIM)).astype(np.float32)
    plain, scaled = FlatIndex(DIM, "e"), FlatIndex(DIM, "e")
    plain.add(range(30), vectors)
    scaled.add(range(30), vectors * np.float32(scale))
    for query in vectors[:5]:
        hits = plain.search(query, 5)
        for other in (scaled.search(query, 5), plain.search(query * np.float32(scale), 5)):
            assert [i for i, _ in other] == [i for i, _ in hits]
            assert [s for _, s in other] == pytest.approx([s for _, s in hits], abs=1e-6)
        assert hits[0][1] == pytest.approx(1, abs=1e-6)


def test_inserting_again_keeps_one_and_near_duplicates_stay_two() -> None:
    index = FlatIndex(DIM, "e")
    for _ in range(100):
        index.add([7], np.array([[1, 0, 0, 0]]))
    index.add([8], np.array([[0.97, 0.2431, 0, 0]]))
    assert [i for i, _ in index.search(np.array([1, 0, 0, 0]), 9)] == [7, 8]


def test_unrelated_vectors_never_change_an_exact_match() -> None:
    index = FlatIndex(64, "e")
    rng = np.random.default_rng(2)
    mine = rng.normal(size=64)
    index.add([5], mine[None])
    before = index.search(mine, 1)
    for start in range(100, 1100, 100):
        index.add(range(start, start + 100), rng.normal(size=(100, 64)))
        assert index.search(mine, 1) == before


def test_no_cosine_is_above_1() -> None:
    """Unclipped, rounding makes some vectors 1.0000001 similar to themselves."""
    vectors = np.random.default_rng(4).normal(size=(300, 384))
    index = FlatIndex(384, "e")
    index.add(range(300), vectors)
    hits = [index.search(vector, 1)[0] for vector in vectors]
    assert [i for i, _ in hits] == list(range(300))
    assert 1 - 1e-6 < min(s for _, s in hits) <= max(s for _, s in hits) <= 1


def test_stored_vectors_are_copies() -> None:
    vectors = np.eye(DIM, dtype=np.float32)
    index = FlatIndex(DIM, "e")
    index.add(range(DIM), vectors)
    vectors[:] = 9
    assert index.search(np.array([1, 0, 0, 0]), 1) == [(0, 1.0)]


@pytest.mark.parametrize("wrong", [np.ones((1, 5)), np.ones(DIM), np.ones((1, 0))])
def test_a_wrong_dimension_names_both(wrong: np.ndarray) -> None:
    with pytest.raises(KvsemError, match=rf"{wrong.shape[-1]}.*dimension {DIM}"):
        filled().add([50], wrong)


def test_a_wrong_query_names_both() -> None:
    with pytest.raises(KvsemError, match=r"5.*dimension 4"):
        filled().search(np.ones(5), 1)


def test_calls_are_checked() -> None:
    index = filled()
    with pytest.raises(KvsemError, match="2 ids for 1 vectors"):
        index.add([1, 2], np.ones((1, DIM)))
    for bad in (-1, 2**63):
        with pytest.raises(SettingError, match="ids"):
            index.add([bad], np.ones((1, DIM)))
    with pytest.raises(SettingError, match="k=0"):
        index.search(np.ones(DIM), 0)
    with pytest.raises(SettingError, match="dim"):
        FlatIndex(0, "e")


def test_another_embedder_is_refused_with_both_values() -> None:
    one, narrow, other = HashingEmbedder(64), HashingEmbedder(32), HashingEmbedder(64, ngram=4)
    index = FlatIndex(one.dim, one.identity)
    index.check(one)
    with pytest.raises(KvsemError, match=r"64.*32"):
        index.check(narrow)
    with pytest.raises(KvsemError, match=r"ngram=3.*ngram=4"):
        index.check(other)
    with pytest.raises(KvsemError, match="revision 2"):
        FlatIndex(DIM, "m revision 1").check(SimpleNamespace(dim=DIM, identity="m revision 2"))


def test_without_faiss_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(KvsemError, match=r"pip install 'kvsem\[cpu\]' or 'kvsem\[gpu\]'"):
        FlatIndex(DIM, "e")


def test_readers_beside_writers() -> None:
    index, failures, rng = filled(200), [], np.random.default_rng(3)
    queries, fresh = rng.normal(size=(2, 300, DIM))

    def guarded(work: object, rows: np.ndarray) -> None:
        try:
            for n, row in enumerate(rows):
                work(n, row)  # type: ignore[operator]
        except Exception as error:
            failures.append(error)

    def read(_: int, row: np.ndarray) -> None:
        hits = index.search(row, 10)
        assert len(hits) == 10
        assert all(0 <= i < 500 and -1 <= s <= 1 for i, s in hits)

    def write(n: int, row: np.ndarray) -> None:
        index.add([200 + n], row[None])
        index.remove([200 + n - 5])

    work = [(read, queries)] * 4 + [(write, fresh)] * 2
    threads = [threading.Thread(target=guarded, args=args) for args in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(index.search(np.ones(DIM), 1000)) == len(index)


@pytest.mark.parametrize("order", ["torch, faiss", "faiss, torch"])
def test_torch_and_faiss_live_in_one_process(order: str) -> None:
    code = f"""
import {order}
import numpy as np
from kvsem.index.flat import FlatIndex
index = FlatIndex(8, "e")
index.add(range(64), torch.randn(64, 8).matmul(torch.randn(8, 8)).numpy())
print(len(index.search(np.ones(8), 5)))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, "5")
