"""Every index alike; what FAISS does wrong stays inside."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest

from kvsem.embedders.hashing import HashingEmbedder
from kvsem.errors import KvsemError, SettingError
from kvsem.index.base import ChunkIndex
from kvsem.index.flat import FlatIndex
from kvsem.index.hnsw import HnswIndex

DIM = 4
ROOT = Path(__file__).parents[2]

Make = Callable[..., ChunkIndex]


@pytest.fixture(params=[FlatIndex, HnswIndex])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def filled(make: Make, n: int = 20, dim: int = DIM) -> ChunkIndex:
    index = make(dim, "e")
    index.add(range(n), np.random.default_rng(0).normal(size=(n, dim)))
    return index


@pytest.mark.parametrize("n_queries", [1, 19, 20, 64])
def test_an_empty_index_has_no_candidates(make: Make, n_queries: int) -> None:
    index = make(DIM, "e")
    assert all(index.search(np.ones(DIM), 5) == [] for _ in range(n_queries))
    index.add([3], np.ones((1, DIM)))
    index.remove([3])
    assert index.search(np.ones(DIM), 5) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0])
def test_what_cannot_be_compared_finds_nothing_and_is_not_stored(make: Make, bad: float) -> None:
    index = filled(make)
    assert index.search(np.array([bad, 0, 0, 0]), 3) == []
    assert index.search(np.full(DIM, bad), 3) == []
    with pytest.raises(KvsemError, match="zero or not finite"):
        index.add([100, 101], np.array([[1, 0, 0, 0], [bad, 0, 0, 0]]))
    assert len(index) == 20


def test_more_neighbours_than_vectors(make: Make) -> None:
    hits = filled(make, 3).search(np.ones(DIM), 50)
    assert sorted(i for i, _ in hits) == [0, 1, 2]


@pytest.mark.parametrize("scale", [100.0, 1e-30, 1e30])
def test_scale_does_not_matter(make: Make, scale: float) -> None:
    vectors = np.random.default_rng(1).normal(size=(30, DIM)).astype(np.float32)
    plain, scaled = make(DIM, "e"), make(DIM, "e")
    plain.add(range(30), vectors)
    scaled.add(range(30), vectors * np.float32(scale))
    for query in vectors[:5]:
        hits = plain.search(query, 5)
        for other in (scaled.search(query, 5), plain.search(query * np.float32(scale), 5)):
            assert [i for i, _ in other] == [i for i, _ in hits]
            assert [s for _, s in other] == pytest.approx([s for _, s in hits], abs=1e-6)
        assert hits[0][1] == pytest.approx(1, abs=1e-6)


def test_inserting_again_keeps_one_and_near_duplicates_stay_two(make: Make) -> None:
    index = make(DIM, "e")
    for _ in range(100):
        index.add([7], np.array([[1, 0, 0, 0]]))
    index.add([8], np.array([[0.97, 0.2431, 0, 0]]))
    assert [i for i, _ in index.search(np.array([1, 0, 0, 0]), 9)] == [7, 8]


def test_unrelated_vectors_never_change_an_exact_match(make: Make) -> None:
    index = make(64, "e")
    rng = np.random.default_rng(2)
    mine = rng.normal(size=64)
    index.add([5], mine[None])
    before = index.search(mine, 1)
    for start in range(100, 1100, 100):
        index.add(range(start, start + 100), rng.normal(size=(100, 64)))
        assert index.search(mine, 1) == before


def test_no_cosine_is_above_1(make: Make) -> None:
    """Unclipped, rounding makes some vectors 1.0000001 similar to themselves."""
    vectors = np.random.default_rng(4).normal(size=(300, 384))
    index = make(384, "e")
    index.add(range(300), vectors)
    hits = [index.search(vector, 1)[0] for vector in vectors]
    assert [i for i, _ in hits] == list(range(300))
    assert 1 - 1e-6 < min(s for _, s in hits) <= max(s for _, s in hits) <= 1


def test_stored_vectors_are_copies(make: Make) -> None:
    vectors = np.eye(DIM, dtype=np.float32)
    index = make(DIM, "e")
    index.add(range(DIM), vectors)
    vectors[:] = 9
    assert index.search(np.array([1, 0, 0, 0]), 1) == [(0, 1.0)]


@pytest.mark.parametrize("wrong", [np.ones((1, 5)), np.ones(DIM), np.ones((1, 0))])
def test_a_wrong_dimension_names_both(make: Make, wrong: np.ndarray) -> None:
    with pytest.raises(KvsemError, match=rf"{wrong.shape[-1]}.*dimension {DIM}"):
        filled(make).add([50], wrong)


def test_a_wrong_query_names_both(make: Make) -> None:
    with pytest.raises(KvsemError, match=r"5.*dimension 4"):
        filled(make).search(np.ones(5), 1)


def test_calls_are_checked(make: Make) -> None:
    index = filled(make)
    with pytest.raises(KvsemError, match="2 ids for 1 vectors"):
        index.add([1, 2], np.ones((1, DIM)))
    for bad in (-1, 2**63):
        with pytest.raises(SettingError, match="ids"):
            index.add([bad], np.ones((1, DIM)))
    with pytest.raises(SettingError, match="k=0"):
        index.search(np.ones(DIM), 0)
    with pytest.raises(SettingError, match="dim"):
        make(0, "e")


def test_another_embedder_is_refused_with_both_values(make: Make) -> None:
    one, narrow, other = HashingEmbedder(64), HashingEmbedder(32), HashingEmbedder(64, ngram=4)
    index = make(one.dim, one.identity)
    index.check(one)
    with pytest.raises(KvsemError, match=r"64.*32"):
        index.check(narrow)
    with pytest.raises(KvsemError, match=r"ngram=3.*ngram=4"):
        index.check(other)
    with pytest.raises(KvsemError, match="revision 2"):
        make(DIM, "m revision 1").check(SimpleNamespace(dim=DIM, identity="m revision 2"))


def test_without_faiss_it_says_what_to_install(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(KvsemError, match=r"pip install 'kvsem\[cpu\]' or 'kvsem\[gpu\]'"):
        make(DIM, "e")


def test_readers_beside_writers(make: Make) -> None:
    """F7: 8 readers and 2 writers; every hit is a vector that was there, with its own cosine."""
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(600, 16))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = make(16, "e")
    index.add(range(200), vectors[:200])
    failures: list[BaseException] = []

    def guarded(work: Callable[[int], None], turns: range) -> None:
        try:
            for n in turns:
                work(n)
        except BaseException as error:
            failures.append(error)

    def read(n: int) -> None:
        hits = index.search(vectors[n], 10)
        assert len(hits) == 10
        assert [s for _, s in hits] == pytest.approx(
            [vectors[i] @ vectors[n] for i, _ in hits], abs=1e-5
        )

    def write(n: int) -> None:
        index.add([n, n], vectors[[0, n]])
        if n % 20 >= 5:
            assert index.remove([n - 5, 1000]) == 1

    work = [(read, range(i, 600, 2)) for i in range(8)]
    work += [(write, range(200, 400)), (write, range(400, 600))]
    threads = [threading.Thread(target=guarded, args=args) for args in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(index) == 200 + 2 * 50
    assert len(index.search(np.ones(16), 1000)) == len(index)


@pytest.mark.parametrize("order", ["torch, faiss", "faiss, torch"])
def test_torch_and_faiss_live_in_one_process(order: str) -> None:
    """F9: two OpenMP runtimes, each with threads of its own."""
    code = f"""
