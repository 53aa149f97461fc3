"""Replay of a trace of block hashes through the pool and the prefix cache: bookkeeping only.

``python -m kvsem.serving.replay TRACE --pages N`` prints the hit rate and how fast it went.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import pkgutil
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import kvsem.eviction
from kvsem.errors import DataError, KvsemError, SettingError, check_count
from kvsem.eviction.base import Eviction
from kvsem.keys import chain_root
from kvsem.memory.pool import BlockPool, PoolFullError
from kvsem.memory.prefix import PrefixCache

_GZIP = b"\x1f\x8b"
_INT64 = 1 << 63


@dataclass(frozen=True)
class Replayed:
    """What a replay did; ``hits`` has one number a request, in the order of the trace.

    ``n_operations`` counts each page once for every verb that it went through: matched (looked up
    and found), touched (a reference to it taken), allocated, evicted, published (made findable)
    and released. A block that hits takes 3 of them, one that misses 3, and 4 where its room had
    to be made; a refused request none. ``n_blocks`` / ``seconds`` is the conservative speed: one
    operation for all that happens to a block.
    """

    n_requests: int
    n_blocks: int  # of all requests, those refused too
    n_hits: int
    n_refused: int
    evictions: Counter[str]  # blocks by reason
    n_operations: int
    seconds: float
    hits: tuple[int, ...] = field(repr=False)

    @property
    def hit_rate(self) -> float:
        """Of all blocks; 0 where there were none."""
        return self.n_hits / max(1, self.n_blocks)


def replay(requests: Iterable[Sequence[int]], n_pages: int, eviction: Eviction) -> Replayed:
    """One request after the other through a pool of ``n_pages``, whose pages hold a block each.

    Hash ids stand in for token ids at ``page_size`` 1, so that a block of the trace, whatever
    its size in tokens, is one page. All blocks of a request may hit, as if one more token followed
    them. A request that needs more pages than there are is refused and changes nothing. Every
    block counts as equally costly to compute.
    """
    pool = BlockPool(n_pages, eviction)
    cache = PrefixCache(pool, page_size=1, partial=False)
    root = chain_root("replay")
    hits: list[int] = []
    n_blocks = n_refused = n_operations = 0
    start = time.perf_counter()
    for request in requests:
        ids = np.asarray(request, dtype=np.int64)
        n_blocks += len(ids)
        n_hits = _serve(cache, root, ids)
        if n_hits is None:
            n_refused += 1
        else:
            # matched and touched, or allocated and published; and released
            n_operations += 3 * len(ids)
        hits.append(n_hits or 0)
    seconds = time.perf_counter() - start
    n_operations += pool.evictions.total()
    return Replayed(
        len(hits),
        n_blocks,
        sum(hits),
        n_refused,
        pool.evictions,
        n_operations,
        seconds,
        tuple(hits),
    )


def _serve(cache: PrefixCache, root: bytes, ids: np.ndarray) -> int | None:
    """Blocks that hit; None where the pool is too small for the request."""
    pool = cache.pool
    matched = cache.match(root, ids)
    shared = matched.pages
    try:
        own = pool.acquire(shared, len(ids) - len(shared))
    except PoolFullError:
        return None
    cache.use(matched)
    cache.publish(root, ids, shared + own)
    pool.release(shared + own)
    return len(shared)


def read_trace(path: str | Path, limit: int | None = None) -> Iterator[list[int]]:
    """The ``hash_ids`` of each request of a JSON Lines file (Mooncake's format), plain or gzipped.

    At most ``limit`` requests; blank lines are skipped. Raises `DataError`, which names the file
    and the line.
    """
    if limit is not None:
        check_count("limit", limit, 1)
    n = 0
    for number, line in _lines(Path(path).expanduser()):
        if not line.strip():
            continue
        try:
            yield _hash_ids(line)
        except DataError as error:
            raise DataError(f"{path} line {number}: {error}") from None
        n += 1
        if n == limit:
            return
    if not n:
        raise DataError(f"{path}: no requests; expected one JSON object a line")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP
        with gzip.open(path) if zipped else path.open("rb") as file:
            yield from enumerate(file, start=1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip file is damaged ({error}); fetch it again") from None
    except OSError as error:
        wrong = error.strerror or "cannot be read"
        raise DataError(f"{path}: {wrong}; expected a .jsonl or .jsonl.gz file") from None


def _hash_ids(line: bytes) -> list[int]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError("broken JSON; expected one object a line") from None
    ids = record.get("hash_ids") if isinstance(record, dict) else None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise DataError('expected "hash_ids", a list of whole numbers')
    if any(not -_INT64 <= i < _INT64 for i in ids):
        raise DataError('a number in "hash_ids" is too large; expected 64 bits')
    return ids


# Command line ---------------------------------------------------------------------------------


def policies() -> list[str]:
    """Names of the eviction policies: the modules beside their base."""
    return [m.name for m in pkgutil.iter_modules(kvsem.eviction.__path__) if m.name != "base"]


def policy(name: str) -> Eviction:
    """The one class in ``kvsem/eviction/<name>.py``, as it stands without settings."""
    if name not in policies():
        raise SettingError("eviction", name, " or ".join(policies()))
    module = importlib.import_module(f"kvsem.eviction.{name}")
    own = [c for c in vars(module).values() if getattr(c, "__module__", "") == module.__name__]
    found: Eviction = own[0]()
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvsem.serving.replay",
        description="Replay a trace of block hashes through the pool and print its hit rate. "
        "Bookkeeping only: no model and no tensors.",
        epilog='Each line of TRACE is one request: {"hash_ids": [0, 1, 2], ...}, one id a block, '
        "in order; other fields are ignored. A page of the pool holds one block.",
    )
    parser.add_argument("trace", metavar="TRACE", help=".jsonl or .jsonl.gz file")
    parser.add_argument("--pages", type=int, required=True, metavar="N", help="size of the pool")
    parser.add_argument(
        "--eviction", default="lru", metavar="NAME", help=f"{', '.join(policies())} (lru)"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="replay the first N requests only (all)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 where something is wrong with what was asked for."""
    asked = _arguments(argv)
    try:
        requests = list(read_trace(asked.trace, asked.limit))  # reading is not on the clock
        done = replay(requests, asked.pages, policy(asked.eviction))
    except KvsemError as error:
        print(error, file=sys.stderr)
        return 2
    for line in _report(done):
        print(line)
    return 0


def _report(done: Replayed) -> Iterator[str]:
    evictions = ", ".join(f"{n} {reason}" for reason, n in sorted(done.evictions.items()))
    yield f"requests    {done.n_requests} ({done.n_refused} refused: larger than the pool)"
    yield f"blocks      {done.n_blocks} ({done.n_hits} hits)"
    yield f"hit rate    {done.hit_rate:.4f}"
    yield f"evictions   {evictions or 0}"
    yield (
        f"speed       {done.n_blocks / done.seconds:.0f} blocks/s, "
        f"{done.n_operations / done.seconds:.0f} page operations/s"
    )


if __name__ == "__main__":
    sys.exit(main())
