"""Approximate search by cosine over a navigable graph (FAISS's HNSW)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from kvsem.errors import check_count, check_range
from kvsem.index.base import (
    Embeds,
    Saved,
    check_embedder,
    import_faiss,
    ranked,
    read_saved,
    to_store,
    units,
    write_saved,
)


class HnswIndex:
    """Cosines of unit vectors as in `FlatIndex`, of the nearest that a walk over a graph finds.

    A search may miss a nearer vector, never returns a removed one, and returns ``k`` wherever so
    many are there: where the walk finds fewer, all are compared. FAISS cannot take a vector out
    of the graph: a removed one stays as a way to others, and the graph is built anew once more
    than ``rebuild_share`` of it is removed (searches wait meanwhile), and before it is saved.

    ``m``: neighbours of a vector (twice as many at the bottom); ``ef_construction`` and
    ``ef_search``: vectors kept in view while adding and searching. The same calls in the same
    order make the same graph, as it is built on one thread; the same vectors in other calls make
    another. Malkov and Yashunin, arXiv 1603.09320.
    """

    def __init__(
        self,
        dim: int,
        identity: str,
        m: int = 32,
        ef_construction: int = 200,
        ef_search: int = 64,
        rebuild_share: float = 0.2,
    ) -> None:
        self._faiss = import_faiss()
        check_count("dim", dim, 1)
        check_count("m", m, 2, 256)
        check_count("ef_construction", ef_construction, 1, 10_000)
        check_count("ef_search", ef_search, 1, 10_000)
        check_range("rebuild_share", rebuild_share, 0, 0.9)
        self.dim, self.identity = dim, identity
        self.m, self.ef_construction, self.ef_search = m, ef_construction, ef_search
        self.rebuild_share = rebuild_share
        self._lock = Lock()
        self._start()

    def __len__(self) -> int:
        return len(self._row)

    def ids(self) -> list[int]:
        """Of all vectors that are there."""
        with self._lock:
            return list(self._row)

    def add(self, ids: Sequence[int], vectors: np.ndarray) -> None:
        """Store float32 ``[n, dim]`` under ``ids``; of an id given twice the last vector stays."""
        new, rows = to_store(ids, vectors, self.dim)
        with self._lock:
            self._detach(new)
            self._insert(new, rows)
            self._tidy(self.rebuild_share)

    def search(self, vector: np.ndarray, k: int) -> list[tuple[int, float]]:
        """At most ``k`` ``(id, cosine)``, best first, equal ones by id; [] without a direction."""
        check_count("k", k, 1)
        unit = units(np.asarray(vector)[None], self.dim)
        with self._lock:
            k = min(k, len(self))
            if k == 0 or not unit.any():
                return []
            scores, rows = self._nearest(unit, min(k, self._n_living))
            found = [list(self._ids[row]) for row in rows]
        scores = np.repeat(scores, [len(ids) for ids in found])
        return ranked(chain.from_iterable(found), scores)[:k]

    def remove(self, ids: Sequence[int]) -> int:
        """Forget ``ids``; returns how many were there."""
        with self._lock:
            n = self._detach(ids)
            self._tidy(self.rebuild_share)
            return n

    def check(self, embedder: Embeds) -> None:
        """Raise `KvsemError` unless this index holds vectors of ``embedder``."""
        check_embedder(self, embedder)

    def save(self, folder: Path) -> None:
        """Keep ids, vectors and graph in a file in ``folder``; nothing that was removed."""
        with self._lock:
            self._tidy(0)
            skip = self._faiss.IO_FLAG_SKIP_STORAGE  # the vectors, which stand beside it
            graph = self._faiss.serialize_index(self._index, skip)
            saved = Saved(*self._living(), graph, self._built())
        write_saved(folder, self, saved)

    def load(self, folder: Path) -> None:
        """Hold what was saved in ``folder``; where its graph is not of this index's settings, of
        another FAISS or damaged, it is built from the vectors."""
        saved = read_saved(folder, self)
        if saved is None:
            return
        with self._lock:
            self._start()
            if saved.graph is None or saved.built != self._built():
                self._insert(saved.ids.tolist(), saved.vectors)
            else:
                distinct = self._number(saved.ids.tolist(), saved.vectors)
                self._adopt(saved.graph, saved.vectors[distinct])

    # -- under the lock ---------------------------------------------------------------------

    def _start(self) -> None:
        metric = self._faiss.METRIC_INNER_PRODUCT
        self._index: Any = self._faiss.IndexHNSWFlat(self.dim, self.m, metric)
        self._index.hnsw.efConstruction = self.ef_construction
        self._index.hnsw.efSearch = self.ef_search
        self._ids: list[list[int]] = []  # of each row of the graph; none: it was removed
        self._row: dict[int, int] = {}  # of each id that is there
        self._row_of: dict[bytes, int] = {}  # of each vector, by its digest
        self._n_living = 0  # rows with an id
        self._selector: Any = None  # these rows, for FAISS; None: to be made

    def _adopt(self, graph: np.ndarray, vectors: np.ndarray) -> None:
        index = self._faiss.deserialize_index(graph, self._faiss.IO_FLAG_SKIP_STORAGE)
        storage = self._faiss.IndexFlat(self.dim, self._faiss.METRIC_INNER_PRODUCT)
        storage.add(vectors)
        storage.this.disown()
        index.storage, index.own_fields = storage, True
        index.hnsw.efSearch = self.ef_search
        self._index = index

    def _built(self) -> dict[str, Any]:
        settings = {"m": self.m, "ef_construction": self.ef_construction}
        return {"index": "hnsw", "faiss": self._faiss.__version__, **settings}

    def _number(self, ids: list[int], vectors: np.ndarray) -> list[int]:
        """Give each id a row, the same for the same vector: a crowd of equal ones in the graph
        would know each other only. Returns which of the vectors need a new row."""
        new = []
        for i, (id, vector) in enumerate(zip(ids, vectors, strict=True)):
            row = self._row_of.setdefault(_digest(vector), len(self._ids))
            if row == len(self._ids):
                self._ids.append([])
                new.append(i)
            self._n_living += not self._ids[row]
            self._ids[row].append(id)
            self._row[id] = row
        self._selector = None
        return new

    def _insert(self, ids: list[int], vectors: np.ndarray) -> None:
        if new := self._number(ids, vectors):
            with _one_thread(self._faiss):
                self._index.add(vectors[new])

    def _detach(self, ids: Sequence[int]) -> int:
        known = self._row.keys() & set(ids)
        for id in known:
            row = self._row.pop(id)
            self._ids[row].remove(id)
            self._n_living -= not self._ids[row]
        self._selector = None
        return len(known)

    def _tidy(self, share: float) -> None:
        """Build the graph anew where more than ``share`` of it was removed."""
        if len(self._ids) - self._n_living > share * len(self._ids):
            ids, vectors = self._living()
            self._start()
            self._insert(ids.tolist(), vectors)

    def _living(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and their vectors, in the order of the rows."""
        vectors = self._index.reconstruct_n(0, len(self._ids)).reshape(-1, self.dim)
        ids = np.array([id for ids in self._ids for id in ids], np.int64)
        return ids, np.repeat(vectors, [len(ids) for ids in self._ids], axis=0)

    def _nearest(self, unit: np.ndarray, k: int) -> tuple[np.ndarray, list[int]]:
        """Cosines and ``k`` living rows: of the walk, or of all where it falls short."""
        living = self._selected()
        walk = self._faiss.SearchParametersHNSW(sel=living, efSearch=self.ef_search)
        scores, rows = self._index.search(unit, k, params=walk)
        if (rows < 0).any():
            storage = self._faiss.downcast_index(self._index.storage)
            every = self._faiss.SearchParameters(sel=living)
            scores, rows = storage.search(unit, k, params=every)
        return scores[0], rows[0].tolist()

    def _selected(self) -> Any:
        if self._selector is None and self._n_living < len(self._ids):
            bits = np.packbits([bool(ids) for ids in self._ids], bitorder="little")
            self._selector = self._faiss.IDSelectorBitmap(bits)
        return self._selector


def _digest(vector: np.ndarray) -> bytes:
    """0.0 and -0.0 are the same."""
    return blake2b((vector + 0.0).tobytes(), digest_size=16).digest()


@contextmanager
def _one_thread(faiss: Any) -> Iterator[None]:
    """For this thread only: with more the graph would depend on who is first."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
