"""Stored chunks: content key → entry, its KV in pages of the same pool as everything else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvsem.forward import KVBuffer
from kvsem.keys import chain_key, token_bytes
from kvsem.memory.pages import Layers, PagedKV, Pages, finite
from kvsem.memory.pool import Block, BlockPool, PoolFullError
from kvsem.types import Chunk, ChunkKV

REMEMBERED = 1 << 16  # evicted keys whose absence can be explained


def entry_of(
    chunk: Chunk,
    kv: KVBuffer | PagedKV,
    ids: np.ndarray,
    namespace: str,
    context: str,
    depth: int,
) -> ChunkKV:
    """The entry of ``chunk``, whose KV stands at its place in ``kv`` behind ``ids``; it looks into
    ``kv``, and is to be put before that changes."""
    keys, values = kv.cut(chunk.start, chunk.end)
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

    ``put`` copies; it refuses tensors that are not finite (a later lookup is a miss) and what
    does not fit the pool, and keeps the first entry of a key. ``forgotten`` is told of every key
    whose entry is gone, evicted or forgotten.
    """

    def __init__(
        self,
        pool: BlockPool,
        pages: Pages,
        forgotten: Callable[[str], None] = lambda key: None,
    ) -> None:
        self.pool, self._pages, self.forgotten = pool, pages, forgotten
        self._entries: dict[str, tuple[ChunkKV, PagedKV, Block]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self.n_not_finite = self.n_refused = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[ChunkKV]:
        return iter([entry for entry, _, _ in self._entries.values()])

    @property
    def nbytes(self) -> int:
        """Of the tokens held; the pages they lie in may have room for more."""
        return sum(kv.nbytes for _, kv, _ in self._entries.values())

    def put(self, entry: ChunkKV, version: str = "", cost: float = 0.0) -> bool:
        """Store a copy of ``entry``; False where its key is known, its KV is not finite, or the
        pool has no room. ``cost``: multiplications that computing it took."""
        with self.pool.lock:
            if entry.key in self._entries:
                return False
            if not finite((*entry.keys, *entry.values)):
                self.n_not_finite += 1
                return False
            n = len(entry.ids)
            try:
                held = self.pool.allocate(-(-n // self._pages.page_size))
            except PoolFullError:
                self.n_refused += 1
                return False
            try:
                self._pages.grow(self.pool.n_pages)
                kv = PagedKV(self._pages, held, length=n)
                for layer, (keys, values) in enumerate(zip(entry.keys, entry.values, strict=True)):
                    kv.write(layer, slice(0, n), keys[None], values[None])
                self._add(entry, kv, version, cost)
            finally:
                self.pool.release(held)
            return True

    def _add(self, entry: ChunkKV, kv: PagedKV, version: str, cost: float) -> None:
        key = entry.key.encode()
        block = Block(
            key, token_bytes(entry.ids), tuple(kv.pages), len(entry.ids), version, cost, self
        )
        stored = replace(
            entry,
            keys=Layers(kv.n_layers, lambda layer: kv.read(layer, kv.length)[0][0]),
            values=Layers(kv.n_layers, lambda layer: kv.read(layer, kv.length)[1][0]),
        )
        self.pool.tick()
        self.pool.publish(block)
        self._entries[entry.key] = stored, kv, block
        self._gone.pop(entry.key, None)

    def get(self, key: str) -> ChunkKV | None:
        """The entry, which may be read as long as it is not evicted; hold its pages to be sure."""
        found = self._entries.get(key)
        return found[0] if found else None

    def was_evicted(self, key: str) -> bool:
        return key in self._gone

    def pages_of(self, keys: Sequence[str]) -> list[int]:
        """Every page of the entries ``keys``, to be held while they are read."""
        return [page for key in keys for page in self._entries[key][2].pages]

    def use(self, keys: Sequence[str]) -> None:
        """Count a hit on each of ``keys``."""
        with self.pool.lock:
            self.pool.tick()
            for key in keys:
                self.pool.use(self._entries[key][2])

    def forget(self, key: str) -> bool:
        """Drop an entry; False where there was none."""
        with self.pool.lock:
            if key not in self._entries:
                return False
            self.pool.drop(self._entries[key][2], "forgotten")
            self._gone.pop(key, None)
            return True

    def dropped(self, block: Block, reason: str) -> None:
        """The pool gives up the pages of ``block``."""
        key = block.key.decode()
        _, kv, _ = self._entries.pop(key)
        kv.close()
        self._gone[key] = None
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        self.forgotten(key)
