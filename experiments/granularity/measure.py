"""The arms: the pool's own bookkeeping at one granularity, with a clock around each part."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from experiments.granularity.workloads import Served
from kvsem.errors import KvsemError
from kvsem.eviction.lru import LRU
from kvsem.keys import chain_root, page_key, token_bytes
from kvsem.memory.pool import Block, BlockPool
from kvsem.memory.prefix import WIDTH, PrefixCache

ROOT_KEY = chain_root("granularity")
SEGMENT_PAGE = 16  # tokens a page of whole segments
PARTS = ("match", "acquire", "publish")
COUNTS = ("hit_tokens", "copied_tokens", "pages", "new_pages", "empty_slots")
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Passed:
    """What one request took: tokens found and copied, pages held, and seconds by `PARTS`."""

    hit_tokens: int
    copied_tokens: int  # of a page that the match ended in
    pages: int  # held for prompt and reply
    new_pages: int  # of these, not shared
    empty_slots: int  # token slots of the held pages that stayed empty
    seconds: tuple[float, float, float]


class Arm(Protocol):
    pool: BlockPool
    page_size: int

    def serve(self, request: Served) -> Passed: ...


class PageArm:
    """Prefix pages of one size. ``budget``: tokens of the pool, None: without limit."""

    def __init__(self, page_size: int, partial: bool, budget: int | None) -> None:
        self.page_size = page_size
        self.pool = BlockPool(None if budget is None else budget // page_size, LRU())
        self.cache = PrefixCache(self.pool, page_size, partial)

    def serve(self, request: Served) -> Passed:
        """The verbs of `kvsem.memory.memory.Memory` and the engine, in their order.

        The last prompt token is never looked up: it must be computed to have logits.
        """
        pool, cache, size = self.pool, self.cache, self.page_size
        prompt, n = request.ids[: request.n_prompt], len(request.ids)
        start = perf_counter()
        matched = cache.match(ROOT_KEY, prompt, len(prompt) - 1)
        found = perf_counter()
        pages = matched.pages
        pages += pool.acquire(matched.held, -(-len(prompt) // size) - len(pages))
        if matched.tail:
            pool.release(matched.tail.pages)
        cache.use(matched)
        pages += pool.allocate(-(-n // size) - len(pages))
        held = perf_counter()
        cache.publish(ROOT_KEY, request.ids, pages)
        pool.release(pages)
        seconds = (found - start, held - found, perf_counter() - held)
        n_shared = len(matched.blocks)
        copied = matched.n_tokens - n_shared * size
        empty = len(pages) * size - n
        return Passed(matched.n_tokens, copied, len(pages), len(pages) - n_shared, empty, seconds)


@dataclass
class SegmentArm:
    """Whole segments, each found by its tokens and all ahead of it, in pages of its own.

    A segment is one block of as many 16-token pages as it needs; it is matched, published and
    evicted as one.
    """

    budget: int | None
    page_size: int = SEGMENT_PAGE
    pool: BlockPool = field(init=False)
    blocks: dict[bytes, Block] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limit = None if self.budget is None else self.budget // self.page_size
        self.pool = BlockPool(limit, LRU())

    def serve(self, request: Served) -> Passed:
        pool, n_prompt = self.pool, request.n_prompt
        start = perf_counter()
        matched = self._match(request)
        found = perf_counter()
        shared = [page for block in matched for page in block.pages]
        own = self._pages_of(request, len(matched))
        reply = -(-(len(request.ids) - _start(request, -1)) // self.page_size)
        asked = -(-(n_prompt - _start(request, -1)) // self.page_size)  # the template's tail
        pages = pool.acquire(shared, sum(own) - reply + asked)
        pool.tick()
        for block in matched:
            pool.use(block)
        pages += pool.allocate(reply - asked)
        held = perf_counter()
        self._publish(request, matched, pages, own)
        pool.release(shared + pages)
        seconds = (found - start, held - found, perf_counter() - held)
        hit = sum(block.n_tokens for block in matched)
        n_pages = len(shared) + len(pages)
        empty = n_pages * self.page_size - len(request.ids)
        return Passed(hit, 0, n_pages, len(pages), empty, seconds)

    def dropped(self, block: Block, reason: str) -> None:
        """The pool gives up ``block``."""
        del self.blocks[block.key]

    def _pages_of(self, request: Served, n_found: int) -> list[int]:
        """Pages of each segment that was not found."""
        bounds = [0, *request.ends][n_found:]
        return [-(-(end - start) // self.page_size) for start, end in pairwise(bounds)]

    def _match(self, request: Served) -> list[Block]:
        raw, key, at = token_bytes(request.ids[: request.n_prompt]), ROOT_KEY, 0
        found: list[Block] = []
        for end in request.ends:
            if end >= request.n_prompt:
                break
            content = raw[WIDTH * at : WIDTH * end]
            ahead, key, at = key, page_key(key, content), end
            block = self.blocks.get(key)
            if block is None or block.content != content or block.ahead != ahead:
                break
            found.append(block)
        return found

    def _publish(
        self, request: Served, matched: Sequence[Block], pages: Sequence[int], own: Sequence[int]
    ) -> None:
        self.pool.tick()
        raw, taken = token_bytes(request.ids), 0
        parent = matched[-1] if matched else None
        for block in matched:
            self.pool.use(block, hit=False)
        for i, n_pages in enumerate(own, start=len(matched)):
            start, end = _start(request, i), request.ends[i]
            content = raw[WIDTH * start : WIDTH * end]
            ahead = parent.key if parent else ROOT_KEY
            mine = tuple(pages[taken : taken + n_pages])
            key, n = page_key(ahead, content), end - start
            if key in self.blocks:  # a whole prompt asked again: its last segment is not looked up
                break
            block = Block(key, content, mine, n, "", float(n), self, ahead, parent)
            self.pool.publish(block)
            self.blocks[key], parent = block, block
            taken += n_pages


def _start(request: Served, segment: int) -> int:
    return (0, *request.ends)[:-1][segment]


# Several arms on the same requests ------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """``counts [requests, arms, COUNTS]``, ``seconds [requests, arms, PARTS]`` (medians), and by
    arm what its pool held when all was over."""

    arms: tuple[str, ...]
    counts: Ints
    seconds: Floats
    ends: dict[str, dict[str, int]]


def measure(
    requests: Sequence[Served],
    arms: dict[str, Callable[[], Arm]],
    repetitions: int,
    done: Callable[[], object] = lambda: None,
) -> Measured:
    """Every request through every arm before the next; the arm that goes first rotates.

    Each repetition starts with empty pools. Raises `KvsemError` where counts differ between them.
    """
    shape = (repetitions, len(requests), len(arms))
    seconds = np.zeros((*shape, len(PARTS)))
    counts = np.zeros((*shape, len(COUNTS)), dtype=np.int64)
    ends: dict[str, dict[str, int]] = {}
    for repetition in range(repetitions):
        made = [make() for make in arms.values()]
        gc.collect()
        gc.disable()  # a collection would fall on whichever arm is at work
        try:
            for i, request in enumerate(requests):
                for step in range(len(made)):
                    arm = (i + repetition + step) % len(made)
                    passed = made[arm].serve(request)
                    seconds[repetition, i, arm] = passed.seconds
                    counts[repetition, i, arm] = [getattr(passed, name) for name in COUNTS]
                done()
        finally:
            gc.enable()
        ends = {name: _end(arm) for name, arm in zip(arms, made, strict=True)}
    if (counts != counts[:1]).any():
        raise KvsemError(
            "two repetitions found different tokens: the bookkeeping is not repeatable"
        )
    return Measured(tuple(arms), counts[0], np.median(seconds, axis=0), ends)


def _end(arm: Arm) -> dict[str, int]:
    pool = arm.pool
    pool.check()
    return {
        "held_slots": pool.n_owned * arm.page_size,
        "held_tokens": pool.n_cached_tokens,
        "blocks": pool.n_blocks,
        "evicted_blocks": pool.evictions["capacity"],
        "pool_slots": 0 if pool.limit is None else pool.limit * arm.page_size,
    }


def distinct(requests: Sequence[Served], page_size: int = 1) -> int:
    """Tokens of the requests that differ in themselves or in anything ahead of them.

    This is what a cache without repeats would hold, of whole pages of ``page_size`` only.
    """
    whole = (r.ids[: len(r.ids) // page_size * page_size] for r in requests)
    ordered = sorted(ids.astype(">i8").tobytes() for ids in whole)
    shared = sum(_common(a, b) for a, b in pairwise(ordered))
    return sum(map(len, ordered)) // WIDTH - shared


def _common(first: bytes, second: bytes) -> int:
    n = min(len(first), len(second))
    a, b = np.frombuffer(first[:n], ">i8"), np.frombuffer(second[:n], ">i8")
    differ = np.flatnonzero(a != b)
    return int(differ[0]) if len(differ) else len(a)
