"""What the pool and the prefix cache should do, from their documentation: dictionaries and scans.

No code is shared with kvsem, nothing is kept up to date that can be looked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]
Cost = Callable[[int, int], float]


@dataclass(eq=False)
class Entry:
    """A published page of ``path`` (all tokens from the root on), or a chunk (no root)."""

    root: str | None
    path: Tokens
    start: int  # where its own tokens begin in the path
    pages: tuple[int, ...]
    version: str
    cost: float
    parent: Entry | None = None
    added: int = 0
    used: int = 0
    hits: int = 0
    floor: float = 0.0  # when it was looked at last
    since: int | None = None  # when it became a candidate, or was hit as one

    @property
    def n_tokens(self) -> int:
        return len(self.path) - self.start


def common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class Oracle:
    def __init__(
        self, n_pages: int, policy: str, page_size: int, partial: bool, page_nbytes: int
    ) -> None:
        self.policy, self.page_size, self.partial = policy, page_size, partial
        self.page_nbytes = page_nbytes
        self.references = dict.fromkeys(range(n_pages), 0)
        self.entries: list[Entry] = []
        self.evictions: Counter[str] = Counter()
        self.version = ""
        self.clock = self.events = 0
        self.floor = 0.0

    # -- looking ----------------------------------------------------------------------------

    def owner(self, page: int) -> Entry | None:
        return next((e for e in self.entries if page in e.pages), None)

    def state(self, page: int) -> str:
        if self.references[page] > 0:
            return "active"
        return "cached" if self.owner(page) else "free"

    def free(self) -> list[int]:
        owned = {page for e in self.entries for page in e.pages}
        return [p for p, n in sorted(self.references.items()) if n == 0 and p not in owned]

    def children(self, entry: Entry) -> list[Entry]:
        return [e for e in self.entries if e.parent is entry]

    def room(self, held: Sequence[int]) -> int:
        """Free pages, and those of entries that could all be evicted, leaf by leaf."""
        used = {p for p, n in self.references.items() if n} | set(held)
        stay: set[int] = set()
        for entry in self.entries:
            if used & set(entry.pages):
                above: Entry | None = entry
                while above:
                    stay.add(id(above))
                    above = above.parent
        go = sum(len(e.pages) for e in self.entries if id(e) not in stay)
        return len(self.free()) + go

    def candidates(self) -> list[Entry]:
        parents = {id(e.parent) for e in self.entries if e.parent}
        return [
            e
            for e in self.entries
            if id(e) not in parents and not any(self.references[p] for p in e.pages)
        ]

    def priority(self, e: Entry) -> float:
        frequency = e.hits + 1
        size = len(e.pages) * self.page_nbytes
        value = {"lru": e.used, "fifo": e.added, "cost_aware": e.floor + frequency * e.cost / size}
        return value[self.policy]

    def match(self, root: str, ids: Tokens, limit: int | None) -> tuple[list[Entry], int]:
        """Whole pages, and how many tokens in all: the longest way that any path goes along."""
        wanted = ids if limit is None else ids[:limit]
        mine = [e for e in self.entries if e.root == root]
        n = max((common(e.path, wanted) for e in mine), default=0)
        n -= 0 if self.partial else n % self.page_size
        full = {e.path: e for e in mine if e.n_tokens == self.page_size}
        ends = range(self.page_size, n + 1, self.page_size)
        return [full[wanted[:end]] for end in ends], n

    # -- doing ------------------------------------------------------------------------------

    def settle(self) -> None:
        """After every single change: who is a candidate, and since when."""
        now = {id(e) for e in self.candidates()}
        for e in self.entries:
            if id(e) not in now:
                e.since = None
            elif e.since is None:
                self.events += 1
                e.since = self.events

    def look(self, entry: Entry, hit: bool) -> None:
        entry.used, entry.floor = self.clock, self.floor
        entry.hits += 1 if hit else 0
        if entry.since is not None:
            self.events += 1
            entry.since = self.events

    def use(self, entries: Sequence[Entry]) -> None:
        self.clock += 1
        for entry in entries:
            self.look(entry, hit=True)

    def acquire(self, held: Sequence[int], n_new: int) -> list[int] | None:
        """None where it must be refused."""
        if n_new > self.room(held):
            return None
        for page in held:
            self.references[page] += 1
        self.settle()
        while len(self.free()) < n_new:
            self.evict()
        pages = self.free()[:n_new]
        for page in pages:
            self.references[page] = 1
        return pages

    def evict(self) -> None:
        def order(e: Entry) -> tuple[bool, float, int]:
            assert e.since is not None
            return e.version == self.version, self.priority(e), e.since

        victim = min(self.candidates(), key=order)
        current = victim.version == self.version
        if current:
            self.floor = max(self.floor, self.priority(victim))
        self.drop(victim, "capacity" if current else "old_version")

    def drop(self, entry: Entry, reason: str) -> None:
        self.entries.remove(entry)
        self.evictions[reason] += 1
        self.settle()

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.references[page] -= 1
            assert self.references[page] >= 0
            self.settle()

    def add(self, entry: Entry) -> None:
        entry.added = self.clock
        self.entries.append(entry)
        self.look(entry, hit=False)
        self.settle()

    def publish(
        self, root: str, ids: Tokens, pages: Sequence[int], version: str, cost: Cost
    ) -> int:
        """Returns how many pages are new."""
        self.clock += 1
        parent: Entry | None = None
        n_new = 0
        for start, page in zip(range(0, len(ids), self.page_size), pages, strict=True):
            path = ids[: start + self.page_size]
            mine = [e for e in self.entries if e.root == root]
            if len(path) - start < self.page_size:
                covered = any(e.path[: len(path)] == path for e in mine)
                if covered or not self.partial:
                    break
            known = next((e for e in mine if e.path == path), None)
            if known:
                self.look(known, hit=False)
            else:
                known = Entry(root, path, start, (page,), version, cost(start, len(path)), parent)
                self.add(known)
                n_new += 1
                for e in mine:
                    if e.start == start and path[: len(e.path)] == e.path:
                        self.drop(e, "superseded")
            parent = known
        return n_new

    def clear(self) -> None:
        for e in [e for e in self.entries if e.root is not None]:
            self.drop(e, "forgotten")
