"""What stored chunks mean: their vectors in an index per namespace, so that tenants stay apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvsem.embedders.base import Embedder
from kvsem.errors import DataError, KvsemError
from kvsem.files import DamagedError, replacing, seal, unseal
from kvsem.index.base import ChunkIndex
from kvsem.keys import digest, entry_id

KEYS = "keys.json"
FORMAT = 1


class ChunkVectors:
    """Content keys by meaning. ``make_index`` makes an empty index, given dim and identity.

    Without an embedder nothing is ever similar. Raises `KvsemError` where the index is made for
    vectors of another dimension or embedder.

    ``surface``: vectors of a cheap embedder that are looked into first. A text that has a
    neighbour there at ``surface_score`` or above is an edit of it, and the embedder, which may cost
    more than a prefill saves, is not asked.
    """

    def __init__(
        self,
        embedder: Embedder | None,
        make_index: Callable[..., ChunkIndex],
        surface: ChunkVectors | None = None,
        surface_score: float = 1.0,
    ) -> None:
        self.embedder, self._make_index = embedder, make_index
        self._surface, self._surface_score = surface, surface_score
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
        if self._surface is not None:
            self._surface.add(namespace, texts)
        vectors = self.embedder.embed(list(texts.values()))
        known = [(entry_id(key), key) for key in texts]
        meant = np.flatnonzero(np.linalg.norm(vectors, axis=1) > 0)
        self._keys.update(known[i] for i in meant)  # first: what is found must have a name
        self._index(namespace).add([known[i][0] for i in meant], vectors[meant])

    def near(self, namespace: str, texts: Sequence[str], k: int) -> list[list[tuple[str, float]]]:
        """Per text at most ``k`` (content key, cosine), best first."""
        if self._surface is None:
            return self._near(namespace, texts, k)
        found = [
            [hit for hit in hits if hit[1] >= self._surface_score]
            for hits in self._surface.near(namespace, texts, k)
        ]
        left = [i for i, hits in enumerate(found) if not hits]
        for i, hits in zip(left, self._near(namespace, [texts[i] for i in left], k), strict=True):
            found[i] = hits
        return found

    def _near(self, namespace: str, texts: Sequence[str], k: int) -> list[list[tuple[str, float]]]:
        index = self._indexes.get(namespace)
        if self.embedder is None or index is None or not len(index) or not texts:
            return [[] for _ in texts]
        found = (index.search(vector, k) for vector in self.embedder.embed(texts))
        return [
            [(key, score) for id, score in hits if (key := self._keys.get(id))]  # not forgotten
            for hits in found
        ]

    def forget(self, key: str) -> None:
        if self._surface is not None:
            self._surface.forget(key)
        for index in self._indexes.values():
            index.remove([entry_id(key)])
        self._keys.pop(entry_id(key), None)

    def share(self, other: ChunkVectors) -> None:
        """Look into the indexes of ``other``, which must not change any more."""
        self._indexes, self._keys = dict(other._indexes), dict(other._keys)
        if self._surface is not None and other._surface is not None:
            self._surface.share(other._surface)

    def save(self, folder: Path) -> None:
        """Keep every namespace in ``folder``, for the same embedder; without one, nothing.

        The keys go first: whenever this is cut short, a vector without a key is one that was
        forgotten, and `load` forgets it.
        """
        if self.embedder is None:
            return
        body = {
            "format": FORMAT,
            "identity": self.embedder.identity,
            "namespaces": list(self._indexes),
            "keys": list(self._keys.values()),
        }
        with replacing(folder / KEYS) as part:
            part.write_text(seal(body), encoding="utf-8")
        for namespace, index in list(self._indexes.items()):
            index.save(_of(folder, namespace))

    def load(self, folder: Path) -> None:
        """Hold what `save` left in ``folder``, and nothing else; without an embedder, nothing.

        Raises `DataError` where nothing was saved, `KvsemError` with both identities where it is
        of another embedder. Of what is damaged: one warning, and nothing is similar to it.
        """
        if self.embedder is None:
            return
        try:
            body = _read(folder / KEYS)
        except DamagedError as error:
            warnings.warn(f"{folder / KEYS}: not read, {error}", stacklevel=2)
            return
        if body["identity"] != self.embedder.identity:
            raise KvsemError(
                f"{folder}: vectors of embedder {body['identity']!r}, "
                f"not of {self.embedder.identity!r}"
            )
        keys = {entry_id(key): key for key in body["keys"]}
        self._indexes = {n: self._loaded(_of(folder, n), keys) for n in body["namespaces"]}
        self._keys = keys

    def _loaded(self, folder: Path, keys: dict[int, str]) -> ChunkIndex:
        assert self.embedder is not None
        index = self._make(self.embedder)
        try:
            index.load(folder)
        except DataError as error:
            warnings.warn(str(error), stacklevel=3)
        index.remove([id for id in index.ids() if id not in keys])
        return index

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


def _of(folder: Path, namespace: str) -> Path:
    """Named by a digest: a namespace is any text."""
    return folder / digest("namespace", name=namespace)[:32]


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: not there, nothing was saved in this folder") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"damaged or not readable ({error})") from None
    body = unseal(text)
    if body["format"] != FORMAT:
        raise DamagedError(f"format {body['format']}, this version reads {FORMAT}")
    return body
