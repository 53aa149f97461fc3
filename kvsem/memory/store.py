"""Where stored chunks live: content key → entry, in the model's memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvsem.forward import KVBuffer
from kvsem.keys import chain_key
from kvsem.types import Chunk, ChunkKV


def entry_of(
    chunk: Chunk, kv: KVBuffer, ids: np.ndarray, namespace: str, context: str, depth: int
) -> ChunkKV:
    """The entry of ``chunk``, whose KV stands at its place in ``kv`` behind ``ids``."""
    keys, values = kv.slice(chunk.start, chunk.end)
    return ChunkKV(
        key=chunk.key,
        namespace=namespace,
        text=chunk.text,
        ids=chunk.ids,
        inner=chunk.inner,
        position=chunk.start,
        context=context,
        context_key=chain_key(namespace, ids[: chunk.start]),
        depth=depth,
        keys=keys,
        values=values,
    )


class ChunkStore:
    """Entries by key. An entry is whole when it is put, and is never changed afterwards.

    ``put`` refuses tensors that are not finite (a later lookup is a miss) and keeps the first
    entry of a key.
    """

    def __init__(self) -> None:
        self._entries: dict[str, ChunkKV] = {}
        self.nbytes = 0
        self.n_not_finite = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ChunkKV]:
        return iter(self._entries.values())

    def put(self, entry: ChunkKV) -> bool:
        """Store ``entry``; False where its key is known already or its KV is not finite."""
        if entry.key in self._entries:
            return False
        if not all(bool(torch.isfinite(t).all()) for t in (*entry.keys, *entry.values)):
            self.n_not_finite += 1
            return False
        self._entries[entry.key] = entry
        self.nbytes += entry.nbytes
        return True

    def share(self, other: ChunkStore) -> None:
        """Hold the entries of ``other`` too; they were looked at when they were put there."""
        for key, entry in other._entries.items():
            if key not in self._entries:
                self._entries[key] = entry
                self.nbytes += entry.nbytes

    def get(self, key: str) -> ChunkKV | None:
        return self._entries.get(key)

    def forget(self, key: str) -> bool:
        """Drop an entry; False where there was none."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self.nbytes -= entry.nbytes
        return True
