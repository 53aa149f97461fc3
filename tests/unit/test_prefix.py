"""Prefix pages: what is found, what is published, and why nothing was found."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvsem.errors import KvsemError, SettingError
from kvsem.eviction.base import Eviction
from kvsem.eviction.cost_aware import CostAware
from kvsem.eviction.fifo import FIFO
from kvsem.eviction.lru import LRU
from kvsem.keys import chain_root, page_key
from kvsem.memory.pool import BlockPool, PoolFullError
from kvsem.memory.prefix import Matched, PrefixCache

ROOT = chain_root("model")


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def cache(
    n_pages: int | None = 32,
    page_size: int = 4,
    partial: bool = True,
    eviction: Eviction | None = None,
) -> PrefixCache:
    return PrefixCache(BlockPool(n_pages, eviction or LRU()), page_size, partial)


def serve(
    prefix: PrefixCache, tokens: np.ndarray, root: bytes = ROOT, version: str = ""
) -> Matched:
    """A request from its look-up to its end; the last token is always left to run."""
    pool = prefix.pool
    matched = prefix.match(root, tokens, max(0, len(tokens) - 1))
    own = pool.acquire(matched.held, -(-len(tokens) // prefix.page_size) - len(matched.blocks))
    prefix.use(matched)
    prefix.publish(root, tokens, matched.pages + own, version)
    pool.release(matched.held + own)
    pool.check()
    return matched


# What is found --------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("n", range(1, 14))
def test_a4_one_token_is_always_left(n: int, partial: bool) -> None:
    """The same prompt again, below, at and above the edges of pages."""
    prefix = cache(partial=partial)
    tokens = np.arange(n)
    assert serve(prefix, tokens).n_tokens == 0
    again = serve(prefix, tokens)
    assert again.n_tokens == (n - 1 if partial else (n - 1) // 4 * 4)
    assert prefix.match(ROOT, tokens).n_tokens == (n if partial else n // 4 * 4)


def test_a_match_may_end_inside_a_page() -> None:
    prefix = cache()
    serve(prefix, ids(1, 2, 3, 4, 5, 6, 7, 8))
    serve(prefix, ids(1, 2, 3, 4, 5, 9))
    found = prefix.match(ROOT, ids(1, 2, 3, 4, 5, 6, 7, 0))
    assert (found.n_tokens, len(found.blocks), found.reason) == (7, 1, "diverged")
    assert found.tail
    assert found.tail.content == ids(5, 6, 7, 8).tobytes()
    assert found.held == [*found.pages, found.tail.pages[0]]
    other = prefix.match(ROOT, ids(1, 2, 3, 4, 5, 9, 9))
    assert other.n_tokens == 6
    assert prefix.match(ROOT, ids(1, 2, 9)).n_tokens == 2


def test_a_longer_page_takes_the_place_of_the_shorter_that_it_repeats() -> None:
    prefix = cache()
    serve(prefix, ids(1, 2))
    serve(prefix, ids(1, 2, 3))
    assert (len(prefix), prefix.pool.evictions["superseded"]) == (1, 1)
    serve(prefix, ids(1, 2))  # covered
    assert (len(prefix), prefix.pool.n_cached) == (1, 1)
    serve(prefix, ids(1, 2, 7))
    assert len(prefix) == 2
    serve(prefix, ids(1, 2, 3, 4, 5))
    assert (len(prefix), prefix.pool.evictions["superseded"]) == (3, 2)


def test_whole_pages_only() -> None:
    prefix = cache(partial=False)
    serve(prefix, ids(1, 2, 3, 4, 5, 6))
    assert len(prefix) == 1
    assert prefix.match(ROOT, ids(1, 2, 3, 4, 5, 6)).n_tokens == 4
    assert prefix.match(ROOT, ids(1, 2, 3, 9)).n_tokens == 0
    assert prefix.pool.n_free == 31


def test_b10_roots_do_not_see_each_other() -> None:
    prefix = cache()
    tokens = np.arange(9)
    serve(prefix, tokens, chain_root("a"))
    assert prefix.match(chain_root("b"), tokens).n_tokens == 0
    assert prefix.match(chain_root("a"), tokens).n_tokens == 9


def test_matching_changes_nothing() -> None:
    prefix = cache()
    serve(prefix, np.arange(10))
    before = (prefix.pool.clock, [(b.hits, b.used) for b in prefix._blocks.values()])
    for _ in range(3):
        prefix.match(ROOT, np.arange(10))
    assert before == (prefix.pool.clock, [(b.hits, b.used) for b in prefix._blocks.values()])
    assert prefix.pool.n_active == 0


def test_nothing_in_nothing() -> None:
    prefix = cache()
    assert prefix.match(ROOT, ids()) == Matched()
    assert prefix.publish(ROOT, ids(), []) == 0
    assert prefix.match(ROOT, ids(1), 0) == Matched()


@pytest.mark.parametrize("page_size", [0, -1, 257, True, 4.0, "16", None])
def test_a_page_size_that_cannot_be(page_size: Any) -> None:
    with pytest.raises(SettingError, match=r"memory\.page_size=.*1 to 256"):
        cache(page_size=page_size)


@pytest.mark.parametrize("page_size", [1, 256])
def test_page_sizes_at_the_edge(page_size: int) -> None:
    prefix = cache(page_size=page_size, n_pages=600)
    serve(prefix, np.arange(513))
    assert serve(prefix, np.arange(513)).n_tokens == 512


# Field reports --------------------------------------------------------------------------------


def test_c3_nothing_leaks_over_many_cycles() -> None:
    """10^4 cycles at twice the capacity: nothing stays held, the hit rate does not fall."""
    r = random.Random(0)
    prefix = cache(n_pages=100, page_size=4)
    prompts = [np.array(r.choices(range(50), k=13)) for _ in range(50)]  # 200 pages
    hits = []
    for i in range(10_000):
        tokens = prompts[min(int(r.expovariate(0.05)), 49)]
        matched = prefix.match(ROOT, tokens, 12)
        own = prefix.pool.acquire(matched.held, 4 - len(matched.blocks))
        prefix.use(matched)
        if i % 7:  # every seventh is abandoned
            prefix.publish(ROOT, tokens, matched.pages + own)
        prefix.pool.release(matched.held + own)
        assert prefix.pool.n_active == 0
        hits.append(matched.n_tokens / 12)
    prefix.pool.check()
    assert prefix.pool.evictions["capacity"] > 1000
    first, last = np.mean(hits[1000:2000]), np.mean(hits[-1000:])
    assert 0.3 < first < 0.95
    assert last == pytest.approx(first, abs=0.05)


def test_c9_nothing_is_found_before_it_is_published() -> None:
    prefix = cache()
    tokens = np.arange(9)
    own = prefix.pool.allocate(3)
    assert prefix.match(ROOT, tokens) == Matched(reason="unknown")
    prefix.pool.release(own)  # it failed half-way
    assert prefix.match(ROOT, tokens) == Matched(reason="unknown")
    assert prefix.pool.n_free == 32


def test_c10_what_was_evicted_is_not_found() -> None:
    prefix = cache(n_pages=2)
    serve(prefix, np.arange(8))
    serve(prefix, np.arange(100, 108))
    assert prefix.match(ROOT, np.arange(8)) == Matched(reason="evicted")
    assert prefix.match(ROOT, np.arange(100, 108)).n_tokens == 8
    serve(prefix, np.arange(8))
    assert prefix.match(ROOT, np.arange(8)).n_tokens == 8


def test_c10_no_trace_of_a_page_is_left_once_it_is_evicted() -> None:
    prefix = cache(n_pages=4)
    for i in range(20):
        serve(prefix, np.arange(6) + 10 * i)
    prefix.clear()
    assert not prefix._blocks
    assert not prefix._beside
    assert not prefix._begun.total()
    assert prefix.pool.n_free == 4


def test_c11_the_first_copy_of_a_page_stays() -> None:
    prefix = cache()
    tokens = np.arange(8)
    first, second = prefix.pool.allocate(2), prefix.pool.allocate(2)
    assert prefix.publish(ROOT, tokens, first) == 2
    assert prefix.publish(ROOT, tokens, second) == 0
    assert prefix.match(ROOT, tokens).pages == first
    prefix.pool.release(second)
    assert [prefix.pool.state(p) for p in second] == ["free", "free"]
    prefix.pool.release(first)
    assert [prefix.pool.state(p) for p in first] == ["cached", "cached"]
    prefix.pool.check()


def test_c11_a_page_behind_another_ones_page_keeps_it() -> None:
    """The duplicate's next page continues the canonical one, which nobody holds."""
    prefix = cache(n_pages=4, page_size=1)
    first, second = prefix.pool.allocate(1), prefix.pool.allocate(2)
    prefix.publish(ROOT, ids(1), first)
    prefix.pool.release(first)
    prefix.publish(ROOT, ids(1, 2), second)
    assert prefix.match(ROOT, ids(1, 2)).pages == [first[0], second[1]]
    assert (prefix.pool.n_free, prefix.pool.n_cached, prefix.pool.n_available) == (1, 1, 1)
    with pytest.raises(PoolFullError):
        prefix.pool.allocate(2)
    prefix.pool.check()
    assert prefix.match(ROOT, ids(1, 2)).n_tokens == 2
    prefix.pool.release(second)
    assert prefix.pool.n_available == 4


