"""Several requests in flight: iteration-level scheduling over one pool.

Each iteration prefills the first of the queue, as many as the pool has pages for and one forward
takes, and then gives every running request one token, all in one forward (Orca, OSDI 2022,
section 3).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvsem.engine import Engine, Loaded, Prefilled
from kvsem.errors import KvsemError, SettingError, check_count, one_line
from kvsem.memory.pool import PoolFullError
from kvsem.types import Request

MAX_BATCH_TOKENS = 512


@dataclass(frozen=True)
class Served:
    """A request that is over. Times in milliseconds from its arrival; ``error`` says in one line
    why it failed, and is empty where it did not. ``cancelled``: by its user."""

    request: Request
    tokens: tuple[int, ...]
    prefilled: Prefilled | None
    ttft_ms: float = float("nan")
    latency_ms: float = float("nan")
    n_preempted: int = 0
    error: str = ""
    cancelled: bool = False


@dataclass
class _Flight:
    """One request between arrival and end."""

    request: Request
    arrival: float
    done: Prefilled | None = None
    tokens: list[int] = field(default_factory=list)
    ttft_ms: float = float("nan")
    n_preempted: int = 0


class Loop:
    """An engine that serves many requests at once; greedy answers, equal to one at a time.

    ``reserve``: tokens for which a request is given pages when it is admitted, as with a
    contiguous buffer of the greatest length; None: pages as its tokens come, and where the pool
    runs out the request admitted last goes back to the queue. ``max_batch_tokens``: requests are
    prefilled together as long as they compute no more tokens than this (counted at the first
    layer); one that computes more goes alone, and with 1 every request does. Those of a batch
    have their first token at the same time, when all have, and find nothing of each other in the
    cache. ``clock`` in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        reserve: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
    ) -> None:
        if engine.lm.hooked:
            raise KvsemError(f"requests in flight need selective prefill: {engine.lm.hooked}")
        if reserve is not None:
            check_count("reserve", reserve, 1)
        check_count("max_batch_tokens", max_batch_tokens, 1)
        self.engine, self.reserve, self.clock = engine, reserve, clock
        self.max_batch_tokens = max_batch_tokens
        self._n_alone = 0  # the first of the queue, of a batch that failed
        self.waiting: deque[_Flight] = deque()
        self.running: list[_Flight] = []
        self._cancelled: list[Served] = []

    @property
    def n_left(self) -> int:
        """Requests that are not over yet."""
        return len(self.waiting) + len(self.running)

    def submit(self, request: Request, arrival: float | None = None) -> None:
        """Queue ``request``; its id must not be in flight."""
        if any(f.request.id == request.id for f in (*self.waiting, *self.running)):
            raise KvsemError(f"request {request.id!r} is in flight already")
        self.waiting.append(_Flight(request, self.clock() if arrival is None else arrival))

    def cancel(self, id: str) -> bool:
        """Stop a request and give back what it holds; False where it is not in flight."""
        for queue in (self.waiting, self.running):
            for flight in queue:
                if flight.request.id == id:
                    queue.remove(flight)
                    self._release(flight)
                    self._cancelled.append(self._served(flight, cancelled=True))
                    return True
        return False

    def run(self) -> Iterator[Served]:
        """Iterate until nothing is left."""
        while self.n_left:
            yield from self.step()

    def step(self) -> list[Served]:
        """One iteration; returns the requests that ended in it or were cancelled before it."""
        over, self._cancelled = self._cancelled, []
        over += self._admit()
        over += self._finished()
        if self.running:
            self._advance()
            over += self._finished()
        return over

    # -- inside -----------------------------------------------------------------------------

    def _admit(self) -> list[Served]:
        """The first of the queue are prefilled, where there is room; one that fails is over.

        Where several fail together, each of them goes alone in the iterations that follow.
        """
        over: list[Served] = []
        batch: list[Loaded] = []
        try:
            self._load(batch, over)
        except BaseException:
            for loaded in batch:
                self.engine.drop(loaded)
            raise
        if not batch:
            return over
        self._n_alone = max(0, self._n_alone - len(batch))
        try:
            for done in self.engine.compute(batch):
                self._start(self.waiting.popleft(), done)
        except KvsemError as error:
            if len(batch) > 1:
                self._n_alone = len(batch)
            else:
                over.append(self._served(self.waiting.popleft(), error=one_line(error)))
        return over

    def _load(self, batch: list[Loaded], over: list[Served]) -> None:
        """Fill ``batch`` from the head of the queue; requests that fail are ``over``."""
        limit, n_rows = 1 if self._n_alone else self.max_batch_tokens, 0
        while len(batch) < len(self.waiting) and n_rows < limit:
            flight = self.waiting[len(batch)]
            try:
                room = self._room(flight.request)
                try:
                    loaded = self.engine.load(flight.request, room)
                except PoolFullError:
                    if self.running or batch:
                        return  # it waits until somebody gives pages back
                    raise
            except KvsemError as error:
                del self.waiting[len(batch)]
                over.append(self._served(flight, error=one_line(error)))
                continue
            n_rows += loaded.n_rows
            if batch and n_rows > limit:
                self.engine.drop(loaded)
                return
            batch.append(loaded)

    def _start(self, flight: _Flight, done: Prefilled) -> None:
        flight.done = done
        flight.tokens = [done.first][: flight.request.max_new_tokens]
        if not flight.n_preempted:
            flight.ttft_ms = (self.clock() - flight.arrival) * 1e3
        self.running.append(flight)

    def _room(self, request: Request) -> int:
        """Tokens behind the prompt that get pages at once; raises where it can never be served."""
        n = len(self.engine.render(request).ids)
        self.engine.check(request, n)
        if self.reserve is None:
            return 1
        if n + request.max_new_tokens > self.reserve:
            raise SettingError(
                "reserve", self.reserve, f"{n + request.max_new_tokens} for {request.id!r}"
            )
        return self.reserve - n

    def _advance(self) -> None:
        """One more token for every running request."""
        self._make_room()
        last = [flight.tokens[-1] for flight in self.running]
        kvs = [flight.done.kv for flight in self.running if flight.done]
        try:
            logits = self.engine.lm.step(last, kvs)
        except BaseException:
            for flight in self.running:
                self._release(flight)
            self.running.clear()
            raise
        for flight, row in zip(self.running, logits, strict=True):
            flight.tokens.append(int(row.argmax()))

    def _make_room(self) -> None:
        """A page for every next token; those admitted last go back to the queue for it."""
        at = 0
        while at < len(self.running):
            flight = self.running[at]
            assert flight.done is not None
            try:
                self.engine.memory.more(flight.done.kv, flight.done.kv.length + 1)
                at += 1
            except PoolFullError:
                last = self.running.pop()
                self._release(last)
                last.n_preempted += 1
                self.waiting.appendleft(last)

    def _finished(self) -> list[Served]:
        """Take out the requests that have all their tokens."""
        stop, over, still = self.engine.lm.stop_tokens, [], []
        for flight in self.running:
            ended = len(flight.tokens) >= flight.request.max_new_tokens
            if not (ended or flight.tokens[-1] in stop):
                still.append(flight)
                continue
            assert flight.done is not None
            self.engine.leave(flight.done, flight.tokens)
            over.append(self._served(flight))
        self.running = still
        return over

    def _release(self, flight: _Flight) -> None:
        if flight.done is not None:
            self.engine.drop(flight.done)
        flight.done, flight.tokens = None, []

    def _served(self, flight: _Flight, error: str = "", cancelled: bool = False) -> Served:
        return Served(
            flight.request,
            tuple(flight.tokens),
            flight.done,
            flight.ttft_ms,
            (self.clock() - flight.arrival) * 1e3,
            flight.n_preempted,
            error,
            cancelled,
        )
