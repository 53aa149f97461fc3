"""Exact prefix pages: which cached pages continue a prompt, by chained content hashes.

A page is found by the hash of its tokens and of every page ahead of it, as in vLLM's automatic
prefix caching, and its token ids are compared on every hit. With ``partial`` a match may also end
inside a page, as in SGLang's radix tree; the page is then copied before anything is written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvsem.errors import check_count
from kvsem.keys import page_key, token_bytes
from kvsem.memory.pool import Block, BlockPool

MAX_PAGE_SIZE = 256
REMEMBERED = 1 << 16  # evicted keys whose absence can be explained
WIDTH = 8  # bytes of a token id

CostOf = Callable[[int, int], float]


@dataclass(frozen=True)
class Matched:
    """The longest cached prefix of a prompt: whole pages, then ``n_tokens`` may end in ``tail``.

    ``reason`` says why no more was found: ``unknown`` (nothing begins like this), ``diverged``,
    ``evicted``, ``old_version``, ``below_page_size`` (what is left does not fill a page),
    ``collision``; empty where all was found that may be.
    """

    blocks: tuple[Block, ...] = ()
    n_tokens: int = 0
    tail: Block | None = None
    reason: str = ""

    @property
    def pages(self) -> list[int]:
        """The whole pages, which are shared."""
        return [block.pages[0] for block in self.blocks]

    @property
    def held(self) -> list[int]:
        """All pages that must not go while the prompt is put together."""
        return self.pages + ([self.tail.pages[0]] if self.tail else [])


@dataclass
class PrefixCache:
    """Chain hash → page of ``page_size`` tokens; ``root`` is the namespace's chain root."""

    pool: BlockPool
    page_size: int = 16
    partial: bool = True
    n_collisions: int = 0
    _blocks: dict[bytes, Block] = field(default_factory=dict)
    _beside: dict[bytes, list[Block]] = field(default_factory=dict)  # same page ahead, sorted
    _begun: Counter[bytes] = field(default_factory=Counter)  # first pages of each root
    _gone: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        check_count("memory.page_size", self.page_size, 1, MAX_PAGE_SIZE)

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, root: bytes, ids: np.ndarray, limit: int | None = None) -> Matched:
        """The longest cached prefix of ``ids``, of at most ``limit`` tokens; changes nothing."""
        with self.pool.lock:
            raw = token_bytes(ids)[: WIDTH * (len(ids) if limit is None else limit)]
            step, at, key = WIDTH * self.page_size, 0, root
            blocks: list[Block] = []
            reason = ""
            while at + step <= len(raw):
                content = raw[at : at + step]
                ahead, key = key, page_key(key, content)
                block = self._blocks.get(key)
                if block is None or not _same(block, content, ahead, blocks[-1:]):
                    reason = self._why(root, key, block, blocks)
                    break
                blocks.append(block)
                at += step
            tail, n = self._tail(blocks[-1].key if blocks else root, blocks, raw[at:])
            found = at // WIDTH + n
            if found == len(raw) // WIDTH:
                reason = ""
            elif not reason and not self.partial:
                reason = "below_page_size"
            else:
                reason = reason or self._why(root, page_key(key, raw[at:]), None, blocks)
                reason = "diverged" if n and reason == "unknown" else reason
            return Matched(tuple(blocks), found, tail, reason)

    def use(self, matched: Matched) -> None:
        """Count a hit on every page of ``matched``."""
        with self.pool.lock:
            self.pool.tick()
            for block in (*matched.blocks, *((matched.tail,) if matched.tail else ())):
                self.pool.use(block)

    def publish(
        self,
        root: bytes,
        ids: np.ndarray,
        pages: Sequence[int],
        version: str = "",
        cost: CostOf = lambda start, end: float(end - start),
    ) -> int:
        """Make the KV of ``ids``, exact and whole in ``pages``, findable; returns new pages.

        Page i holds tokens i x page_size on; the caller holds it and releases it afterwards. What
        is cached already stays the canonical page, and the caller's copy becomes free then.
        ``cost(start, end)``: multiplications that computing these tokens takes.
        """
        with self.pool.lock:
            self.pool.tick()
            raw, step, key = token_bytes(ids), WIDTH * self.page_size, root
            parent: Block | None = None
            n_new = 0
            for i, start in enumerate(range(0, len(raw), step)):
                content = raw[start : start + step]
                if len(content) < step and not self._wanted(key, content):
                    break
                ahead, key = key, page_key(key, content)
                block = self._blocks.get(key)
                if block is None:
                    first = start // WIDTH
                    block = Block(
                        key,
                        content,
                        (pages[i],),
                        len(content) // WIDTH,
                        version,
                        cost(first, first + len(content) // WIDTH),
                        self,
                        ahead,
                        parent,
                    )
                    self._add(block)
                    n_new += 1
                elif not _same(block, content, ahead, [parent] if parent else []):
                    self.n_collisions += 1
                    break
                else:
                    self.pool.use(block, hit=False)
                parent = block
            return n_new

    def dropped(self, block: Block, reason: str) -> None:
        """The pool gives up ``block``."""
        del self._blocks[block.key]
        self._gone[block.key] = None
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        if block.parent is None:
            self._begun[block.ahead] -= 1
            if not self._begun[block.ahead]:
                del self._begun[block.ahead]
        if self.partial:
            beside = self._beside[block.ahead]
            del beside[_place(beside, block.content)]
            if not beside:
                del self._beside[block.ahead]

    def clear(self) -> None:
        """Forget every page, ends of chains first; held ones become free when they are let go."""
        with self.pool.lock:
            while self._blocks:
                for block in [b for b in self._blocks.values() if not b.n_children]:
                    self.pool.drop(block, "forgotten")
            self._gone.clear()

    # -- inside -----------------------------------------------------------------------------

    def _add(self, block: Block) -> None:
        """Publish ``block``; a shorter page that it repeats is not needed any more."""
        self.pool.publish(block)
        self._blocks[block.key] = block
        self._gone.pop(block.key, None)
        if block.parent is None:
            self._begun[block.ahead] += 1
        if self.partial:
            beside = self._beside.setdefault(block.ahead, [])
            at = _place(beside, block.content)
            beside.insert(at, block)
            # none of them repeats another, so that only the one ahead can be what this one repeats
            other = beside[at - 1] if at else None
            if other and block.content.startswith(other.content):
                self.pool.drop(other, "superseded")

    def _wanted(self, key: bytes, content: bytes) -> bool:
        """Whether a page that is not full adds anything."""
        beside = self._beside.get(key, [])
        at = _place(beside, content)
        covered = at < len(beside) and beside[at].content.startswith(content)
        return self.partial and not covered

    def _why(self, root: bytes, key: bytes, block: Block | None, blocks: Sequence[Block]) -> str:
        if block is not None:
            self.n_collisions += 1
            return "collision"
        if key in self._gone:
            return "evicted"
        if blocks:
            return "diverged"
        return "old_version" if self.pool.n_old_blocks and not self._begun[root] else "unknown"

    def _tail(self, key: bytes, blocks: Sequence[Block], rest: bytes) -> tuple[Block | None, int]:
        """The page that begins like ``rest``, and for how many tokens: of pages in order of their
        content, it is one of the two that ``rest`` would stand between."""
        beside = self._beside.get(key, [])
        at = _place(beside, rest)
        best: tuple[Block | None, int] = (None, 0)
        for block in beside[max(0, at - 1) : at + 1]:
            n = _common(block.content, rest)
            if n > best[1] and block.parent is (blocks[-1] if blocks else None):
                best = (block, n)
        return best


def _same(block: Block, content: bytes, ahead: bytes, parent: Sequence[Block]) -> bool:
    """Hashes are evidence: the tokens, and what they continue, decide."""
    same = block.content == content and block.ahead == ahead
    return same and block.parent is (parent[0] if parent else None)


def _place(beside: Sequence[Block], content: bytes) -> int:
    """Where ``content`` is, or would be, among pages sorted by theirs."""
    return bisect_left(beside, content, key=lambda block: block.content)


def _common(a: bytes, b: bytes) -> int:
    """How many leading tokens agree."""
    n = min(len(a), len(b))
    here, there = (np.frombuffer(x[:n], dtype="<i8") for x in (a, b))
    differ = np.flatnonzero(here != there)
    return int(differ[0]) if len(differ) else n // WIDTH
