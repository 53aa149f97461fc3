"""Pool and prefix cache, step by step, against dictionaries (`tests.property.oracle`)."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsem.errors import KvsemError
from kvsem.eviction.base import Eviction
from kvsem.eviction.cost_aware import CostAware
from kvsem.eviction.fifo import FIFO
from kvsem.eviction.lru import LRU
from kvsem.keys import chain_root
from kvsem.memory.pool import Block, BlockPool, PoolFullError
from kvsem.memory.prefix import PrefixCache
from tests.property.oracle import Entry, Oracle, Tokens

POLICIES: dict[str, type[Eviction]] = {"lru": LRU, "fifo": FIFO, "cost_aware": CostAware}
PAGE_NBYTES = 3
STEPS, STEPS_A_POOL = 3_000, 250  # for each of 6 shapes: 18,000 steps a policy
SEED = 0 if os.environ.get("CI") else random.SystemRandom().randrange(1 << 32)


def cost(start: int, end: int) -> float:
    """Later tokens cost more, as attention does."""
    return float((end - start) * (7 + start))


@dataclass
class Flight:
    """A request between its look-up and its end."""

    root: str
    version: str
    ids: Tokens
    pages: list[int]
    tail: list[int]
    chunk: list[int]


@dataclass
class Chunks:
    """Entries of several pages beside the prefix pages."""

    blocks: dict[Entry, Block] = field(default_factory=dict)

    def dropped(self, block: Block, reason: str) -> None:
        self.blocks = {entry: b for entry, b in self.blocks.items() if b is not block}


class Both:
    """Does everything twice, with kvsem and with the oracle, and compares."""

    def __init__(self, policy: str, page_size: int, partial: bool, n_pages: int) -> None:
        self.pool = BlockPool(n_pages, POLICIES[policy](), PAGE_NBYTES)
        self.cache = PrefixCache(self.pool, page_size, partial)
        self.oracle = Oracle(n_pages, policy, page_size, partial, PAGE_NBYTES)
        self.chunks = Chunks()
        self.flights: list[Flight] = []
        self.held: list[list[int]] = []
        self.seen: list[Tokens] = [()]
        self.n_versions = 0
        self.done: Counter[str] = Counter()

    # -- comparing --------------------------------------------------------------------------

    def compare(self) -> None:
        pool, oracle = self.pool, self.oracle
        pages = range(pool.n_pages)
        states = [oracle.state(page) for page in pages]
        assert [pool.state(page) for page in pages] == states
        assert [pool.references(page) for page in pages] == list(oracle.references.values())
        counts = (pool.n_free, pool.n_active, pool.n_cached)
        assert counts == tuple(map(states.count, ("free", "active", "cached")))
        assert sum(counts) == pool.n_pages
        assert pool.n_available == oracle.room(())
        assert (pool.clock, pool.evictions) == (oracle.clock, oracle.evictions)
        assert len(self.cache) == sum(e.root is not None for e in oracle.entries)
        assert pool.n_blocks == len(oracle.entries)
        assert pool.n_owned == sum(len(e.pages) for e in oracle.entries)
        assert pool.n_cached_tokens == sum(e.n_tokens for e in oracle.entries)
        assert pool.n_old_blocks == sum(e.version != pool.version for e in oracle.entries)
        pool.check()

    def snapshot(self) -> object:
        """All that the pool and the cache know."""
        pool, cache = self.pool, self.cache
        blocks = {o for o in pool._owners if o}
        return (
            [sorted(pool._free), list(pool._references), list(pool._owners), sorted_queue(pool)],
            [pool.clock, pool.version, pool._floor, pool._tickets, pool.evictions.copy()],
            [pool.n_active, pool.n_cached, pool.n_evictable, pool.n_blocks, pool.n_old_blocks],
            {b: (b.n_children, b.pins, b.hits, b.used, b.priority, b.ticket) for b in blocks},
            dict(cache._blocks),
            {start: list(beside) for start, beside in cache._beside.items()},
            (list(cache._gone), cache._begun.copy(), dict(self.chunks.blocks)),
        )

    def refused(self, error: type[KvsemError], verb: object, *arguments: object) -> None:
        """It raises and changes nothing."""
        assert callable(verb)
        before = self.snapshot()
        with pytest.raises(error):
            verb(*arguments)
        assert self.snapshot() == before

    # -- what happens to a pool -------------------------------------------------------------

    def acquire(self, held: list[int], n_new: int) -> list[int] | None:
        expected = self.oracle.acquire(held, n_new)
        if expected is None:
            self.done["pool full"] += 1
            self.refused(PoolFullError, self.pool.acquire, held, n_new)
        else:
            assert self.pool.acquire(held, n_new) == expected
        return expected

    def release(self, pages: list[int]) -> None:
        self.pool.release(pages)
        self.oracle.release(pages)

    def prompt(self, r: random.Random) -> tuple[str, str, Tokens]:
        """Mostly a variation of what was asked before, mostly of the newest version."""
        base = r.choice(self.seen[-12:])
        cut = r.choice([len(base), len(base), r.randint(0, len(base))])
        size = self.oracle.page_size
        grown = r.choice([0, 1, 2, size, r.randint(0, 3 * size)])
        ids = base[:cut] + tuple(r.randint(0, 2) for _ in range(grown))
        self.seen.append(ids if len(ids) < 9 * size else ())
        version = f"v{self.n_versions - (r.random() < 0.15)}"
        return f"{r.choice('aab')}/{version}", version, ids

    def match(self, r: random.Random) -> tuple[Flight, list[Entry]]:
        root, version, ids = self.prompt(r)
        limit = r.choice([None, max(0, len(ids) - 1), r.randint(0, len(ids))])
        matched = self.cache.match(chain_root(root), np.array(ids, dtype=np.int64), limit)
        whole, n = self.oracle.match(root, ids, limit)
        assert matched.n_tokens == n <= (len(ids) if limit is None else limit)
        assert matched.pages == [e.pages[0] for e in whole]
        assert bool(matched.reason) == (n < len(ids if limit is None else ids[:limit]))
        found, tail = list(whole), matched.held[len(whole) :]
        assert bool(tail) == (n > len(whole) * self.oracle.page_size)
        for page in tail:  # any page will do that goes along so far
            entry = self.oracle.owner(page)
            assert entry
            assert (entry.root, entry.start) == (root, len(whole) * self.oracle.page_size)
            assert entry.path[:n] == ids[:n]
            found.append(entry)
        if r.random() < 0.9:
            self.cache.use(matched)
            self.oracle.use(found)
        self.done["hits"] += n > 0
        return Flight(root, version, ids, matched.pages, tail, []), found

    def begin(self, r: random.Random) -> None:
        flight, _ = self.match(r)
        n_own = -(-len(flight.ids) // self.oracle.page_size) - len(flight.pages)
        n_chunk = r.choice([0, 0, 1, 3])
        own = self.acquire(flight.pages + flight.tail, n_own + n_chunk)
        if own is not None:
            flight.pages += own[:n_own]
            flight.chunk = own[n_own:]
            self.flights.append(flight)

    def copied(self, r: random.Random) -> None:
        """The tail is copied, and need not be held any more."""
        if self.flights:
            flight = r.choice(self.flights)
            self.release(flight.tail)
            flight.tail = []

    def publish(self, r: random.Random, flight: Flight, n: int) -> None:
        pages = flight.pages[: -(-n // self.oracle.page_size)]
        ids = flight.ids[:n]
        new = self.cache.publish(
            chain_root(flight.root), np.array(ids, dtype=np.int64), pages, flight.version, cost
        )
        assert new == self.oracle.publish(flight.root, ids, pages, flight.version, cost)
        self.done["published"] += new
        self.done["known"] += n > 0 and not new

    def publish_whole_pages(self, r: random.Random) -> None:
        """Before the request is done, whose pages stay held."""
        if self.flights:
            flight = r.choice(self.flights)
            size = self.oracle.page_size
            self.publish(r, flight, r.randint(0, len(flight.ids) // size) * size)

    def publish_chunk(self, r: random.Random, flight: Flight) -> None:
        n = len(flight.chunk) * self.oracle.page_size
        worth = float(r.randint(1, 60))
        pages, version = tuple(flight.chunk), flight.version
        if r.random() < 0.5:
            self.pool.tick()
            self.oracle.clock += 1
        block = Block(b"", b"", pages, n, version, worth, self.chunks)
        self.pool.publish(block)
        entry = Entry(None, (0,) * n, 0, pages, version, worth)
        self.oracle.add(entry)
        self.chunks.blocks[entry] = block

    def finish(self, r: random.Random) -> None:
        if not self.flights:
            return
        flight = self.flights.pop(r.randrange(len(self.flights)))
        self.publish(r, flight, len(flight.ids))
        if flight.chunk and r.random() < 0.8:
            self.publish_chunk(r, flight)
        self.release(r.sample(pages := flight.pages + flight.tail + flight.chunk, len(pages)))

    def cancel(self, r: random.Random) -> None:
        if self.flights:
            flight = self.flights.pop(r.randrange(len(self.flights)))
            self.release(flight.pages + flight.tail + flight.chunk)
            self.done["cancelled"] += 1

    def hold_chunk(self, r: random.Random) -> None:
        """All of a chunk's pages, or some of them."""
        if self.chunks.blocks:
            entry, block = r.choice(list(self.chunks.blocks.items()))
            if r.random() < 0.7:
                self.pool.tick()
                self.pool.use(block)
                self.oracle.use([entry])
            pages = r.sample(entry.pages, r.randint(1, len(entry.pages)))
            self.pool.touch(pages)
            self.oracle.acquire(pages, 0)
            self.held.append(pages)

    def hold_page(self, r: random.Random) -> None:
        """Any page that is cached or active, alone; or some new ones."""
        known = [page for page, n in self.oracle.references.items() if n or self.oracle.owner(page)]
        held = r.sample(known, min(len(known), r.randint(0, 2)))
        held *= r.choice([1, 1, 2])
        own = self.acquire(held, r.choice([0, 0, 1, 4]))
        if own is not None:
            self.held.append(held + own)

    def let_go(self, r: random.Random) -> None:
        if self.held:
            self.release(self.held.pop(r.randrange(len(self.held))))

    def drop(self, r: random.Random) -> None:
        entries = self.oracle.entries
        leaves = [e for e in entries if not self.oracle.children(e)]
        if leaves:
            entry = r.choice(leaves)
            block = self.pool._owners[entry.pages[0]]
            assert block
            self.pool.drop(block, "forgotten")
            self.oracle.drop(entry, "forgotten")

    def renew(self, r: random.Random) -> None:
        self.n_versions += 1
        self.pool.renew(f"v{self.n_versions}")
        self.oracle.version = f"v{self.n_versions}"

    def clear(self, r: random.Random) -> None:
        self.cache.clear()
        self.oracle.clear()

    def misuse(self, r: random.Random) -> None:
        """What raises changes nothing."""
        page = r.randrange(self.pool.n_pages)
        others = [p for p, n in self.oracle.references.items() if n]
        times = self.oracle.references[page] + 1
        self.refused(KvsemError, self.pool.release, [*others, *[page] * times])
        if self.oracle.state(page) == "free":
            self.refused(KvsemError, self.pool.touch, [*others, page])
        block = Block(b"", b"", (page,), 1, "", 1.0, self.chunks)
        if self.oracle.state(page) != "active" or self.oracle.owner(page):
            self.refused(KvsemError, self.pool.publish, block)
        self.refused(KvsemError, self.pool.drop, block, "forgotten")
        owner = self.oracle.owner(page)
        if owner and self.oracle.children(owner):
            self.refused(KvsemError, self.pool.drop, self.pool._owners[page], "forgotten")

    def look_up(self, r: random.Random) -> None:
        self.match(r)