@pytest.mark.parametrize("eviction", [LRU(), FIFO(), CostAware()])
def test_c14_no_hit_is_counted_past_a_missing_page(eviction: Eviction) -> None:
    prefix = cache(n_pages=4, eviction=eviction)
    serve(prefix, np.arange(16))
    first = prefix.match(ROOT, np.arange(16)).blocks[0]
    with pytest.raises(KvsemError, match="nothing continues"):
        prefix.pool.drop(first, "forgotten")
    for left in (3, 2, 1, 0):
        prefix.pool.release(prefix.pool.allocate(4 - left))  # evicts one page more each time
        found = prefix.match(ROOT, np.arange(16))
        assert (found.n_tokens, found.reason) == (4 * left, "evicted")


def test_b8_a_collision_is_never_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 bits of hash left every second look-up meets another prompt's page."""
    weak = {i: i.to_bytes(1, "big") for i in range(16)}
    monkeypatch.setattr(
        "kvsem.memory.prefix.page_key",
        lambda ahead, content: weak[page_key(ahead, content)[0] % 16],
    )
    r = random.Random(0)
    n_hits, collided = 0, 0
    for partial in (True, False):
        prefix = cache(n_pages=40, page_size=2, partial=partial)
        written: dict[int, tuple[int, ...]] = {}  # page: the tokens that its KV stands for
        for _ in range(1000):
            tokens = tuple(r.choices(range(3), k=r.randint(1, 9)))
            found = prefix.match(ROOT, np.array(tokens), len(tokens) - 1)
            for i, page in enumerate(found.held):
                end = min(2 * i + 2, found.n_tokens)
                assert written[page][:end] == tokens[:end]  # 0 wrong reuses
            n_hits += found.n_tokens
            collided += found.reason == "collision"
            own = prefix.pool.acquire(found.held, (len(tokens) + 1) // 2 - len(found.blocks))
            written |= {p: tokens[: 2 * i + 2] for i, p in enumerate(own, len(found.blocks))}
            prefix.use(found)
            before = prefix.n_collisions
            prefix.publish(ROOT, np.array(tokens), found.pages + own)
            collided += prefix.n_collisions - before
            prefix.pool.release(found.held + own)
            prefix.pool.check()
        assert prefix.n_collisions > 100
        assert len(prefix) <= 16
    assert n_hits > 100
    assert collided > 0


def test_b9_pages_that_are_equal_but_for_what_is_ahead() -> None:
    prefix = cache()
    serve(prefix, ids(1, 1, 1, 1, 5, 6, 7, 8))
    assert page_key(page_key(ROOT, b"a"), b"z") != page_key(page_key(ROOT, b"b"), b"z")
    found = prefix.match(ROOT, ids(2, 1, 1, 1, 5, 6, 7, 8))
    assert (found.n_tokens, found.reason) == (0, "unknown")
    serve(prefix, ids(2, 1, 1, 1, 5, 6, 7, 8))
    assert len(prefix) == 4
    with_one = prefix.match(ROOT, ids(1, 1, 1, 1, 5, 6, 7, 8)).pages
    with_two = prefix.match(ROOT, ids(2, 1, 1, 1, 5, 6, 7, 8)).pages
    assert not set(with_one) & set(with_two)


# Why nothing was found ------------------------------------------------------------------------


def test_c15_a_prompt_shorter_than_a_page() -> None:
    prefix = cache(partial=False)
    serve(prefix, ids(1, 2, 3, 4))
    for n in range(1, 4):
        assert prefix.match(ROOT, ids(1, 2, 3, 4)[:n]) == Matched(reason="below_page_size")
    rest = prefix.match(ROOT, ids(1, 2, 3, 4, 5, 6))
    assert (rest.n_tokens, rest.reason) == (4, "below_page_size")
    assert prefix.match(ROOT, ids(1, 2, 3, 4)).reason == ""


@pytest.mark.parametrize("partial", [True, False])
def test_reasons(partial: bool) -> None:
    prefix = cache(partial=partial, n_pages=3)
    assert prefix.match(ROOT, np.arange(8)).reason == "unknown"
    serve(prefix, np.arange(8))
    assert prefix.match(ROOT, np.arange(8)).reason == ""
    assert prefix.match(ROOT, np.arange(9), 8).reason == ""
    assert prefix.match(ROOT, ids(0, 1, 2, 3, 9, 9, 9, 9)).reason == "diverged"
    assert prefix.match(ROOT, ids(7, 1, 2, 3)).reason == "unknown"
    serve(prefix, np.arange(50, 58))
    assert prefix.match(ROOT, np.arange(8)).reason == "evicted"


def test_what_begins_alike_is_not_unknown() -> None:
    """Less than a page in common, with more than a page to look for."""
    prefix = cache()
    serve(prefix, np.arange(8))
    found = prefix.match(ROOT, ids(0, 1, 9, 9, 9, 9))
    assert (found.n_tokens, found.reason) == (2, "diverged")


@pytest.mark.parametrize("n", [3, 8])
def test_b5_an_old_version_is_named(n: int) -> None:
    prefix = cache()
    old, new = chain_root("weights 1"), chain_root("weights 2")
    prefix.pool.renew("1")
    serve(prefix, np.arange(8), old, version="1")
    prefix.pool.renew("2")
    assert prefix.match(new, np.arange(n)) == Matched(reason="old_version")
    serve(prefix, np.arange(8), new, version="2")
    assert prefix.match(new, np.arange(n)).n_tokens == n
    assert prefix.match(new, np.arange(40, 40 + n)).reason == "unknown"


def test_clear_forgets_everything_and_spares_what_is_held() -> None:
    prefix = cache()
    serve(prefix, np.arange(10))
    held = prefix.match(ROOT, np.arange(10)).held
    prefix.pool.touch(held)
    prefix.clear()
    assert len(prefix) == 0
    assert prefix.match(ROOT, np.arange(10)) == Matched(reason="unknown")
    assert prefix.pool.n_active == 3
    prefix.pool.release(held)
    assert prefix.pool.n_free == 32
    prefix.pool.check()


def test_costs_are_asked_for_each_page() -> None:
    prefix = cache()
    own = prefix.pool.allocate(3)
    spans = []

    def cost(start: int, end: int) -> float:
        spans.append((start, end))
        return 10.0 * start

    prefix.publish(ROOT, np.arange(10), own, cost=cost)
    assert spans == [(0, 4), (4, 8), (8, 10)]
    assert [b.cost for b in prefix._blocks.values()] == [0.0, 40.0, 80.0]
