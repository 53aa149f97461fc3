"""One budget for all KV: pool, pages, exact prefix and stored chunks of one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from kvsem.errors import KvsemError, SettingError, check_count
from kvsem.eviction.base import Eviction
from kvsem.eviction.lru import LRU
from kvsem.lm import LM
from kvsem.memory.pages import PagedKV, Pages
from kvsem.memory.pool import BlockPool, PoolFullError
from kvsem.memory.prefix import MAX_PAGE_SIZE, Matched, PrefixCache
from kvsem.memory.store import ChunkStore


@dataclass(frozen=True)
class MemorySettings:
    """``page_size``: tokens a page. ``pool_tokens``: the whole budget, None: it grows and nothing
    is evicted. ``partial``: prefix may match inside a page. ``salt``: of tenants' namespaces.
    """

    page_size: int = 16
    pool_tokens: int | None = None
    eviction: Eviction = field(default_factory=LRU)
    partial: bool = True
    salt: str = ""

    def __post_init__(self) -> None:
        size, budget = self.page_size, self.pool_tokens
        check_count("memory.page_size", size, 1, MAX_PAGE_SIZE)
        if budget is not None and (type(budget) is not int or budget < size):
            raise SettingError(
                "memory.pool_tokens",
                budget,
                f"null, or a whole number from the page size {size} up",
            )
        if type(self.partial) is not bool:
            raise SettingError("memory.partial", self.partial, "true or false")

    @property
    def n_pages(self) -> int | None:
        return None if self.pool_tokens is None else self.pool_tokens // self.page_size


class Memory:
    """What an engine remembers, and the pages that its requests in flight hold."""

    def __init__(
        self,
        lm: LM,
        settings: MemorySettings | None = None,
        forgotten: Callable[[str], None] = lambda key: None,
    ) -> None:
        self.settings = settings = settings or MemorySettings()
        size = settings.page_size
        self.pages = Pages(lm.shapes, size, settings.n_pages or 0, lm.dtype, lm.device)
        page_nbytes = size * self.pages.token_nbytes
        self.pool = BlockPool(settings.n_pages, settings.eviction, page_nbytes)
        self.prefix = PrefixCache(self.pool, size, settings.partial)
        self.chunks = ChunkStore(self.pool, self.pages, forgotten)
        self.n_not_finite = 0
        self._open: dict[int, PagedKV] = {}

    # -- requests in flight -------------------------------------------------------------------

    def open(self, matched: Matched, n_tokens: int, entries: Sequence[str] = ()) -> PagedKV:
        """Pages for a prompt of ``n_tokens`` behind ``matched``, all held until `close`.

        Matched pages are shared; where the match ends inside a page, that page is copied.
        ``entries`` stay in the pool until `settle`. Raises, and changes nothing, where there is no
        room (`PoolFullError`), or where something of it was evicted since it was looked up.
        """
        n_shared = len(matched.blocks) * self.settings.page_size
        own = self._n_pages(n_tokens) - len(matched.blocks)
        with self.pool.lock:
            gone = any(key not in self.chunks for key in entries)
            if gone or not all(b.live for b in (*matched.blocks, *filter(None, [matched.tail]))):
                raise KvsemError("what was planned has been evicted meanwhile: plan again")
            entry_pages = self.chunks.pages_of(entries)
            held = [*matched.held, *entry_pages]
            pages = self.pool.acquire(held, own)
            try:
                self.pages.grow(self.pool.n_pages)
                kv = PagedKV(self.pages, [*matched.pages, *pages], matched.n_tokens, n_shared)
                if matched.tail:
                    self.pages.copy(matched.tail.pages[0], pages[0], matched.n_tokens - n_shared)
            except BaseException:
                self.pool.release([*held, *pages])
                raise
            if matched.tail:
                self.pool.release(matched.tail.pages)
            kv.borrowed = entry_pages
            self._open[id(kv)] = kv
            return kv

    def more(self, kv: PagedKV, n_tokens: int) -> None:
        """Room for ``n_tokens`` in all; raises `PoolFullError`, and changes nothing, else."""
        missing = self._n_pages(n_tokens) - len(kv.pages)
        if missing > 0:
            with self.pool.lock:
                pages = self.pool.allocate(missing)
                try:
                    self.pages.grow(self.pool.n_pages)
                except BaseException:
                    self.pool.release(pages)
                    raise
                kv.append(pages)

    def settle(self, kv: PagedKV) -> None:
        """The entries that ``kv`` was put together from have been read."""
        self.pool.release(kv.borrowed)
        kv.borrowed = []

    def close(self, kv: PagedKV) -> None:
        """Give back every reference that ``kv`` holds; raises where that was done before."""
        with self.pool.lock:
            pages = kv.close()
            del self._open[id(kv)]
            self.pool.release([*pages, *kv.borrowed])

    def check_room(self, n_tokens: int, what: str) -> None:
        """Raise `PoolFullError` where ``n_tokens`` would not fit even an empty pool."""
        limit = self.pool.limit
        if limit is not None and self._n_pages(n_tokens) > limit:
            raise PoolFullError(
                f"{what} needs {n_tokens} tokens of KV, memory.pool_tokens is "
                f"{self.settings.pool_tokens}"
            )

    def _n_pages(self, n_tokens: int) -> int:
        return -(-n_tokens // self.settings.page_size)

    # -- looking at it ------------------------------------------------------------------------

    def view(self) -> Memory:
        """The same pool, and what it holds, with requests in flight of its own."""
        other = copy(self)
        other._open = {}
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of all pages in use, full or not; of other views only what they published."""
        return (self.pool.n_owned + self._n_unowned()) * self.pool.page_nbytes

    def _n_unowned(self) -> int:
        return sum(not self.pool.is_owned(page) for page in self._held())

    def _held(self) -> set[int]:
        return {page for kv in self._open.values() for page in (*kv.pages, *kv.borrowed)}

    def gauges(self) -> dict[str, float]:
        """Pages by state, and how full they are.

        ``utilisation``: tokens held ÷ token slots of the pages in use; ``pool_utilisation``: ÷
        all slots of the pool (of what it has grown to where it has no limit).
        """
        with self.pool.lock:
            pool, size = self.pool, self.settings.page_size
            active = len(self._held())
            used = pool.n_owned + self._n_unowned()
            own = sum(max(0, kv.length - kv.n_shared) for kv in self._open.values())
            tokens = pool.n_cached_tokens + own
            return {
                "pages_free": pool.n_pages - used,
                "pages_active": active,
                "pages_cached": used - active,
                "utilisation": tokens / (used * size) if used else 0.0,
                "pool_utilisation": tokens / (pool.n_pages * size),
            }

    @property
    def evictions(self) -> Counter[str]:
        """Blocks that are gone, by reason: capacity, old_version, superseded, forgotten."""
        return self.pool.evictions.copy()


def exact_tokens(approximate: np.ndarray, length: int) -> int:
    """How many of the first ``length`` tokens have nothing ``approximate`` (bool) up to them."""
    wrong = np.flatnonzero(approximate)
    return min(length, int(wrong[0])) if len(wrong) else length
