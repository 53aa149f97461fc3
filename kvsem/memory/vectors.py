"""What stored chunks mean: their vectors in an index per namespace, so that tenants stay apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvsem.embedders.base import Embedder
from kvsem.index.base import ChunkIndex
from kvsem.keys import entry_id


class ChunkVectors:
    """Content keys by meaning. ``make_index`` makes an empty index, given dim and identity.

    Without an embedder nothing is ever similar. Raises `KvsemError` where the index is made for
    vectors of another dimension or embedder.
    """

    def __init__(self, embedder: Embedder | None, make_index: Callable[..., ChunkIndex]) -> None:
        self.embedder, self._make_index = embedder, make_index
        self._indexes: dict[str, ChunkIndex] = {}
        self._keys: dict[int, str] = {}
        if embedder is not None:
            self._make(embedder)  # a mismatch shows before anything is computed

    def warm_up(self) -> None:
        """Let the embedder load what it loads on first use."""
        if self.embedder is not None:
            self.embedder.embed(["warm"])

    def add(self, namespace: str, texts: dict[str, str]) -> None:
        """Make ``texts`` (by content key) findable; one without content has no direction."""
        if self.embedder is None or not texts:
            return
        vectors = self.embedder.embed(list(texts.values()))
        known = [(entry_id(key), key) for key in texts]
        meant = np.flatnonzero(np.linalg.norm(vectors, axis=1) > 0)
        self._index(namespace).add([known[i][0] for i in meant], vectors[meant])
        self._keys.update(known[i] for i in meant)

    def near(self, namespace: str, texts: Sequence[str], k: int) -> list[list[tuple[str, float]]]:
        """Per text at most ``k`` (content key, cosine), best first."""
        index = self._indexes.get(namespace)
        if self.embedder is None or index is None or not len(index) or not texts:
            return [[] for _ in texts]
        found = (index.search(vector, k) for vector in self.embedder.embed(texts))
        return [[(self._keys[id], score) for id, score in hits] for hits in found]

    def forget(self, key: str) -> None:
        for index in self._indexes.values():
            index.remove([entry_id(key)])
        self._keys.pop(entry_id(key), None)

    def share(self, other: ChunkVectors) -> None:
        """Look into the indexes of ``other``, which must not change any more."""
        self._indexes, self._keys = dict(other._indexes), dict(other._keys)

    def _index(self, namespace: str) -> ChunkIndex:
        if namespace not in self._indexes:
            assert self.embedder is not None
            self._indexes[namespace] = self._make(self.embedder)
        return self._indexes[namespace]

    def _make(self, embedder: Embedder) -> ChunkIndex:
        given = getattr(self._make_index, "keywords", {})  # of a partial: the user's own
        wanted = {"dim": embedder.dim, "identity": embedder.identity}
        index = self._make_index(**{k: v for k, v in wanted.items() if k not in given})
        index.check(embedder)
        return index
