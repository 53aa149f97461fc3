"""The block pool: which pages are free, active or cached, who holds them, and which go first.

Bookkeeping only, no tensors: it also runs in simulations. A page is *active* while somebody
holds a reference, *cached* when nobody does but a published block owns it, and *free* otherwise.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Protocol

from kvsem.errors import KvsemError, SettingError
from kvsem.eviction.base import Eviction

FIRST_GROWTH = 64  # pages that a pool without a limit starts with


class PoolFullError(KvsemError):
    """The pages asked for are not there, and nothing was changed."""


class Forgets(Protocol):
    def dropped(self, block: Block, reason: str) -> None:
        """``block`` is about to lose its pages: no lookup may find it any more."""
        ...


@dataclass(slots=True, eq=False)
class Block:
    """What is published and evicted as one: a prefix page, or all pages of a chunk entry.

    A block with children (pages that continue it) is never evicted before them.
    """

    key: bytes
    content: bytes  # the token ids, int64: compared on every hit
    pages: tuple[int, ...]
    n_tokens: int
    version: str  # namespace of the model (without tenant) that computed it
    cost: float
    cache: Forgets
    ahead: bytes = b""  # key of what it continues: its parent's, or the chain's root
    parent: Block | None = None
    nbytes: int = 1
    n_children: int = 0
    pins: int = 0  # its pages that are held, and its children that are pinned; 0: it could go
    hits: int = 0
    added: int = 0
    used: int = 0
    priority: float = 0.0
    ticket: int = 0  # of its place in the eviction queue; 0: not in it
    live: bool = False


class BlockPool:
    """``n_pages`` None: grows as needed and never evicts. All verbs are atomic and thread-safe."""

    def __init__(self, n_pages: int | None, eviction: Eviction, page_nbytes: int = 1) -> None:
        if n_pages is not None and (type(n_pages) is not int or n_pages < 1):
            raise SettingError("n_pages", n_pages, "a whole number from 1 up, or none")
        self.eviction, self.page_nbytes = eviction, page_nbytes
        self.limit = n_pages
        self.n_pages = n_pages or FIRST_GROWTH
        self.lock = RLock()
        self.clock = 0
        self.version = ""
        self.evictions: Counter[str] = Counter()
        self.n_active = self.n_cached = 0
        self.n_evictable = 0  # less than cached where what continues a page is held, not the page
        self.n_blocks = self.n_old_blocks = self.n_owned = self.n_cached_tokens = 0
        self._free = list(range(self.n_pages))  # a heap: lowest first keeps requests contiguous
        self._references = [0] * self.n_pages
        self._owners: list[Block | None] = [None] * self.n_pages
        self._queue: list[tuple[bool, float, int, Block]] = []
        self._tickets = 0
        self._floor = 0.0

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_available(self) -> int | None:
        """Pages that a request could get; None where there is no limit."""
        return None if self.limit is None else self.n_free + self.n_evictable

    def state(self, page: int) -> str:
        """``free``, ``active`` or ``cached``."""
        if self._references[page]:
            return "active"
        return "cached" if self._owners[page] else "free"

    def references(self, page: int) -> int:
        return self._references[page]

    def is_owned(self, page: int) -> bool:
        """Whether a published block holds it, active or not."""
        return self._owners[page] is not None

    def tick(self) -> int:
        """Advance the clock by which recency is judged."""
        with self.lock:
            self.clock += 1
            return self.clock

    # -- holding pages ----------------------------------------------------------------------

    def acquire(self, held: Sequence[int], n_new: int) -> list[int]:
        """One more reference to each page of ``held``, and ``n_new`` pages of one's own.

        Served from cached pages (``held``) first, then free ones, then by eviction. Raises
        `PoolFullError`, and changes nothing, where that is not enough; cached pages that are about
        to be held do not count as room.
        """
        with self.lock:
            idle = {page for page in held if not self._references[page]}
            if any(self._owners[page] is None for page in idle):
                raise KvsemError("a free page cannot be held")
            if n_new < 0:
                raise KvsemError(f"{n_new} pages cannot be asked for")
            if self.limit is not None and n_new > (room := self._room(held)):
                raise PoolFullError(
                    f"{n_new} pages asked for, {room} of the pool's {self.limit} can be had "
                    f"({self.n_active + len(idle)} are in use)"
                )
            for page in held:
                self._take(page)
            self._make_free(n_new)
            pages = [heapq.heappop(self._free) for _ in range(n_new)]
            for page in pages:
                self._references[page] = 1
            self.n_active += n_new
            return pages

    def allocate(self, n: int) -> list[int]:
        """``n`` pages with one reference each, lowest first; `PoolFullError` changes nothing."""
        return self.acquire((), n)

    def touch(self, pages: Sequence[int]) -> None:
        """One more reference to each of ``pages``, which must be active or cached."""
        self.acquire(pages, 0)

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each of ``pages``; raises, and changes nothing, below zero.

        A page that nobody holds any more stays cached where a block owns it, else is free.
        """
        with self.lock:
            for page, times in Counter(pages).items():
                if self._references[page] < times:
                    raise KvsemError(
                        f"page {page} released {times} times, held {self._references[page]} times"
                    )
            for page in pages:
                self._let_go(page)

    def _room(self, held: Sequence[int]) -> int:
        """Pages that could be had if ``held`` were held too."""
        pinned = set()
        for page in held:
            block = self._owners[page]
            while block and not block.pins and block not in pinned:
                pinned.add(block)
                block = block.parent
        return self.n_free + self.n_evictable - sum(len(block.pages) for block in pinned)

    def _take(self, page: int) -> None:
        if not self._references[page]:
            self.n_cached -= 1
            self.n_active += 1
            self._pin(self._owners[page])
        self._references[page] += 1

    def _let_go(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page]:
            return
        self.n_active -= 1
        owner = self._owners[page]
        if owner is None:
            heapq.heappush(self._free, page)
        else:
            self.n_cached += 1
            self._unpin(owner)

    def _pin(self, block: Block | None) -> None:
        """``block`` must stay, and so must everything that it continues."""
        while block:
            block.pins += 1
            if block.pins > 1:
                return
            block.ticket = 0
            self.n_evictable -= len(block.pages)
            block = block.parent

    def _unpin(self, block: Block | None) -> None:
        while block:
            block.pins -= 1
            if block.pins:
                return
            self.n_evictable += len(block.pages)
            self._enqueue(block)
            block = block.parent

    # -- what is cached ---------------------------------------------------------------------

    def publish(self, block: Block) -> None:
        """Make ``block`` the owner of its pages, which the caller holds and has filled."""
        with self.lock:
            if any(self._owners[p] or not self._references[p] for p in block.pages):
                raise KvsemError("only pages that are held and not yet owned can be published")
            for page in block.pages:
                self._owners[page] = block
            block.pins = len(block.pages)
            if block.parent:
                block.parent.n_children += 1
            if block.pins:
                self._pin(block.parent)
            block.nbytes = self.page_nbytes * len(block.pages)
            block.live, block.added = True, self.clock
            self.n_blocks += 1
            self.n_old_blocks += block.version != self.version
            self.n_owned += len(block.pages)
            self.n_cached_tokens += block.n_tokens
            self.use(block, hit=False)

    def use(self, block: Block, hit: bool = True) -> None:
        """``block`` is looked at now: its priority is set anew."""
        with self.lock:
            block.used = self.clock
            block.hits += hit
            block.priority = self.eviction.priority(block, self._floor)
            if block.ticket:
                self._enqueue(block)

    def drop(self, block: Block, reason: str) -> None:
        """Forget ``block``: its pages are free now, or as soon as nobody holds them."""
        with self.lock:
            if not block.live or block.n_children:
                raise KvsemError("only a live block that nothing continues can be dropped")
            block.cache.dropped(block, reason)
            block.live, block.ticket = False, 0
            for page in block.pages:
                self._owners[page] = None
                if not self._references[page]:
                    self.n_cached -= 1
                    heapq.heappush(self._free, page)
            if block.parent:
                block.parent.n_children -= 1
            if block.pins:
                self._unpin(block.parent)
            else:
                self.n_evictable -= len(block.pages)
                self._enqueue(block.parent)
            self.n_blocks -= 1
            self.n_old_blocks -= block.version != self.version
            self.n_owned -= len(block.pages)
            self.n_cached_tokens -= block.n_tokens
            self.evictions[reason] += 1

    def renew(self, version: str) -> None:
        """From now on blocks of any other version are the first to go."""
        with self.lock:
            if version != self.version:
                self.version = version
                blocks = {id(owner): owner for owner in self._owners if owner}.values()
                self.n_old_blocks = sum(block.version != version for block in blocks)
                waiting = [b for _, _, ticket, b in self._queue if b.ticket == ticket]
                self._queue.clear()
                for block in sorted(waiting, key=lambda block: block.ticket):
                    self._enqueue(block)

    def _enqueue(self, block: Block | None) -> None:
        """Line ``block`` up for eviction where nobody holds it and nothing continues it."""
        if block is None or block.n_children or block.pins:
            return
        self._tickets += 1
        block.ticket = self._tickets
        current = block.version == self.version
        heapq.heappush(self._queue, (current, block.priority, block.ticket, block))
        if len(self._queue) > FIRST_GROWTH + 4 * self.n_blocks:
            self._queue = [entry for entry in self._queue if entry[3].ticket == entry[2]]
            heapq.heapify(self._queue)

    def _make_free(self, n: int) -> None:
        while len(self._free) < n:
            if self.limit is None:
                self._grow()
                continue
            current, priority, ticket, block = heapq.heappop(self._queue)
            if block.ticket != ticket:
                continue  # used, held or continued since it was lined up
            if current:
                self._floor = max(self._floor, priority)
            self.drop(block, "capacity" if current else "old_version")

    def _grow(self) -> None:
        more = range(self.n_pages, 2 * self.n_pages)
        self._free += more  # larger than all there are: still a heap
        self._references += [0] * len(more)
        self._owners += [None] * len(more)
        self.n_pages *= 2

    # -- looking at it ----------------------------------------------------------------------

    def check(self) -> None:
        """Raise `KvsemError` where the books do not balance; O(pages), for tests and doctors."""
        with self.lock:
            states = Counter(self.state(page) for page in range(self.n_pages))
            counted = (len(self._free), self.n_active, self.n_cached)
            found = (states["free"], states["active"], states["cached"])
            if counted != found or sum(found) != self.n_pages:
                raise KvsemError(f"free, active, cached are {found}, counted {counted}")
            if {p for p in range(self.n_pages) if self.state(p) == "free"} != set(self._free):
                raise KvsemError("the free list and the pages disagree")
            owners = {id(o): o for o in self._owners if o}
            if sum(len(o.pages) for o in owners.values()) != sum(1 for o in self._owners if o):
                raise KvsemError("a page of a block has another owner")
            if any(o.parent and not o.parent.live for o in owners.values()):
                raise KvsemError("a block has lost its parent")
            pins = Counter(o for o in owners.values() for p in o.pages if self._references[p])
            pins.update(o.parent for o in owners.values() if o.parent and o.pins)
            if any(o.pins != pins[o] for o in owners.values()):
                raise KvsemError("a block is not pinned by what holds or continues it")
            idle = [o for o in owners.values() if not o.pins]
            if self.n_evictable != sum(len(o.pages) for o in idle):
                raise KvsemError("pages that could be evicted are not counted as such")
            if any(bool(o.ticket) == bool(o.n_children or o.pins) for o in owners.values()):
                raise KvsemError("the eviction queue and the blocks disagree")
