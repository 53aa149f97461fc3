"""An index in a file: whole, of the same embedder, or not read."""

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvsem.embedders.hashing import HashingEmbedder
from kvsem.errors import DataError, KvsemError
from kvsem.files import DamagedError, replacing, seal, unseal
from kvsem.index.base import FILE, ChunkIndex, read_saved
from kvsem.index.flat import FlatIndex
from kvsem.index.hnsw import HnswIndex
from kvsem.keys import content_key, entry_id
from kvsem.memory.vectors import KEYS, ChunkVectors

DIM = 16
Make = Callable[..., ChunkIndex]
QUERIES = np.random.default_rng(9).normal(size=(40, DIM))
KINDS = [FlatIndex, HnswIndex]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.fixture
def _umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whenever FAISS is given bytes to make an index of."""
    calls: list[str] = []
    real = faiss.read_index  # `deserialize_index` ends there, too

    def spy(*args: Any) -> Any:
        calls.append("read_index")
        return real(*args)

    monkeypatch.setattr(faiss, "read_index", spy)
    return calls


def filled(make: Make, n: int = 300) -> ChunkIndex:
    """Some replaced, some removed, some the same."""
    vectors = np.random.default_rng(0).normal(size=(n, DIM))
    vectors[5:8] = vectors[4]
    index = make(DIM, "one")
    index.add([i * 2**40 for i in range(n)], vectors)
    index.add([2**40], vectors[20:21] + 1)
    index.remove([i * 2**40 for i in range(30, 60)])
    return index


def hits(index: ChunkIndex, k: int = 7) -> list[list[tuple[int, float]]]:
    return [index.search(query, k) for query in QUERIES]


def loaded(make: Make, folder: Path) -> ChunkIndex:
    index = make(DIM, "one")
    index.load(folder)
    return index


def test_a_round_trip_finds_the_same(make: Make, tmp_path: Path) -> None:
    index = filled(make)
    index.save(tmp_path / "new" / "folder")
    again = loaded(make, tmp_path / "new" / "folder")
    assert hits(again) == hits(index)
    assert sorted(again.ids()) == sorted(index.ids())
    for each in (again, index):
        each.add([1], QUERIES[:1])
        each.remove([2 * 2**40])
    assert [id for id, _ in again.search(QUERIES[0], 1)] == [1]
    again.save(tmp_path / "new" / "folder")  # over the first
    assert hits(loaded(make, tmp_path / "new" / "folder")) == hits(again)
    assert [p.name for p in (tmp_path / "new" / "folder").iterdir()] == [FILE]


def test_an_empty_index_is_kept_too(make: Make, tmp_path: Path) -> None:
    make(DIM, "one").save(tmp_path)
    index = filled(make)
    index.load(tmp_path)
    assert (len(index), hits(index)) == (0, [[]] * len(QUERIES))


def test_every_index_reads_what_another_saved(tmp_path: Path) -> None:
    for n, (writer, reader) in enumerate([KINDS, KINDS[::-1]]):
        index = filled(writer)
        index.save(tmp_path / str(n))
        same = [a[:1] == b[:1] for a, b in zip(hits(index), hits(loaded(reader, tmp_path / str(n))),
                                               strict=True)]  # fmt: skip
        assert np.mean(same) >= 0.95


def test_a_graph_is_read_only_where_it_is_of_these_settings(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(HnswIndex).save(tmp_path)
    for setting, is_read in (({}, 1), ({"ef_search": 7}, 1), ({"m": 8}, 0)):
        opened.clear()
        index = HnswIndex(DIM, "one", **setting)
        index.load(tmp_path)
        assert (len(opened), len(index)) == (is_read, 270)
    assert index._index.hnsw.nb_neighbors(1) == 8
    monkeypatch.setattr(faiss, "__version__", "0.0")
    opened.clear()
    assert len(loaded(HnswIndex, tmp_path)) == 270
    assert not opened


def test_removed_vectors_are_not_written(make: Make, tmp_path: Path) -> None:
    index, secret = filled(make), np.full((1, DIM), 0.25)
    index.add([3], secret)
    index.save(tmp_path / "before")
    index.remove([3])
    index.save(tmp_path / "after")
    found = [secret.astype(np.float32).tobytes() in (tmp_path / f / FILE).read_bytes()
             for f in ("before", "after")]  # fmt: skip
    assert found == [True, False]


@pytest.mark.usefixtures("_umask")
def test_only_the_owner_can_read(make: Make, tmp_path: Path) -> None:
    """E7: also where the process lets everyone."""
    folder = tmp_path / "a" / "b"
    filled(make).save(folder)
    modes = [path.stat().st_mode & 0o777 for path in (folder.parent, folder, folder / FILE)]
    assert [oct(mode) for mode in modes] == ["0o700", "0o700", "0o600"]


def test_another_embedder_is_refused_with_both(make: Make, tmp_path: Path) -> None:
    """F8: of the same dimension, too; what is held stays."""
    filled(make).save(tmp_path)
    for other in (make(DIM, "two"), make(DIM * 2, "one")):
        other.add([1], np.ones((1, other.dim)))
        both = rf"'one' \(dim 16\), not of '{other.identity}' \(dim {other.dim}\)"
        with pytest.raises(KvsemError, match=both):
            other.load(tmp_path)
        assert len(other) == 1


def test_nothing_saved_is_an_error_and_changes_nothing(make: Make, tmp_path: Path) -> None:
    index = filled(make)
    before = hits(index)
    with pytest.raises(DataError, match="no index was saved"):
        index.load(tmp_path / "absent")
    assert hits(index) == before


def test_no_flipped_bit_is_read(make: Make, tmp_path: Path, opened: list[str]) -> None:
    """E6: anywhere in the file; FAISS never sees a changed byte, whole vectors are used."""
    index = filled(make, 40)
    index.save(tmp_path)
    data, truth = (tmp_path / FILE).read_bytes(), hits(index)
    rng, seen = np.random.default_rng(0), set()
    header = 8 + int.from_bytes(data[:8], "little")
    places = [*range(0, header, 4), *range(header, len(data), max(1, len(data) // 100))]
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << int(rng.integers(8))
        (tmp_path / FILE).write_bytes(flipped)
        opened.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again = loaded(make, tmp_path)
        assert len(caught) == 1, place
        assert not opened
        assert len(again) in (0, len(index))
        if len(again):
            assert [h[:1] for h in hits(again)] == [h[:1] for h in truth]
        seen.add((len(again), str(caught[0].message).split(", ")[-1][:12]))
    assert any(n == 0 for n, _ in seen)
    assert (make is HnswIndex) == any(n > 0 for n, _ in seen)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_leaves_what_was_held(make: Make, tmp_path: Path, keep: float) -> None:
    index = filled(make)
    index.save(tmp_path)
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[: int(keep * len(data))])
    before = hits(index)
    with pytest.warns(UserWarning, match="not read") as caught:
        index.load(tmp_path)
    assert len(caught) == 1
    assert hits(index) == before


def test_a_later_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / FILE
    save_file({}, path, metadata={"kvsem": seal({"format": 99})})
    with pytest.warns(UserWarning, match="format 99, this version reads 1"):
        assert read_saved(tmp_path, FlatIndex(DIM, "one")) is None


def test_vectors_of_another_file_are_not_taken(tmp_path: Path) -> None:
    """A whole tensor under a whole header that is not its own."""
    filled(FlatIndex).save(tmp_path)
    tensors = load_file(tmp_path / FILE)
    body = {"format": 1, "identity": "one", "dim": DIM, "built": {}, "sha256": {"ids": "0"}}
    save_file(tensors, tmp_path / FILE, metadata={"kvsem": seal(body)})
    with pytest.warns(UserWarning, match="checksum"):
        assert len(loaded(FlatIndex, tmp_path)) == 0


# Files ----------------------------------------------------------------------------------------


def test_a_seal_breaks_with_any_change() -> None:
    text = seal({"a": [1, "ü"], "b": None})
    assert unseal(text) == {"a": [1, "ü"], "b": None}
    broken = [text.replace("1", "2", 1), text[:-1], "", "[]", "{}", '{"body": 1}', "\ufeff" + text]
    for other in broken:
        with pytest.raises(DamagedError):
            unseal(other)


def _fail_halfway(path: Path, error: Exception) -> None:
    with replacing(path) as part:
        part.write_text("half of the n")
        raise error


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    for error in (RuntimeError("mine"), OSError(28, "No space left on device")):
        with pytest.raises((RuntimeError, DataError), match=r"^mine$|f: cannot .* No space"):
            _fail_halfway(path, error)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert path.read_text() == "old"
    with pytest.raises(DataError, match="cannot be written"), replacing(path / "below a file"):
        pass


def test_writers_and_readers_of_one_file(tmp_path: Path) -> None:
    """D2: every read is one of the writes, whole."""
    bad: list[str] = []

    def write(n: int) -> None:
        for turn in range(30):
            with replacing(tmp_path / "f") as part:
                part.write_text(seal({"n": n, "turn": turn, "long": "x" * 5000}))

    def read() -> None:
        for _ in range(200):
            try:
                unseal((tmp_path / "f").read_text())
            except DamagedError as error:
                bad.append(str(error))

    (tmp_path / "f").write_text(seal({}))
    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    threads += [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


# Chunks ---------------------------------------------------------------------------------------

TEXTS = [f"The {river} rises in the {hill}." for river in ("Rhine", "Nile", "Po") for hill in "ABC"]


def chunks(make: Make = FlatIndex, embedder: HashingEmbedder | None = None) -> ChunkVectors:
    return ChunkVectors(embedder or HashingEmbedder(64), make)


def key(namespace: str, text: str) -> str:
    return content_key(namespace, text, np.arange(3))


def full(make: Make) -> ChunkVectors:
    vectors = chunks(make)
    for namespace in ("tenant/../a", "b"):
        vectors.add(namespace, {key(namespace, text): text for text in TEXTS})
    vectors.add("b", {key("b", "only b"): "only b"})
    return vectors


def test_chunks_are_found_again_in_their_namespace(make: Make, tmp_path: Path) -> None:
    before, after = full(make), chunks(make)
    before.save(tmp_path / "v")
    after.load(tmp_path / "v")
    for namespace in ("tenant/../a", "b", "unknown"):
        assert after.near(namespace, TEXTS, 4) == before.near(namespace, TEXTS, 4)
    assert [k for k, _ in after.near("b", ["only b"], 1)[0]] == [key("b", "only b")]
    assert key("b", "only b") not in dict(after.near("tenant/../a", ["only b"], 9)[0])
    assert not [p for p in tmp_path.rglob("*") if p.is_dir() and p.parent.parent == tmp_path / "v"]
    for text in ("only b", TEXTS[0]):
        after.add("b", {key("b", text): text})
    assert after.near("b", ["only b"], 1)[0][0][0] == key("b", "only b")


def test_another_embedders_chunks_are_refused(make: Make, tmp_path: Path) -> None:
    full(make).save(tmp_path)
    other = chunks(make, HashingEmbedder(64, ngram=4))
    with pytest.raises(KvsemError, match=r"ngram=3.*ngram=4"):
        other.load(tmp_path)
    assert other.near("b", TEXTS, 1) == [[]] * len(TEXTS)


def test_what_was_forgotten_stays_forgotten(make: Make, tmp_path: Path) -> None:
    """F2: also where the process ended between the keys and the vectors."""
    vectors = full(make)
    vectors.save(tmp_path)
    vectors.forget(key("b", TEXTS[0]))
    shadow = chunks(make)
    with replacing(tmp_path / KEYS) as part:  # as `save` begins
        body = unseal((tmp_path / KEYS).read_text())
        body["keys"].remove(key("b", TEXTS[0]))
        part.write_text(seal(body))
    shadow.load(tmp_path)
    assert key("b", TEXTS[0]) not in [k for k, _ in shadow.near("b", TEXTS[:1], 20)[0]]
    assert entry_id(key("b", TEXTS[0])) not in shadow._indexes["b"].ids()
    assert len(shadow._indexes["b"]) == len(TEXTS)


@pytest.mark.parametrize("what", ["flip", "empty", "list", "format", "binary"])
def test_damaged_keys_are_one_warning_and_no_candidates(tmp_path: Path, what: str) -> None:
    full(FlatIndex).save(tmp_path)
    text = (tmp_path / KEYS).read_text()
    (tmp_path / KEYS).write_bytes(
        {
            "flip": text.replace("a", "b", 1).encode(),
            "empty": b"",
            "list": json.dumps([1]).encode(),
            "format": seal({"format": 2}).encode(),
            "binary": b"\xff\xfe\x00",
        }[what]
    )
    vectors = chunks()
    with pytest.warns(UserWarning, match="not read") as caught:
        vectors.load(tmp_path)
    assert len(caught) == 1
    assert vectors.near("b", TEXTS, 3) == [[]] * len(TEXTS)


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_one_lost_namespace_leaves_the_others(tmp_path: Path, what: str) -> None:
    before = full(FlatIndex)
    before.save(tmp_path)
    files = sorted(tmp_path.rglob(FILE), key=lambda file: file.stat().st_size)
    files[-1].unlink() if what == "missing" else files[-1].write_bytes(b"x" * 99)
    after = chunks()
    with pytest.warns(UserWarning, match=rf"{FILE}: not (there|read)") as caught:
        after.load(tmp_path)
    assert len(caught) == 1
    found = [[bool(hit) for hit in after.near(n, TEXTS[:2], 1)] for n in ("tenant/../a", "b")]
    assert sorted(found) == [[False, False], [True, True]]
    after.add("b", {key("b", "new"): "new"})
    assert after.near("b", ["new"], 1)[0][0][0] == key("b", "new")


def test_without_an_embedder_nothing_is_kept(tmp_path: Path) -> None:
    vectors = ChunkVectors(None, FlatIndex)
    vectors.save(tmp_path / "v")
    vectors.load(tmp_path / "v")
    assert not list(tmp_path.iterdir())


def test_nothing_saved_of_chunks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing was saved"):
        chunks().load(tmp_path)
