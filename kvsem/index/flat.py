"""Exact search by cosine over all vectors (FAISS)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from kvsem.errors import SettingError, check_count
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

_MOST_ON_A_GPU = 2048  # neighbours that FAISS's GPU kernels select


class FlatIndex:
    """Inner product of unit vectors, compared with every one; nothing is approximated.

    Vectors are brought to length 1 on the way in and in a search, so that their scale never
    matters; cosines are clipped to [-1, 1]. ``identity`` names the embedder whose vectors these
    are: `check` refuses any other. One lock guards it, as FAISS is not safe for a writer among
    readers. Raises `KvsemError` for vectors of another dimension or without a direction.

    ``mirror="gpu"`` searches in a copy on the first GPU (needs FAISS's GPU build). The index on
    the CPU is the truth: after a change the copy is made anew at the next search.
    """

    def __init__(self, dim: int, identity: str, mirror: str | None = None) -> None:
        faiss = import_faiss()
        check_count("dim", dim, 1)
        self.dim = dim
        self.identity = identity
        self._faiss = faiss
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
        self._ids: set[int] = set()
        self._lock = Lock()
        self._gpu = _gpu(faiss, mirror)
        self._copy: Any = None  # of the index, on the GPU; None: older than the index

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self) -> list[int]:
        """Of all vectors that are there."""
        with self._lock:
            return list(self._ids)

    def add(self, ids: Sequence[int], vectors: np.ndarray) -> None:
        """Store float32 ``[n, dim]`` under ``ids``; of an id given twice the last vector stays."""
        new, rows = to_store(ids, vectors, self.dim)
        with self._lock:
            self._remove(self._ids.intersection(new))
            self._insert(new, rows)

    def search(self, vector: np.ndarray, k: int) -> list[tuple[int, float]]:
        """At most ``k`` ``(id, cosine)``, best first, equal ones by id; [] without a direction."""
        check_count("k", k, 1)
        unit = units(np.asarray(vector)[None], self.dim)
        with self._lock:
            k = min(k, len(self._ids))
            if k == 0 or not unit.any():
                return []
            scores, ids = self._searched(k).search(unit, k)
        return ranked(ids[0].tolist(), scores[0])

    def remove(self, ids: Sequence[int]) -> int:
        """Forget ``ids``; returns how many were there."""
        with self._lock:
            return self._remove(self._ids.intersection(ids))

    def check(self, embedder: Embeds) -> None:
        """Raise `KvsemError` unless this index holds vectors of ``embedder``."""
        check_embedder(self, embedder)

    def save(self, folder: Path) -> None:
        """Keep ids and vectors in a file in ``folder``; there is nothing else to it."""
        with self._lock:
            ids = self._faiss.vector_to_array(self._index.id_map)
            vectors = self._index.index.reconstruct_n(0, len(ids)).reshape(-1, self.dim)
        write_saved(folder, self, Saved(ids, vectors))

    def load(self, folder: Path) -> None:
        """Hold what was saved in ``folder``, in the same order, and nothing else."""
        saved = read_saved(folder, self)
        if saved is None:
            return
        with self._lock:
            self._index.reset()
            self._ids.clear()
            self._insert(saved.ids.tolist(), saved.vectors)

    def _insert(self, ids: list[int], rows: np.ndarray) -> None:
        if ids:
            self._index.add_with_ids(rows, np.array(ids, np.int64))
        self._ids.update(ids)
        self._copy = None

    def _remove(self, known: set[int]) -> int:
        if known:
            self._index.remove_ids(np.fromiter(known, np.int64, len(known)))
            self._ids -= known
            self._copy = None
        return len(known)

    def _searched(self, k: int) -> Any:
        if self._gpu is None or k > _MOST_ON_A_GPU:
            return self._index
        if self._copy is None:
            self._copy = self._faiss.index_cpu_to_gpu(self._gpu, 0, self._index)
        return self._copy


def _gpu(faiss: Any, mirror: str | None) -> Any:
    """What FAISS holds on a GPU, or None without a mirror."""
    if mirror is None:
        return None
    if mirror != "gpu":
        raise SettingError("mirror", mirror, "gpu or null")
    if not hasattr(faiss, "StandardGpuResources"):
        raise SettingError("mirror", mirror, "null: this FAISS is no GPU build (kvsem[gpu])")
    if faiss.get_num_gpus() < 1:
        raise SettingError("mirror", mirror, "null: FAISS finds no GPU")
    return faiss.StandardGpuResources()
