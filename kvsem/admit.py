"""How KV gets into the memory: chunk entries, and prefix pages of what is exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsem.forward import KVBuffer
from kvsem.keys import chain_root
from kvsem.lm import LM
from kvsem.memory.memory import Memory
from kvsem.memory.pages import PagedKV
from kvsem.memory.pool import PoolFullError
from kvsem.memory.prefix import Matched
from kvsem.memory.store import entry_of
from kvsem.memory.vectors import ChunkVectors
from kvsem.types import Chunk


@dataclass(frozen=True)
class Admission:
    """Admits what ``reuse`` could find again; the memory decides what has to go for it."""

    lm: LM
    memory: Memory
    vectors: ChunkVectors
    reuse: frozenset[str]

    @property
    def keeps_chunks(self) -> bool:
        """Whether chunks are stored at all: exact prefix alone needs none."""
        return not self.reuse <= {"prefix"}

    @property
    def keeps_prefix(self) -> bool:
        """Whether prefix pages are published: not where resuming behind them is not exact."""
        return "prefix" in self.reuse and self.lm.support.get("exact_prefix", (False, ""))[0]

    def match(self, namespace: str, ids: np.ndarray) -> Matched:
        """The cached prefix of ``ids``."""
        if not self.keeps_prefix:
            return Matched()
        return self.memory.prefix.match(chain_root(namespace), ids)

    def keep(
        self,
        chunks: Sequence[Chunk],
        kv: KVBuffer | PagedKV,
        ids: np.ndarray,
        namespace: str,
        context: str,
        depth: int = 0,
    ) -> None:
        """Store chunks that are not there yet; findable by meaning once their bytes are whole.

        The head of a prompt is stored only where it is not kept as prefix pages.
        """
        if not self.keeps_chunks:
            return
        wanted = [c for c in chunks if c.kind != "system" or "prefix" not in self.reuse]
        new = [chunk for chunk in wanted if chunk.key not in self.memory.chunks]
        for chunk in new:
            where = "start" if chunk.kind == "system" else context
            entry = entry_of(chunk, kv, ids, namespace, where, depth)
            cost = self.lm.cost_of(chunk.start, chunk.end)
            self.memory.chunks.put(entry, self.memory.pool.version, cost)
        passages = [c for c in new if c.kind != "system" and c.key in self.memory.chunks]
        self.vectors.add(namespace, {c.key: c.text for c in passages})

    def remember(self, kv: PagedKV, ids: np.ndarray, namespace: str) -> None:
        """Publish the prefix pages of ``ids``, which are exact; refused where not finite."""
        if not self.keeps_prefix:
            return
        if not kv.is_finite(min(kv.n_shared, len(ids)), len(ids)):
            self.memory.n_not_finite += 1
            return
        version = self.memory.pool.version
        root = chain_root(namespace)
        self.memory.prefix.publish(root, ids, kv.pages, version, self.lm.cost_of)

    def publish(self, kv: KVBuffer, ids: np.ndarray, namespace: str) -> None:
        """Copy the first tokens of ``kv``, which are exact, to prefix pages if there is room."""
        n = len(ids)
        matched = self.match(namespace, ids)
        if not self.keeps_prefix or matched.n_tokens == n:
            return
        try:
            pages = self.memory.open(matched, n)
        except PoolFullError:
            return
        try:
            for layer in range(self.lm.n_layers):
                keys, values = kv.read(layer, n)
                own = slice(pages.n_shared, n)
                pages.write(layer, own, keys[:, :, own], values[:, :, own])
            pages.length = n
            self.remember(pages, ids, namespace)
        finally:
            self.memory.close(pages)