def sorted_queue(pool: BlockPool) -> list[tuple[bool, float, int, Block]]:
    return sorted(pool._queue, key=lambda waiting: waiting[:3])


WEIGHTS = {
    Both.begin: 30,
    Both.finish: 18,
    Both.look_up: 8,
    Both.copied: 6,
    Both.publish_whole_pages: 8,
    Both.cancel: 6,
    Both.hold_chunk: 6,
    Both.hold_page: 6,
    Both.let_go: 10,
    Both.drop: 3,
    Both.misuse: 5,
    Both.renew: 0.5,
    Both.clear: 0.3,
}


def run(policy: str, page_size: int, partial: bool, seed: int) -> Counter[str]:
    r = random.Random(f"{seed} {policy} {page_size} {partial}")
    done: Counter[str] = Counter()
    for step in range(STEPS):
        if step % STEPS_A_POOL == 0:
            both = Both(policy, page_size, partial, r.randint(8, 40))
        verb = r.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        try:
            verb(both, r)
            both.compare()
        except BaseException as error:
            error.add_note(f"seed {seed}, step {step}: {verb.__name__}")
            raise
        if (step + 1) % STEPS_A_POOL == 0:
            done += both.done + both.pool.evictions
    return done


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_is_the_oracles(policy: str, page_size: int, partial: bool) -> None:
    """C1, C2, C6, C7, C8, C10, C11, C12, C14 in any order."""
    done = run(policy, page_size, partial, SEED)
    likely = {"pool full", "hits", "published", "known", "cancelled", "forgotten"}
    likely |= {"capacity", "old_version"} | ({"superseded"} if partial and page_size > 1 else set())
    never = likely - set(done)
    assert not never, f"seed {SEED}: not tried: {never}, only {done}"


class PoolMachine(RuleBasedStateMachine):
    """The same verbs, for hypothesis to find a short way to a difference."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        page_size=st.sampled_from([1, 3, 4]),
        partial=st.booleans(),
        n_pages=st.integers(4, 16),
    )
    def start(self, policy: str, page_size: int, partial: bool, n_pages: int) -> None:
        self.both = Both(policy, page_size, partial, n_pages)

    @rule(
        verb=st.sampled_from(sorted(WEIGHTS, key=lambda verb: verb.__name__)),
        r=st.randoms(use_true_random=False),
    )
    def step(self, verb: object, r: random.Random) -> None:
        assert callable(verb)
        verb(self.both, r)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "both"):
            self.both.compare()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
