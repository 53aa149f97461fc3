"""The pool by itself: references, room, order of eviction. `tests/property` does it at random."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvsem.errors import KvsemError, SettingError
from kvsem.eviction.base import Eviction
from kvsem.eviction.cost_aware import CostAware
from kvsem.eviction.fifo import FIFO
from kvsem.eviction.lru import LRU
from kvsem.forward import LayerShape
from kvsem.memory.pages import PagedKV, Pages
from kvsem.memory.pool import FIRST_GROWTH, Block, BlockPool, PoolFullError


class Dropped(list[str]):
    """Names of the blocks that the pool gave up."""

    def dropped(self, block: Block, reason: str) -> None:
        self.append(block.key.decode())


class Shelf:
    """A pool in which every block is published and let go at once."""

    def __init__(self, n_pages: int | None, eviction: Eviction | None = None, **more: int) -> None:
        self.pool = BlockPool(n_pages, eviction or LRU(), **more)
        self.gone = Dropped()
        self.blocks: dict[str, Block] = {}

    def put(
        self,
        name: str,
        n_pages: int = 1,
        cost: float = 1.0,
        parent: str | None = None,
        version: str = "",
    ) -> Block:
        pages = tuple(self.pool.allocate(n_pages))
        above = self.blocks[parent] if parent else None
        block = Block(name.encode(), b"", pages, n_pages, version, cost, self.gone, parent=above)
        self.blocks[name] = block
        self.pool.tick()
        self.pool.publish(block)
        self.pool.release(pages)
        self.pool.check()
        return block

    def hit(self, name: str) -> None:
        self.pool.tick()
        self.pool.use(self.blocks[name])


def books(pool: BlockPool) -> tuple[Any, ...]:
    pool.check()
    pages = range(pool.n_pages)
    return (
        [(pool.state(p), pool.references(p)) for p in pages],
        (pool.n_free, pool.n_active, pool.n_cached, pool.n_available, pool.clock),
        pool.evictions.copy(),
    )


# References -----------------------------------------------------------------------------------


def test_c1_a_page_twice_in_one_release() -> None:
    pool = BlockPool(4, LRU())
    (page,) = pool.allocate(1)
    before = books(pool)
    with pytest.raises(KvsemError, match="released 2 times, held 1 times"):
        pool.release([page, page])
    assert books(pool) == before
    pool.touch([page])
    pool.release([page, page])
    assert (pool.state(page), pool.n_free) == ("free", 4)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]  # each page once
    pool.check()


def test_c1_nothing_of_a_release_that_raises_is_done() -> None:
    pool = BlockPool(4, LRU())
    held = pool.allocate(3)
    pool.release(held[2:])
    before = books(pool)
    with pytest.raises(KvsemError):
        pool.release(held)
    assert books(pool) == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_c2_two_sequences_share_pages(order: tuple[int, int]) -> None:
    """They fork behind a common start; one slides on and lets its first page go early."""
    pool = BlockPool(6, LRU())
    shared = pool.allocate(2)
    pool.touch(shared)
    tables = [shared + pool.allocate(1), shared + pool.allocate(1)]
    pool.release(tables[0][:1])  # the window of the first has moved past it
    tables[0] = tables[0][1:]
    for i in order:
        assert all(pool.state(page) == "active" for page in tables[i])
        pool.release(tables[i])
        pool.check()
    assert (pool.n_free, pool.n_active) == (6, 0)


def test_c4_a_double_release_raises() -> None:
    pool = BlockPool(4, LRU())
    pages = pool.allocate(2)
    pool.release(pages)
    before = books(pool)
    with pytest.raises(KvsemError, match="page 0 released 1 times, held 0 times"):
        pool.release(pages)
    assert books(pool) == before


def test_c6_an_abandoned_request_leaves_no_reference() -> None:
    shelf = Shelf(4)
    block = shelf.put("a", 2)
    with pytest.raises(RuntimeError, match="cancelled"):
        abandon(shelf.pool, list(block.pages))
    assert (shelf.pool.n_active, shelf.pool.n_cached, shelf.pool.n_free) == (0, 2, 2)


def abandon(pool: BlockPool, hits: list[int]) -> None:
    own = pool.acquire(hits, 1)
    try:
        raise RuntimeError("cancelled")
    finally:
        pool.release(hits + own)


def test_c5_what_a_reader_holds_is_never_given_to_a_writer() -> None:
    shapes = [LayerShape(2, 2, 4, 4, None)]
    pages = Pages(shapes, 2, 6, torch.float32, torch.device("cpu"))
    shelf = Shelf(6)
    block = shelf.put("read", 2)
    shelf.pool.touch(block.pages)
    seen = PagedKV(pages, block.pages, length=4)
    fill(pages, block.pages, 7.0)
    digests: set[str] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            digests.add(digest(seen))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for i in range(300):
            written = shelf.put(f"b{i}", 1 + i % 3)
            fill(pages, written.pages, float(i))
    finally:
        done.set()
        reader.join()
    assert digests | {digest(seen)} == {digest(PagedKV(pages, block.pages, length=4))}
    assert len(digests) == 1
    assert seen.read(0, 4)[0].eq(7.0).all()
    assert shelf.pool.evictions["capacity"] > 200
    assert "read" not in shelf.gone
    shelf.pool.release(block.pages)
    for i in range(6):
        shelf.put(f"later{i}")
    assert "read" in shelf.gone  # nothing but the reference kept it


def fill(pages: Pages, which: tuple[int, ...], value: float) -> None:
    kv = PagedKV(pages, which)
    rows = torch.full((1, 2, kv.capacity, 4), value)
    kv.write(0, slice(0, kv.capacity), rows, rows)


def digest(kv: PagedKV) -> str:
    keys, values = kv.read(0, kv.length)
    return hashlib.sha256(torch.stack([keys, values]).numpy().tobytes()).hexdigest()


def test_threads_at_once_leave_the_books_balanced() -> None:
    shelf = Shelf(16)
    errors: list[Exception] = []

    def work(name: str) -> None:
        try:
            for i in range(200):
                pages = tuple(shelf.pool.allocate(1 + i % 3))
                block = Block(f"{name}{i}".encode(), b"", pages, 1, "", 1.0, shelf.gone)
                shelf.pool.tick()
                shelf.pool.publish(block)
                shelf.pool.touch(pages)
                shelf.pool.release(pages)
                shelf.pool.release(pages)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert shelf.pool.n_active == 0
    shelf.pool.check()


# Room -----------------------------------------------------------------------------------------


def test_c7_a_shared_page_is_counted_once() -> None:
    shelf = Shelf(5)
    block = shelf.put("a", 2)
    for n in range(1, 4):
        shelf.pool.touch(block.pages)
        assert (shelf.pool.n_free, shelf.pool.n_active, shelf.pool.n_cached) == (3, 2, 0)
        assert shelf.pool.n_available == 3
        assert shelf.pool.references(block.pages[0]) == n
    for n in range(2, -1, -1):
        shelf.pool.release(block.pages)
        assert shelf.pool.n_cached == (0 if n else 2)
        shelf.pool.check()
    assert shelf.pool.n_available == 5


def test_c8_pages_about_to_be_hit_are_no_room() -> None:
    shelf = Shelf(5)
    block = shelf.put("a", 2)
    before = books(shelf.pool)
    with pytest.raises(PoolFullError, match="4 pages asked for, 3 of the pool's 5"):
        shelf.pool.acquire(block.pages, 4)
    assert books(shelf.pool) == before
    assert not shelf.gone
    assert len(shelf.pool.acquire(block.pages, 3)) == 3
    shelf.pool.check()


def test_pages_ahead_of_a_held_one_are_no_room() -> None:
    """A child is held, its parent is not: the parent is cached, but cannot be evicted."""
    shelf = Shelf(4)
    shelf.put("a")
    child = shelf.put("b", parent="a")
    before = books(shelf.pool)
    with pytest.raises(PoolFullError):
        shelf.pool.acquire(child.pages, 3)
    assert books(shelf.pool) == before
    shelf.pool.touch(child.pages)
    assert (shelf.pool.n_cached, shelf.pool.n_available) == (1, 2)
    with pytest.raises(PoolFullError):
        shelf.pool.allocate(3)
    assert len(shelf.pool.allocate(2)) == 2
    assert not shelf.gone


def test_a_block_of_which_one_page_is_held_is_no_room() -> None:
    shelf = Shelf(4)
    block = shelf.put("a", 3)
    shelf.pool.touch(block.pages[:1])
    assert (shelf.pool.n_cached, shelf.pool.n_available) == (2, 1)
    before = books(shelf.pool)
    with pytest.raises(PoolFullError):
        shelf.pool.allocate(2)
    assert books(shelf.pool) == before


def test_a_block_dropped_while_held_is_free_when_let_go() -> None:
    shelf = Shelf(4)
    block = shelf.put("a", 2)
    shelf.pool.touch(block.pages)
    shelf.pool.drop(block, "forgotten")
    assert [shelf.pool.state(p) for p in block.pages] == ["active", "active"]
    assert shelf.pool.n_available == 2
    shelf.pool.release(block.pages)
    assert shelf.pool.n_free == 4
    with pytest.raises(KvsemError, match="only a live block"):
        shelf.pool.drop(block, "forgotten")


def publish_what_is_free(pool: BlockPool) -> None:
    pool.publish(Block(b"", b"", (0, 3), 2, "", 1.0, Dropped()))


@pytest.mark.parametrize(
    "misuse",
    [lambda pool: pool.touch([0, 3]), publish_what_is_free, lambda pool: pool.allocate(-1)],
)
def test_misuse_raises_and_changes_nothing(misuse: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(4, LRU())
    pool.allocate(1)
    before = books(pool)
    with pytest.raises(KvsemError):
        misuse(pool)
    assert books(pool) == before


@pytest.mark.parametrize("n_pages", [0, -1, True, 2.5])
def test_a_pool_has_at_least_one_page(n_pages: Any) -> None:
    with pytest.raises(SettingError, match=f"n_pages={n_pages}"):
        BlockPool(n_pages, LRU())


def test_the_smallest_pool_works() -> None:
    shelf = Shelf(1)
    shelf.put("a")
    shelf.put("b")
    assert shelf.gone == ["a"]
    with pytest.raises(PoolFullError):
        shelf.pool.allocate(2)


def test_without_a_limit_it_grows_and_never_evicts() -> None:
    shelf = Shelf(None)
    assert shelf.pool.n_available is None
    for i in range(3 * FIRST_GROWTH):
        assert shelf.put(str(i)).pages == (i,)
    assert shelf.pool.n_pages == 4 * FIRST_GROWTH
    held = shelf.pool.acquire(shelf.blocks["0"].pages, 1000)
    assert held == list(range(3 * FIRST_GROWTH, 3 * FIRST_GROWTH + 1000))
    shelf.pool.check()
    assert not shelf.gone
    assert not shelf.pool.evictions


# Order of eviction ----------------------------------------------------------------------------


@pytest.mark.parametrize(("eviction", "survives"), [(LRU(), True), (FIFO(), False)])
def test_c12_lru_is_not_fifo(eviction: Eviction, survives: bool) -> None:
    shelf = Shelf(4, eviction)
    shelf.put("a")
    for i in range(20):
        shelf.hit("a")
        shelf.put(str(i))
    assert ("a" not in shelf.gone) is survives
    assert shelf.gone[:2] == (["0", "1"] if survives else ["a", "0"])


@pytest.mark.parametrize("eviction", [LRU(), FIFO(), CostAware()])
def test_c13_what_is_new_in_a_full_pool_is_not_the_next_to_go(eviction: Eviction) -> None:
    shelf = Shelf(3, eviction)
    for name in "abc":
        shelf.put(name)
    shelf.put("new")
    shelf.put("newer")
    assert shelf.gone == ["a", "b"]


def test_c14_the_first_of_a_chain_goes_last() -> None:
    shelf = Shelf(3)
    shelf.put("1")
    shelf.put("2", parent="1")
    shelf.put("3", parent="2")
    for name in "123":
        shelf.hit(name)  # its first page has been idle longest
    with pytest.raises(KvsemError, match="nothing continues"):
        shelf.pool.drop(shelf.blocks["1"], "forgotten")
    for name in "45":
        shelf.put(name)
    assert shelf.gone == ["3", "2"]
    shelf.put("6")
    assert shelf.gone == ["3", "2", "1"]


def test_a_block_that_is_held_is_passed_over() -> None:
    shelf = Shelf(3)
    for name in "abc":
        shelf.put(name)
    shelf.pool.touch(shelf.blocks["a"].pages)
    shelf.put("d")
    assert shelf.gone == ["b"]
    shelf.pool.release(shelf.blocks["a"].pages)
    shelf.put("e")
    assert shelf.gone == ["b", "a"]


@dataclass
class Seen:
    """What a policy may look at."""

    added: int = 3
    used: int = 5
    hits: int = 2
    n_tokens: int = 16
    nbytes: int = 400
    cost: float = 1000.0


def test_the_policies_formulas() -> None:
    assert LRU().priority(Seen(), 9.0) == 5
    assert FIFO().priority(Seen(), 9.0) == 3
    # floor + frequency x cost / size (HPL-98-69R1), frequency counting the first use
    assert CostAware().priority(Seen(), 9.0) == 9.0 + 3 * 1000.0 / 400
    assert CostAware().priority(Seen(nbytes=0), 0.0) == 3000.0


def test_cost_aware_weighs_recomputation_against_size() -> None:
    shelf = Shelf(5, CostAware(), page_nbytes=10)
    shelf.put("dear", cost=50.0)
    shelf.put("cheap", cost=20.0)
    shelf.put("large", n_pages=3, cost=90.0)
    assert [shelf.blocks[n].priority for n in ("dear", "cheap", "large")] == [5.0, 2.0, 3.0]
    shelf.hit("cheap")
    assert shelf.blocks["cheap"].priority == 4.0
    shelf.put("new", cost=100.0)
    assert shelf.gone == ["large"]


def test_cost_aware_ages() -> None:
    """What was popular once goes, after the floor has risen past it."""
    shelf = Shelf(2, CostAware())
    shelf.put("old", cost=1.0)
    for _ in range(5):
        shelf.hit("old")
    assert shelf.blocks["old"].priority == 6.0
    for i in range(12):
        shelf.put(str(i), cost=1.0)
    assert shelf.gone[:6] == ["0", "1", "2", "3", "4", "old"]
    assert shelf.blocks["6"].priority > 6.0


def test_old_versions_go_first_and_evictions_are_counted_by_reason() -> None:
    shelf = Shelf(4, CostAware())
    shelf.pool.renew("v1")
    for name, cost in [("a", 100.0), ("b", 200.0), ("c", 50.0)]:
        shelf.put(name, cost=cost, version="v1")
    assert shelf.pool.n_old_blocks == 0
    shelf.pool.renew("v2")
    assert shelf.pool.n_old_blocks == 3
    shelf.put("d", cost=1.0, version="v2")
    for i in range(3):
        shelf.put(str(i), cost=1.0, version="v2")
    assert shelf.gone == ["c", "a", "b"]
    assert shelf.blocks["0"].priority == 1.0  # what is old says nothing about the floor
    shelf.put("e", cost=1.0, version="v2")
    shelf.pool.drop(shelf.blocks["e"], "forgotten")
    assert shelf.pool.evictions == Counter(old_version=3, capacity=1, forgotten=1)
    assert shelf.pool.n_old_blocks == 0


def test_renewing_keeps_the_order_of_equals() -> None:
    shelf = Shelf(12, CostAware())
    names = [str(i) for i in range(12)]
    for name in names:
        shelf.put(name)
    for name in reversed(names):
        shelf.hit(name)
    shelf.pool.allocate(4)
    shelf.pool.renew("new")
    shelf.pool.allocate(8)
    assert shelf.gone == names[::-1]


def test_the_floor_never_falls() -> None:
    """A block that was held for long goes with the priority that it had long ago."""
    shelf = Shelf(2, CostAware())
    held = shelf.put("a").pages
    shelf.pool.touch(held)
    for i in range(5):
        shelf.put(str(i))
    shelf.pool.release(held)
    shelf.put("b")
    assert shelf.gone[-1] == "a"
    assert shelf.blocks["b"].priority == 1.0 + shelf.blocks["3"].priority


def test_dropping_what_is_held_sets_free_what_it_continued() -> None:
    shelf = Shelf(2)
    shelf.put("a")
    child = shelf.put("b", parent="a")
    shelf.pool.touch(child.pages)
    assert shelf.pool.n_available == 0
    shelf.pool.drop(child, "forgotten")
    shelf.pool.check()
    assert shelf.pool.n_available == 1
    shelf.put("c")
    assert shelf.gone == ["b", "a"]


# The check itself -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.pop(),
        lambda pool: setattr(pool, "n_cached", 5),
        lambda pool: setattr(pool, "n_evictable", 5),
        lambda pool: pool._references.__setitem__(0, 1),
        lambda pool: setattr(pool._owners[0], "ticket", 0),
        lambda pool: setattr(pool._owners[0], "pins", 1),
        lambda pool: pool._owners.__setitem__(0, None),
    ],
)
def test_check_finds_what_is_wrong(damage: Any) -> None:
    """C7: the invariant that users can ask for finds a damaged pool."""
    shelf = Shelf(6)
    shelf.put("a", 2)
    shelf.pool.check()
    damage(shelf.pool)
    with pytest.raises(KvsemError):
        shelf.pool.check()