import {order}
import numpy as np
from kvsem.index.flat import FlatIndex
from kvsem.index.hnsw import HnswIndex
torch.set_num_threads(2)
faiss.omp_set_num_threads(2)
encoder = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).eval()
with torch.inference_mode():
    vectors = encoder(torch.randn(300, 32, 64)).mean(1).numpy()
for index in (FlatIndex(64, "e"), HnswIndex(64, "e")):
    index.add(range(300), vectors)
    print(len(index.search(vectors[0], 5)), index.search(vectors[7], 1)[0][0])
    assert torch.randn(400, 400).matmul(torch.randn(400, 400)).isfinite().all()
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout.split()) == (0, ["5", "7"] * 2), run.stderr


# HNSW -----------------------------------------------------------------------------------------


def clusters(n: int, dim: int = 32, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.repeat(rng.normal(size=(n // 10, dim)), 10, 0) + 0.4 * rng.normal(size=(n, dim))


def test_after_removal_it_finds_what_a_new_index_finds() -> None:
    """F6: whole clusters go, which leaves the walk among removed vectors only."""
    vectors, gone = clusters(2000), [*range(300), *range(300, 700, 2)]
    left = sorted(set(range(2000)) - set(gone))
    whole = HnswIndex(32, "e", rebuild_share=0.9)
    whole.add(range(2000), vectors)
    assert whole.remove(gone) == len(gone)
    new, flat = HnswIndex(32, "e"), FlatIndex(32, "e")
    for index in (new, flat):
        index.add(left, vectors[left])
    found = {index: [index.search(v, 5) for v in vectors[::5]] for index in (whole, new, flat)}
    for index in (whole, new):
        assert not {i for hits in found[index] for i, _ in hits} & set(gone)
        same = [a[0] == b[0] for a, b in zip(found[index], found[flat], strict=True)]
        assert np.mean(same) >= 0.99
        assert all(len(hits) == 5 for hits in found[index])


def test_where_the_walk_meets_removed_ones_only_all_are_compared() -> None:
    """The nearest 400 are gone, of which a walk of 8 does not come out."""
    crowd = np.eye(DIM * 4)[0] + 0.05 * np.random.default_rng(0).normal(size=(400, DIM * 4))
    vectors = np.vstack([crowd, clusters(600, DIM * 4)])
    index, flat = HnswIndex(DIM * 4, "e", ef_search=8, rebuild_share=0.9), FlatIndex(DIM * 4, "e")
    for each in (index, flat):
        each.add(range(1000), vectors)
        each.remove(range(400))
    for query in crowd[:20]:
        assert len(index.search(query, 5)) == 5
    assert index.search(crowd[0], 600) == flat.search(crowd[0], 600)


def test_equal_vectors_share_a_place() -> None:
    """A crowd of them would have no way to others, nor others to them."""
    index = HnswIndex(DIM, "e")
    index.add(range(500), np.tile([1, 0, 0, 0], (500, 1)))
    index.add([900, 901], np.array([[0, 1, 0, 0], [-0.0, 0, 2, 0]]))
    index.add([902], np.array([[0.0, 0, 1, 0]]))
    assert index._index.ntotal == 3
    assert index.search(np.eye(DIM)[0], 3) == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert index.search(np.eye(DIM)[2], 2) == [(901, 1.0), (902, 1.0)]
    assert index.remove(range(499)) == 499
    assert index.search(np.eye(DIM)[0], 1) == [(499, 1.0)]
    assert index._index.ntotal == 3


def test_a_removed_id_may_come_back() -> None:
    index = HnswIndex(DIM, "e", rebuild_share=0.9)
    index.add([1, 2], np.eye(DIM)[:2])
    index.remove([1])
    index.add([1], np.eye(DIM)[2:3])
    assert index.search(np.eye(DIM)[0], 9) == [(1, 0.0), (2, 0.0)]
    assert index.search(np.eye(DIM)[2], 1) == [(1, 1.0)]


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (0.2, 20), (0.9, 90)])
def test_the_graph_never_holds_more_than_its_share_of_removed(share: float, kept: int) -> None:
    index = HnswIndex(DIM, "e", rebuild_share=share)
    index.add(range(100), np.random.default_rng(0).normal(size=(100, DIM)))
    most = 0
    for id in range(100):
        index.remove([id])
        dead = index._index.ntotal - len(index)
        assert dead <= share * index._index.ntotal
        most = max(most, dead)
    assert most == kept
    assert index._index.ntotal == 0


def test_the_same_calls_make_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """On many threads, too: which of them comes first would decide."""
    graphs, threads, before = [], set(), faiss.omp_get_max_threads()
    add = faiss.IndexHNSWFlat.add

    def spy(index: Any, rows: np.ndarray) -> None:
        threads.add(faiss.omp_get_max_threads())
        add(index, rows)

    monkeypatch.setattr(faiss.IndexHNSWFlat, "add", spy)
    faiss.omp_set_num_threads(8)
    try:
        for _ in range(2):
            index = HnswIndex(32, "e")
            index.add(range(800), clusters(800))
            index.remove(range(0, 800, 3))  # builds it anew
            graphs.append(faiss.serialize_index(index._index).tobytes())
        assert faiss.omp_get_max_threads() == 8
    finally:
        faiss.omp_set_num_threads(before)
    assert graphs[0] == graphs[1]
    assert threads == {1}


def test_an_unchanged_vector_is_not_added_again() -> None:
    """F12: nor does it leave removed ones behind."""
    index = HnswIndex(DIM, "e", rebuild_share=0.9)
    for _ in range(100):
        index.add([7], np.array([[1, 2, 0, 0]]))
    assert index._index.ntotal == 1


@pytest.mark.parametrize(
    "setting",
    [{"m": 1}, {"m": 300}, {"m": 2.5}, {"ef_construction": 0}, {"ef_search": 0}, {"ef_search": 1e9},
     {"m": "many"}, {"ef_search": None}, {"ef_construction": True}, {"rebuild_share": "abc"},
     {"rebuild_share": 1}, {"rebuild_share": -0.1}, {"rebuild_share": float("nan")}],
)  # fmt: skip
def test_settings_of_the_graph_have_ranges(setting: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=rf"{next(iter(setting))}=.*: expected a"):
        HnswIndex(DIM, "e", **setting)


@pytest.mark.parametrize("kind", [FlatIndex, HnswIndex])
@pytest.mark.parametrize("count", ["abc", None, 2.5, True, 0])
def test_counts_are_whole_numbers(kind: Any, count: Any) -> None:
    with pytest.raises(SettingError, match=r"dim=.*: expected a whole number from 1"):
        kind(count, "e")
    with pytest.raises(SettingError, match=r"k=.*: expected a whole number from 1"):
        kind(DIM, "e").search(np.eye(DIM)[0], count)


# The mirror on a GPU --------------------------------------------------------------------------

NO_GPU = not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() < 1


@pytest.mark.parametrize(
    ("mirror", "said"), [("gpu", "is no GPU build|finds no GPU"), ("tpu", "expected gpu or null")]
)
def test_a_mirror_that_cannot_be_is_refused(mirror: str, said: str) -> None:
    if mirror == "gpu" and not NO_GPU:
        pytest.skip("there is a GPU, on which the mirror works")
    with pytest.raises(SettingError, match=rf"^mirror='{mirror}': .*({said})") as caught:
        FlatIndex(DIM, "e", mirror=mirror)
    assert "\n" not in str(caught.value)


def test_a_mirror_is_never_older_than_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are made on the CPU here; what FAISS does on a GPU is the next test's."""
    copies = []

    def copy(_: object, device: int, index: Any) -> Any:
        copies.append(device)
        return faiss.clone_index(index)

    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", copy, raising=False)
    mirrored, plain = FlatIndex(DIM, "e", mirror="gpu"), FlatIndex(DIM, "e")
    rng = np.random.default_rng(0)
    for turn in range(6):
        for id in (turn, turn + 10):
            for index in (mirrored, plain):
                index.add([id], np.roll(np.eye(DIM)[:1], turn, axis=1))
                index.remove([turn + 9] if id == turn + 10 else [])
            for query in rng.normal(size=(3, DIM)):
                assert mirrored.search(query, 9) == plain.search(query, 9)
        for index in (mirrored, plain):
            index.remove([turn])
        assert mirrored.search(np.ones(DIM), 9) == plain.search(np.ones(DIM), 9)
    assert copies == [0] * 18  # once for all searches between two changes


@pytest.mark.skipif(NO_GPU, reason="untested without a GPU and FAISS's GPU build (kvsem[gpu])")
def test_the_mirror_on_a_gpu_has_the_same_best() -> None:
    mirrored, plain = FlatIndex(32, "e", mirror="gpu"), FlatIndex(32, "e")
    for index in (mirrored, plain):
        index.add(range(2000), clusters(2000))
        index.remove(range(0, 2000, 7))
    for query in clusters(500, seed=1):
        ours, truth = mirrored.search(query, 5), plain.search(query, 5)
        assert ours[0][0] == truth[0][0]
        assert [s for _, s in ours] == pytest.approx([s for _, s in truth], abs=1e-5)
    assert len(mirrored.search(np.ones(32), 5000)) == len(plain)
