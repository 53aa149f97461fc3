"""Exact search by cosine over all vectors (FAISS)."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np

from kvsem.errors import KvsemError, SettingError
from kvsem.index.base import Embeds

_MAX_ID = 2**63 - 1


class FlatIndex:
    """Inner product of unit vectors, compared with every one; nothing is approximated.

    Vectors are brought to length 1 on the way in and in a search, so that their scale never
    matters; cosines are clipped to [-1, 1]. ``identity`` names the embedder whose vectors these
    are: `check` refuses any other. One lock guards it, as FAISS is not safe for a writer among
    readers. Raises `KvsemError` for vectors of another dimension or without a direction.
    """

    def __init__(self, dim: int, identity: str) -> None:
        try:
            import faiss
        except ImportError as error:
            raise KvsemError(
                "faiss is missing: pip install 'kvsem[cpu]' or 'kvsem[gpu]' (never both)"
            ) from error
        if dim < 1:
            raise SettingError("dim", dim, "a whole number from 1")
        self.dim = dim
        self.identity = identity
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
        self._ids: set[int] = set()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, ids: Sequence[int], vectors: np.ndarray) -> None:
        """Store float32 ``[n, dim]`` under ``ids``; of an id given twice the last vector stays."""
        units = self._units(vectors)
        if len(ids) != len(units):
            raise KvsemError(f"{len(ids)} ids for {len(units)} vectors")
        if bad := [i for i in ids if not 0 <= i <= _MAX_ID]:
            raise SettingError("ids", bad[0], "a number from 0 to 2**63 - 1")
        if not np.linalg.norm(units, axis=1).all():
            raise KvsemError("a vector that is zero or not finite cannot be indexed")
        rows = {id: row for row, id in enumerate(ids)}
        with self._lock:
            self._remove(rows.keys() & self._ids)
            if rows:
                kept = np.fromiter(rows, np.int64, len(rows))
                self._index.add_with_ids(units[list(rows.values())], kept)
            self._ids |= rows.keys()

    def search(self, vector: np.ndarray, k: int) -> list[tuple[int, float]]:
        """At most ``k`` ``(id, cosine)``, best first, equal ones by id; [] without a direction."""
        if k < 1:
            raise SettingError("k", k, "a whole number from 1")
        unit = self._units(np.asarray(vector)[None])
        with self._lock:
            k = min(k, len(self._ids))
            if k == 0 or not unit.any():
                return []
            scores, ids = self._index.search(unit, k)
        found = zip(ids[0].tolist(), scores[0].clip(-1, 1).tolist(), strict=True)
        return sorted(((i, s) for i, s in found if i >= 0), key=lambda hit: (-hit[1], hit[0]))

    def remove(self, ids: Sequence[int]) -> int:
        """Forget ``ids``; returns how many were there."""
        with self._lock:
            return self._remove(self._ids.intersection(ids))

    def check(self, embedder: Embeds) -> None:
        """Raise `KvsemError` unless this index holds vectors of ``embedder``."""
        if embedder.dim != self.dim:
            raise KvsemError(f"the index holds vectors of {self.dim}, the embedder {embedder.dim}")
        if embedder.identity != self.identity:
            raise KvsemError(
                f"the index belongs to embedder {self.identity!r}, not to {embedder.identity!r}"
            )

    def _remove(self, known: set[int]) -> int:
        if known:
            self._index.remove_ids(np.fromiter(known, np.int64, len(known)))
            self._ids -= known
        return len(known)

    def _units(self, vectors: np.ndarray) -> np.ndarray:
        """float32 ``[n, dim]``, rows of length 1; all zero where a row has no direction."""
        wide = np.asarray(vectors, dtype=np.float64)
        if wide.ndim != 2 or wide.shape[1] != self.dim:
            raise KvsemError(f"vectors of shape {wide.shape}, the index holds dimension {self.dim}")
        norms = np.linalg.norm(wide, axis=1, keepdims=True)
        usable = np.isfinite(norms) & (norms > 0)
        units = np.where(usable, wide, 0) / np.where(usable, norms, 1)
        return np.ascontiguousarray(units, dtype=np.float32)
