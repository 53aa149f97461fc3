"""One pool under everything: what is served from pages is what a cold model computes.

TensorRT-LLM#14918; vllm#44223, #3251, #25780, PR 11565, PR 12621, PR 35931; LMCache#2029;
sglang#24758; ATOM PR 902; llm-d-router#1389.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch

from kvsem.embedders.hashing import HashingEmbedder
from kvsem.engine import Engine, Prefilled
from kvsem.errors import KvsemError
from kvsem.index.flat import FlatIndex
from kvsem.keys import chain_root
from kvsem.lm import LM
from kvsem.memory.memory import MemorySettings
from kvsem.memory.pages import FEW, PagedKV
from kvsem.memory.pool import PoolFullError
from kvsem.prompt import render
from kvsem.recompute.all import AllRecompute
from kvsem.recompute.base import State
from kvsem.recompute.cacheblend import CacheBlendRecompute
from kvsem.recompute.epic import EpicRecompute
from kvsem.recompute.none import NoRecompute
from kvsem.recompute.random_kv import RandomKV
from kvsem.recompute.zero_kv import ZeroKV
from kvsem.types import Message, Output, Provenance, Request, Segment
from tests.tiny import (
    SYSTEM,
    WINDOW,
    exact,
    plain_logits,
    prose,
    tiny_engine,
    tiny_lm,
    tiny_model,
    tokens,
)

PASSAGES = [prose(140 + i, 20) for i in range(5)]
MARGIN = 1e-4  # of the two best logits, in fp32: below it another order of sums may decide


def rag(id: str, *passages: int, question: str = "Why?", **more: Any) -> Request:
    more = {"system": SYSTEM, "max_new_tokens": 3, **more}
    return Request.rag(id, [PASSAGES[i] for i in passages], question, **more)


def text(id: str, content: str, **more: Any) -> Request:
    return Request(id, text=content, **{"max_new_tokens": 3} | more)


def paged(lm: LM, page_size: int = 16, n_pages: int | None = None, **more: Any) -> Engine:
    """An engine with exact prefix pages and, unless ``reuse`` says more, nothing else."""
    settings = {name: more.pop(name) for name in ("partial", "salt") if name in more}
    pool_tokens = None if n_pages is None else n_pages * page_size
    memory = MemorySettings(page_size=page_size, pool_tokens=pool_tokens, **settings)
    return tiny_engine(lm, memory=memory, **{"reuse": ("prefix",)} | more)


def semantic(lm: LM, **parts: Any) -> Engine:
    return tiny_engine(lm, embedder=HashingEmbedder(), index=FlatIndex, **parts)


def ids_of(lm: LM, request: Request) -> np.ndarray:
    return render(lm.tokenizer, request).ids


def assert_at_rest(engine: Engine) -> None:
    """The books balance, and nobody holds a page."""
    engine.memory.pool.check()
    assert engine.memory.pool.n_active == 0
    assert engine.memory.gauges()["pages_active"] == 0


def ask(engine: Engine, request: Request) -> Output:
    """`generate`, with what must hold after every request."""
    output = engine.generate(request)
    assert_at_rest(engine)
    n, plan = output.plan.n_tokens, output.plan
    assert sum(output.counts().values()) == n == len(output.provenance)
    assert plan.n_paged <= n - 1
    assert (output.provenance[: plan.n_paged] == Provenance.PREFIX).all()
    assert not output.computed[:, output.provenance == Provenance.PREFIX].any()
    assert output.computed[:, output.provenance == Provenance.NEW].all()
    return output


class Cold:
    """Greedy answers of the model without any cache, with the margins of their choices."""

    def __init__(self, lm: LM) -> None:
        self.lm, self._known = lm, dict[tuple[bytes, int], tuple[list[int], list[float]]]()
        self.n_excused = self.n_compared = 0

    def answer(self, ids: np.ndarray, steps: int) -> tuple[list[int], list[float]]:
        key = ids.tobytes(), steps
        if key not in self._known:
            kv, logits = exact(self.lm, ids, room=steps)
            chosen, margins = [], []
            for _ in range(steps):
                first, second = logits.topk(2).values.tolist()
                chosen.append(int(logits.argmax()))
                margins.append(first - second)
                if chosen[-1] in self.lm.stop_tokens:
                    break
                logits = self.lm.extend([chosen[-1]], kv)[-1]
            self._known[key] = chosen, margins
        return self._known[key]

    def check(self, request: Request, output: Output) -> None:
        """Token for token; behind a choice that was no clear one, nothing can be compared."""
        want, margins = self.answer(ids_of(self.lm, request), request.max_new_tokens)
        for i, (mine, theirs) in enumerate(zip(output.tokens, want, strict=False)):
            self.n_compared += 1
            if mine != theirs:
                assert margins[i] < MARGIN, (request.id, i, output.plan.n_paged)
                self.n_excused += 1
                return
        assert len(output.tokens) == len(want)


@pytest.fixture(scope="module")
def cold(lm: LM) -> Cold:
    return Cold(lm)


# The everyday case --------------------------------------------------------------------------


def mixed(n: int = 200, steps: int = 2) -> list[Request]:
    """Several system prompts and growing conversations, repeated prompts, others that part
    somewhere inside a page."""
    rng = np.random.default_rng(5)
    systems = [SYSTEM, prose(201, 12), prose(202, 20)]
    long = prose(203, 60)
    talks: list[list[Message]] = [[] for _ in range(4)]
    requests: list[Request] = []
    for i in range(n):
        what = int(rng.integers(5))
        if what == 0 and requests:
            requests.append(requests[int(rng.integers(len(requests)))])
        elif what == 1:
            at = int(rng.integers(len(talks)))
            if len(talks[at]) > 6:
                talks[at] = []
            talks[at].append(Message("user", (Segment("turn", prose(300 + i, 7)),)))
            head = Message("system", (Segment("system", systems[at % 3]),))
            requests.append(Request(f"talk-{i}", (head, *talks[at]), max_new_tokens=steps))
            talks[at].append(Message("assistant", (Segment("turn", prose(600 + i, 4)),)))
        elif what == 2:
            cut = int(rng.integers(10, len(long)))
            requests.append(text(f"part-{i}", long[:cut] + prose(900 + i, 4), max_new_tokens=steps))
        else:
            chosen = rng.integers(0, len(PASSAGES), int(rng.integers(1, 3)))
            system = systems[int(rng.integers(3))]
            more: dict[str, Any] = {"system": system, "max_new_tokens": steps}
            requests.append(rag(f"rag-{i}", *chosen, question=f"Who, {i % 3}?", **more))
    return requests


@pytest.mark.parametrize(
    ("kind", "page_size", "partial", "shares"),
    [
        ("llama", 16, True, (1.0, 0.5, 0.2)),
        ("llama", 7, False, (0.5,)),
        ("llama3", 1, True, (0.2,)),
        ("qwen3", 16, False, (0.2,)),
        ("gemma3", 7, True, (1.0, 0.5, 0.2)),
    ],
    indirect=["kind"],
    ids=str,
)
def test_prefix_pages_answer_like_a_cold_model_whatever_the_pool(
    lm: LM, cold: Cold, page_size: int, partial: bool, shares: tuple[float, ...]
) -> None:
    """200 requests token for token, with the pool at 100 %, 50 % and 20 % of what they need."""
    requests = mixed()
    free = paged(lm, page_size, partial=partial)
    hits = [sum(ask(free, request).plan.n_paged for request in requests)]
    working_set = free.memory.pool.n_cached
    before, compared = cold.n_excused, cold.n_compared
    for share in shares:
        engine = paged(lm, page_size, int(working_set * share), partial=partial)
        hits.append(0)
        for request in requests:
            output = ask(engine, request)
            hits[-1] += output.plan.n_paged
            cold.check(request, output)
        assert engine.memory.evictions["capacity"] > 0 or share == 1
    assert hits == sorted(hits, reverse=True)
    assert hits[0] > hits[-1] > 0
    assert cold.n_excused - before <= len(shares)
    assert cold.n_compared - compared > 350 * len(shares)


@pytest.mark.parametrize("page_size", [1, 2, 5, 16])
@pytest.mark.parametrize("partial", [True, False])
def test_an_identical_prompt_leaves_its_last_token(
    llama: LM, page_size: int, partial: bool
) -> None:
    """Of a length around a page's: the same answer, and all but the last token at most."""
    bare = copy.deepcopy(llama.tokenizer)
    bare.chat_template = "{{ messages[0]['content'] }}"
    lm = LM(llama.model, bare)
    lm.support = llama.support
    cold = Cold(lm)
    for n in sorted({1, max(1, page_size - 1), page_size, page_size + 1, 2 * page_size}):
        request = Request("r", (Message("user", (Segment("turn", of_length(lm, n)),)),))
        engine = paged(lm, page_size, partial=partial)
        first, second, third = (ask(engine, request) for _ in range(3))
        assert first.plan.n_tokens == n
        assert first.tokens == second.tokens == third.tokens
        cold.check(request, second)
        whole = (n - 1) // page_size * page_size
        assert second.plan.n_paged == (n - 1 if partial else whole)
        assert third.plan.n_paged == second.plan.n_paged
        assert first.plan.n_paged == 0
        assert second.plan.miss == ("below_page_size" if not partial and whole < n - 1 else "")


def of_length(lm: LM, n: int) -> str:
    """A text of ``n`` tokens, the same every time."""
    letters = "?!zqxj"
    made = letters[0]
    for i in range(20 * n):
        found = len(lm.tokenizer(made, add_special_tokens=False)["input_ids"])
        if found == n:
            return made
        made += letters[(i * 7 + i // 3) % len(letters)]
    raise AssertionError(f"no text of {n} tokens")


def pages_at(engine: Engine, ids: np.ndarray) -> list[torch.Tensor]:
    """Copies of all layers' bytes of the pages that ``ids`` are found in, tail included."""
    root = chain_root(engine.lm.namespace())
    slots = engine.memory.pages.slots(engine.memory.prefix.match(root, ids).held)
    pages = engine.memory.pages
    return [t[:, slots].clone() for t in (*pages.keys, *pages.values)]


@pytest.mark.parametrize("page_size", [4, 16])
def test_going_on_inside_a_shared_page_changes_nothing_for_others(
    lm: LM, cold: Cold, page_size: int
) -> None:
    """Both part in the middle of a page; it is copied before anything is written."""
    stem = prose(210, 18)
    first, second = text("a", f"{stem} bridge over it"), text("b", f"{stem} castle, or so it is")
    engine = paged(lm, page_size)
    cold.check(first, ask(engine, first))
    ids = ids_of(lm, first)
    before = pages_at(engine, ids)
    output = ask(engine, second)
    assert output.plan.n_paged % page_size
    assert output.plan.n_paged > page_size
    cold.check(second, output)
    after = pages_at(engine, ids)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for request in (first, second):
        again = ask(engine, request)
        assert again.plan.n_paged == again.plan.n_tokens - 1
        cold.check(request, again)


def test_requests_in_flight_share_pages_and_nothing_else(lm: LM, cold: Cold) -> None:
    """Five at once over one stem, stepped in turn; one is dropped on the way."""
    stem = prose(211, 25)
    asked = [
        text(f"{i}", f"{stem} {prose(220 + i, 3 + 4 * i)}", max_new_tokens=6) for i in range(5)
    ]
    engine = paged(lm, 8)
    ask(engine, asked[0])
    flights = [engine.prefill(request) for request in asked]
    shared = {flight.kv.pages[0] for flight in flights}
    assert len(shared) == 1
    assert engine.memory.pool.references(shared.pop()) == 5
    answers = [[flight.first] for flight in flights]
    going = list(range(5))
    for i in range(5):
        if i == 2:
            engine.drop(flights[1])
            going.remove(1)
        logits = lm.step([answers[j][-1] for j in going], [flights[j].kv for j in going])
        for j, row in zip(going, logits, strict=True):
            answers[j].append(int(row.argmax()))
        engine.memory.pool.check()
    for j in going:
        want, margins = cold.answer(ids_of(lm, asked[j]), 6)
        assert min(margins) > MARGIN
        n = len(want)
        assert answers[j][:n] == want
        engine.leave(flights[j], answers[j])
    assert_at_rest(engine)
    with pytest.raises(KvsemError, match="given back"):
        engine.drop(flights[1])
    assert_at_rest(engine)
    known = np.concatenate([ids_of(lm, asked[3]), answers[3][:-1]])
    assert engine.memory.prefix.match(chain_root(lm.namespace()), known).n_tokens == len(known)
    gone = engine.memory.prefix.match(chain_root(lm.namespace()), ids_of(lm, asked[1]))
    assert gone.n_tokens < len(ids_of(lm, asked[1]))


def test_generated_tokens_are_prefix_of_what_follows(lm: LM) -> None:
    """All but the last, which has no KV; and that KV is exact."""
    engine = paged(lm, 8)
    request = text("a", prose(212, 10), max_new_tokens=9)
    output = ask(engine, request)
    ids = np.concatenate([ids_of(lm, request), output.tokens[:-1]]).astype(np.int64)
    matched = engine.memory.prefix.match(chain_root(lm.namespace()), ids)
    assert matched.n_tokens == len(ids)
    kv = PagedKV(engine.memory.pages, matched.held, len(ids))
    want, _ = exact(lm, ids)
    for layer in range(lm.n_layers):
        assert (kv.keys[layer] - want.keys[layer]).abs().max() <= 1e-4
        assert (kv.values[layer] - want.values[layer]).abs().max() <= 1e-4


# Pages and pieces ---------------------------------------------------------------------------


def fragment(engine: Engine, n: int = 400) -> None:
    """Leave only every other page free."""
    pages = engine.memory.pool.allocate(n)
    engine.memory.pages.grow(engine.memory.pool.n_pages)
    engine.memory.pool.release(pages[::2])


RULES = [NoRecompute(), EpicRecompute(0.3), CacheBlendRecompute(0.3), ZeroKV(), RandomKV()]


@pytest.mark.parametrize(
    ("rule", "page_size"),
    [*((rule, 4) for rule in RULES), (CacheBlendRecompute(0.3), 16)],
    ids=lambda x: x if isinstance(x, int) else type(x).__name__,
)
def test_kv_in_many_pieces_is_kv_in_one(lm: LM, rule: Any, page_size: int) -> None:
    """Prefix, moved chunks, the rule's changes, the question's pass and what is appended."""
    request, donors = rag("r", 2, 0, 1, max_new_tokens=4), [rag("a", 0), rag("b", 1), rag("c", 2)]
    done: list[Prefilled] = []
    for size in (page_size, 256):
        memory = MemorySettings(page_size=size)
        engine = tiny_engine(lm, recompute=rule, memory=memory, admit="none")
        if size == page_size:
            fragment(engine)
        engine.ingest(donors)
        done.append(engine.prefill(request))
    pieces, whole = done
    stretches = len(pieces.kv._runs)
    assert len(whole.kv._runs) == 1
    assert stretches > FEW if page_size == 4 else 1 < stretches <= FEW
    assert pieces.plan.matched.any()
    assert (pieces.computed == whole.computed).all()
    assert close(pieces.logits, whole.logits)
    n = pieces.plan.n_tokens
    for layer in range(lm.n_layers):
        for mine, theirs in zip(pieces.kv.read(layer, n), whole.kv.read(layer, n), strict=True):
            assert mine.shape == theirs.shape
            assert close(mine, theirs)
        mine, theirs = (d.kv.cut(n // 3, n // 2)[0][layer] for d in done)
        assert close(mine, theirs)
    rows = np.flatnonzero(pieces.plan.provenance == Provenance.NEW)
    looks = [lm.question_attention(d.prompt.ids, d.kv, rows) for d in done]
    assert close(*looks)
    for _ in range(3):
        logits = [lm.extend([7, 9], d.kv) for d in done]
        assert close(*logits)


def close(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal but for the order in which a kernel sums."""
    return bool((mine - theirs).abs().max() <= 1e-6 * max(1.0, float(theirs.abs().max())) * 4)


def test_one_step_of_many_is_each_ones_own(lm: LM) -> None:
    """Prompts shorter and longer than the windows: the same logits, KV at the right place."""
    lengths = [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 30, 57]
    engine = paged(lm, 4)
    kvs, alone = [], []
    for i, n in enumerate(lengths):
        ids = tokens(n, seed=40 + i)
        alone.append(exact(lm, ids, room=4)[0])
        kv = engine.memory.open(engine.memory.prefix.match(b"", ids), n + 4)
        lm.prefill(ids, kv, lambda _, n=n: torch.ones(n, dtype=torch.bool))  # type: ignore[misc]
        kvs.append(kv)
    for i in range(3):
        new = tokens(len(lengths), seed=70 + i).tolist()
        logits = lm.step(new, kvs)
        assert [kv.length for kv in kvs] == [n + i + 1 for n in lengths]
        for token, row, kv, own in zip(new, logits, kvs, alone, strict=True):
            assert (row - lm.extend([token], own)[-1]).abs().max() <= 1e-4
            for layer in range(lm.n_layers):
                for mine, theirs in zip(
                    kv.read(layer, kv.length), own.read(layer, own.length), strict=True
                ):
                    assert (mine - theirs).abs().max() <= 1e-4
    for kv in kvs:
        engine.memory.close(kv)
    assert_at_rest(engine)


def test_a_step_past_the_room_is_refused_before_anything_runs(llama: LM) -> None:
    engine = paged(llama, 4)
    request = text("a", prose(213, 3), max_new_tokens=0)
    done, roomy = engine.prefill(request, room=0), engine.prefill(request, room=40)
    steps = done.kv.capacity - done.kv.length
    for _ in range(steps):
        llama.step([5, 5], [done.kv, roomy.kv])
    length = roomy.kv.length
    with pytest.raises(KvsemError, match="do not fit"):
        llama.step([5, 5], [roomy.kv, done.kv])
    assert roomy.kv.length == length
    engine.memory.more(done.kv, done.kv.length + 1)
    llama.step([5, 5], [roomy.kv, done.kv])
    engine.drop(done)
    engine.drop(roomy)
    assert_at_rest(engine)


# What goes wrong ----------------------------------------------------------------------------


@contextmanager
def failing(lm: LM, error: BaseException, after: int = 0) -> Iterator[None]:
    """Layer 2 raises, from its ``after``-th call on."""
    calls = 0

    def hook(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error

    handle = lm.layers[2].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def contents(engine: Engine) -> tuple[Any, ...]:
    """Everything that a lookup could see, and the pages' states."""
    pool = engine.memory.pool
    blocks = {key: block.content for key, block in engine.memory.prefix._blocks.items()}
    states = [pool.state(page) for page in range(pool.n_pages)]
    return blocks, [entry.key for entry in engine.store], states, dict(engine.memory.evictions)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("after", [0, 2], ids=["prefill", "decode"])
def test_a_request_that_fails_leaves_nothing(
    lm: LM, cold: Cold, error: BaseException, after: int
) -> None:
    """Half-way through: no reference stays, nothing half-computed is published (ATOM PR 902)."""
    engine = tiny_engine(lm, recompute=AllRecompute())
    engine.ingest([rag("a", 0), rag("b", 1)])
    before = contents(engine)
    request = rag("c", 1, 0, max_new_tokens=6)
    with failing(lm, error, after), pytest.raises(type(error)):
        engine.generate(request)
    assert_at_rest(engine)
    assert contents(engine) == before
    output = ask(engine, request)
    assert output.plan.matches[2].kind == "chunk"
    cold.check(request, output)
    cold.check(request, ask(engine, request))


class Broken:
    """A rule that fails at a layer."""

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if layer == 2:
            raise RuntimeError("broken")
        return state.matched


def test_entries_are_let_go_where_putting_together_fails(
    llama: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are read, and afterwards by the rule (vllm PR 35931)."""
    engine = tiny_engine(llama, recompute=Broken(), admit="none")
    engine.ingest([rag("a", 0), rag("b", 1)])
    before, request = contents(engine), rag("c", 1, 0)
    with pytest.raises(RuntimeError, match="broken"):
        engine.generate(request)
    assert_at_rest(engine)
    assert contents(engine) == before
    held: list[int] = []

    def gather(lm: LM, kv: PagedKV, *args: Any) -> None:
        held.extend(engine.memory.pool.references(page) for page in kv.borrowed)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvsem.engine.gather", gather)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(request)
    assert held
    assert set(held) == {1}
    assert_at_rest(engine)
    assert contents(engine) == before
    monkeypatch.undo()
    engine.recompute = AllRecompute()
    Cold(llama).check(request, ask(engine, request))


def test_a_failed_ingestion_leaves_nothing(llama: LM) -> None:
    engine = semantic(llama)
    with failing(llama, RuntimeError("broken")), pytest.raises(RuntimeError):
        engine.ingest([rag("a", 0)])
    assert_at_rest(engine)
    assert engine.memory.nbytes == len(engine.store) == len(engine.memory.prefix) == 0
    assert engine.ingest([rag("a", 0)]) == 1
    assert_at_rest(engine)


@pytest.mark.parametrize("at", ["write", "cut", "append"])
def test_pages_are_let_go_where_storing_is_interrupted(
    llama: LM, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """At any of the first copies into or out of pages, at ingestion and when a request leaves."""
    verb, request = getattr(PagedKV, at), rag("a", 0, 1)
    for until in range(30):
        engine, left = semantic(llama), until

        def interrupt(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return verb(*args)

        monkeypatch.setattr(PagedKV, at, interrupt)
        for act in (engine.ingest, lambda asked, serve=engine.generate: serve(asked[0])):
            left = until
            with suppress(KeyboardInterrupt):
                act([request])
            assert_at_rest(engine)
        monkeypatch.undo()
        Cold(llama).check(request, ask(engine, request))


def test_memory_that_cannot_grow_leaves_the_pool_as_it_was(
    llama: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = tiny_engine(llama), rag("a", 0)

    def grow(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.memory.pages, "grow", grow)
    for act in (engine.generate, lambda request: engine.ingest([request])):
        with pytest.raises(MemoryError):
            act(request)
        assert_at_rest(engine)
    monkeypatch.undo()
    Cold(llama).check(request, ask(engine, request))


def test_kv_that_is_not_finite_is_no_prefix(llama: LM) -> None:
    """Broken once while decoding: what was generated then is computed anew (TensorRT-LLM#2217)."""
    engine, request = paged(llama, 4), text("a", prose(218, 12), max_new_tokens=5)
    calls = 0

    def poison(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal calls
        calls += 1
        return (args[0] * float("nan"), *args[1:]) if calls == 3 else args

    handle = llama.layers[2].register_forward_pre_hook(poison)
    broken = ask(engine, request)
    handle.remove()
    assert broken.logits.isfinite().all()
    assert engine.memory.n_not_finite == 1
    ids = np.concatenate([ids_of(llama, request), broken.tokens]).astype(np.int64)
    known = engine.memory.prefix.match(chain_root(llama.namespace()), ids).n_tokens
    assert known <= broken.plan.n_tokens + 1
    Cold(llama).check(request, ask(engine, request))


def test_a_pool_too_small_is_refused_in_one_line_and_nothing_changes(llama: LM) -> None:
    engine = tiny_engine(llama, memory=MemorySettings(page_size=4, pool_tokens=120))
    small, big = rag("a", 0, max_new_tokens=1), rag("b", 0, 1, 2, 3)
    assert len(ids_of(llama, big)) > 120
    Cold(llama).check(small, ask(engine, small))
    before = contents(engine)
    for verb in (engine.generate, engine.prefill, engine.generate):
        said = "request 'b' needs [0-9]+ tokens of KV, memory.pool_tokens is 120"
        with pytest.raises(PoolFullError, match=said) as raised:
            verb(big)
        assert "\n" not in str(raised.value)
        assert_at_rest(engine)
        assert contents(engine) == before
    again = ask(engine, small)
    assert again.plan.n_paged == again.plan.n_tokens - 1


def test_a_request_that_fits_only_without_what_it_would_read_computes(lm: LM, cold: Cold) -> None:
    """The chunk entries give way to the request that they were meant for."""
    request = rag("c", 1, 0, max_new_tokens=2)
    n_pages = -(-(len(ids_of(lm, request)) + 2) // 4)
    engine = tiny_engine(lm, memory=MemorySettings(page_size=4, pool_tokens=4 * n_pages))
    engine.ingest([rag("a", 0), rag("b", 1)])
    assert engine.plan(request).runs
    output = ask(engine, request)
    assert output.plan.miss == "pool_full"
    assert "pool_full" in {match.reason for match in output.plan.matches}
    assert output.plan.runs == ()
    assert not output.plan.matched.any()
    cold.check(request, output)


def test_a_request_in_flight_keeps_its_pages_from_others(lm: LM, cold: Cold) -> None:
    """Others are refused rather than take what is held; once it has left they are served."""
    first, second = text("a", prose(214, 20)), text("b", prose(215, 20))
    n_pages = -(-(max(len(ids_of(lm, r)) for r in (first, second)) + 3) // 8) + 1
    engine = paged(lm, 8, n_pages)
    flight = engine.prefill(first)
    before = contents(engine)
    with pytest.raises(PoolFullError, match=f"pages asked for, 1 of the pool's {n_pages}") as said:
        engine.generate(second)
    assert "\n" not in str(said.value)
    assert contents(engine) == before
    engine.memory.pool.check()
    answer = lm.decode(flight.first, flight.kv, 3, lm.stop_tokens)
    want, _ = cold.answer(ids_of(lm, first), 3)
    assert answer == want
    engine.leave(flight, answer)
    assert_at_rest(engine)
    cold.check(second, ask(engine, second))
    assert engine.memory.evictions["capacity"] > 0


# Exact and approximate ----------------------------------------------------------------------


def edited(passage: str) -> str:
    words = passage.split(" ")
    words[8] = "lantern"
    return " ".join(words)


def test_approximate_kv_is_never_published_as_prefix(lm: LM, plain: Any) -> None:
    """Served with semantic reuse; the same prompt without it equals cold, logits and KV."""
    engine = semantic(lm)
    engine.ingest([rag("a", 0), rag("b", 1)])
    request = Request.rag(
        "e", [PASSAGES[1], edited(PASSAGES[0])], "Why?", system=SYSTEM, max_new_tokens=6
    )
    first = ask(engine, request)
    assert first.counts()["semantic"] > 5
    start = int(np.flatnonzero(first.plan.matched)[0])
    root, ids = chain_root(lm.namespace()), ids_of(lm, request)
    assert engine.memory.prefix.match(root, ids).n_tokens <= start
    engine.reuse = frozenset({"prefix"})
    done = engine.prefill(request)
    assert 0 < done.plan.n_paged <= start
    want, _ = exact(lm, ids)
    for layer in range(lm.n_layers):
        assert (done.kv.keys[layer] - want.keys[layer]).abs().max() <= 1e-4
        assert (done.kv.values[layer] - want.values[layer]).abs().max() <= 1e-4
    assert (done.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4
    engine.drop(done)
    Cold(lm).check(request, ask(engine, request))


def test_growing_prompts_reuse_more_and_are_labelled_honestly(lm: LM) -> None:
    """The fresh tail behind a moved chunk is stored, but never as exact (LMCache#2029)."""
    engine = tiny_engine(lm)
    engine.ingest([rag("a", 0), rag("b", 1)])
    root = chain_root(lm.namespace())
    reused = []
    for passages in ((1, 0), (1, 0, 2), (1, 0, 2, 3)):
        request = rag(str(passages), *passages)
        output = ask(engine, request)
        start = int(np.flatnonzero(output.plan.matched)[0])
        reused.append(int((output.plan.provenance != Provenance.NEW).sum()))
        assert engine.memory.prefix.match(root, ids_of(lm, request)).n_tokens <= start
        last = next(e for e in engine.store if e.text == PASSAGES[passages[-1]])
        assert last.depth == (0 if passages[-1] == 0 else last.depth)
    assert reused == sorted(set(reused))
    again = ask(engine, rag("again", 1, 0, 2, 3))
    assert again.plan.matches[4].kind == "chunk"
    assert {e.text: e.depth > 0 for e in engine.store} == {
        PASSAGES[0]: False, PASSAGES[1]: False, PASSAGES[2]: True, PASSAGES[3]: True,
    }  # fmt: skip
    engine.reuse = frozenset({"prefix"})
    request = rag("exactly", 1, 0, 2, 3)
    Cold(lm).check(request, ask(engine, request))


def test_log_probabilities_of_the_prompt_are_computed(lm: LM, plain: Any) -> None:
    """Nothing is read from the cache, which knows it all; what was computed is left there."""
    engine = tiny_engine(lm)
    request = rag("a", 0, 1)
    asked = rag("b", 0, 1, prompt_logprobs=True)
    ids = ids_of(lm, request)
    for warm in (False, True):
        if warm:
            ask(engine, request)
        done = engine.prefill(asked)
        assert (done.plan.n_paged, done.plan.runs) == (0, ())
        assert not (done.plan.provenance != Provenance.NEW).any()
        assert done.computed.all()
        got = done.prompt_logprobs
        assert got is not None
        assert got.dtype == torch.float32
        logits = plain_logits(plain, ids)
        want = logits.log_softmax(-1)[:-1].gather(-1, torch.from_numpy(ids[1:])[:, None])[:, 0]
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-4
        assert (done.logits - logits[-1]).abs().max() <= 1e-4
        engine.leave(done)
        assert_at_rest(engine)
    fresh = tiny_engine(lm)
    ask(fresh, asked)
    output = ask(fresh, request)
    assert output.plan.n_paged == len(ids) - 1
    assert engine.prefill(request).prompt_logprobs is None


# Keys ---------------------------------------------------------------------------------------


def test_colliding_keys_reuse_nothing_wrong(monkeypatch: pytest.MonkeyPatch, llama: LM) -> None:
    """Page keys of 4 bits: the tokens decide, and collisions are counted (GHSA-rm76-4mrf-v9r8)."""
    monkeypatch.setattr(
        "kvsem.memory.prefix.page_key",
        lambda parent, content: bytes([sum(parent + content) % 16]) * 32,
    )
    engine, cold = paged(llama, 4), Cold(llama)
    asked = [text(f"{i}", prose(400 + i, 6), max_new_tokens=2) for i in range(60)]
    for request in [*asked, *asked]:
        cold.check(request, ask(engine, request))
    assert engine.memory.prefix.n_collisions > 20
    assert 0 < len(engine.memory.prefix) <= 16
    assert cold.n_excused == 0


def test_tenants_share_nothing(llama: LM) -> None:
    """Neither pages, chunks nor similar ones; and each finds its own (llm-d-router#1389)."""
    engine = semantic(llama)
    engine.ingest([rag("i", 0, tenant="A")])
    mine, near = rag("a", 0, 1, tenant="A"), edited(PASSAGES[0])
    ask(engine, mine)
    for tenant in ("B", "", "A ", "a"):
        output = ask(engine, rag("b", 0, 1, tenant=tenant))
        assert output.counts()["new"] == output.plan.n_tokens
        assert {m.reason for m in output.plan.matches} == {"unknown"}
        similar = Request.rag(
            "s", [PASSAGES[2], near], "Why?", system=SYSTEM, tenant=f"{tenant}-", max_new_tokens=1
        )
        assert ask(engine, similar).counts()["new"] == output.plan.n_tokens + len(
            ids_of(llama, similar)
        ) - len(ids_of(llama, rag("b", 0, 1)))
    own = ask(engine, mine)
    assert own.plan.n_paged == own.plan.n_tokens - 1
    own = ask(engine, rag("a", 1, 0, tenant="A"))
    assert own.counts()["chunk"] > 10
    similar = Request.rag("s", [PASSAGES[2], near], "Why?", system=SYSTEM, tenant="A")
    assert ask(engine, similar).counts()["semantic"] > 5


def test_a_guess_costs_what_a_random_prompt_costs(llama: LM) -> None:
    """What one tenant asked, or nearly so, cannot be told from the work of another's probe."""
    engine = semantic(llama, admit="none")
    engine.admit = "all"
    ask(engine, rag("secret", 0, tenant="victim"))
    engine.admit = "none"
    secret = ids_of(llama, rag("secret", 0))
    n = len(secret)
    probes = {
        "guessed": PASSAGES[0],
        "near": edited(PASSAGES[0]),
        "random": prose(777, 20),
        "other": prose(778, 20),
    }
    by_length: dict[int, set[int]] = {}
    for passage in probes.values():
        request = Request.rag("p", [passage], "Why?", system=SYSTEM, tenant="prober")
        output = ask(engine, request)
        assert output.counts()["new"] == output.plan.n_tokens
        work = output.cost.multiplications
        by_length.setdefault(output.plan.n_tokens, set()).add(work)
        assert work == llama.multiplications(np.ones((llama.n_layers, output.plan.n_tokens), bool))
    assert n in by_length
    assert all(len(work) == 1 for work in by_length.values())


def test_the_salt_is_the_configurations(llama: LM) -> None:
    """Another salt is another namespace; the same one is the same; a request has no say."""
    engine, same, other = (paged(llama, salt=salt) for salt in ("x", "x", "y"))
    names = [e._names("t")[0] for e in (engine, same, other, paged(llama))]
    assert names[0] == names[1]
    assert len(set(names)) == 3
    request = text("a", prose(216, 10), tenant="t")
    ask(engine, request)
    for a, b, hits in ((engine, same, True), (engine, other, False)):
        b.memory.pool, b.memory.prefix = a.memory.pool, a.memory.prefix
        b.memory.pages = a.memory.pages
        plan = b.plan(request)
        assert (plan.n_paged > 0) == hits
    assert "salt" not in Request.__dataclass_fields__
    assert paged(llama, salt="x").plan(text("a", "x", tenant="x")).n_paged == 0


def test_how_an_answer_is_made_does_not_change_what_is_found(llama: LM) -> None:
    """KV does not depend on how many tokens follow (GPTCache#527, the other way round)."""
    engine = tiny_engine(llama, admit="none")
    engine.ingest([rag("a", 0), rag("b", 1)])
    plans = [engine.plan(rag("c", 1, 0, max_new_tokens=n)) for n in (0, 1, 50)]
    for plan in plans:
        assert (plan.n_paged, plan.runs) == (plans[0].n_paged, plans[0].runs)
        assert (plan.provenance == plans[0].provenance).all()
    assert plans[0].n_paged > 0
    assert plans[0].runs
    counts = [ask(engine, rag("c", 1, 0, max_new_tokens=n)).counts() for n in (0, 1, 50)]
    assert counts[0] == counts[1] == counts[2]


def test_random_prompts_hit_nothing_also_when_tried_again(llama: LM) -> None:
    """A refused request that is tried again does not hit itself (vllm#25780)."""
    rng = np.random.default_rng(3)
    engine = paged(llama, 4, 24, reuse=("prefix", "segment", "chunk"))
    n_hits = n_tokens = n_refused = 0
    for i in range(40):
        letters = "".join(chr(int(c)) for c in rng.integers(0x4E00, 0x9000, 20))
        request = text(f"{i}", letters, max_new_tokens=2)
        flight = engine.prefill(text(f"f{i}", letters[::-1], max_new_tokens=0)) if i % 2 else None
        if flight:
            for _ in range(3):
                with pytest.raises(PoolFullError):
                    engine.generate(request)
                n_refused += 1
            engine.leave(flight)
        output = ask(engine, request)
        n_hits += output.plan.n_tokens - output.counts()["new"]
        n_tokens += output.plan.n_tokens
    assert n_refused == 60
    assert n_hits / n_tokens < 0.05
    assert sum(b.hits for b in engine.memory.prefix._blocks.values()) <= 40


# What is gone -------------------------------------------------------------------------------


def test_an_evicted_entry_is_in_no_store_and_no_index(llama: LM) -> None:
    engine = semantic(llama, admit="none", memory=MemorySettings(page_size=4, pool_tokens=160))
    engine.ingest([rag("a", 0)])
    entry = next(iter(engine.store))
    namespace = llama.namespace()
    near = edited(PASSAGES[0])
    assert engine.vectors.near(namespace, [near], 4)[0][0][0] == entry.key
    engine.admit = "all"
    engine.reuse = frozenset({"prefix"})
    for i in range(4):
        ask(engine, text(f"{i}", prose(500 + i, 25)))
    assert engine.store.get(entry.key) is None
    assert engine.store.was_evicted(entry.key)
    assert all(key != entry.key for key, _ in engine.vectors.near(namespace, [near], 9)[0])
    for layers in (entry.keys, entry.values):
        with pytest.raises(KvsemError, match="given back"):
            _ = layers[0]
    engine.reuse = frozenset({"prefix", "segment", "chunk", "semantic"})
    engine.admit = "none"
    request = rag("b", 0)
    assert engine.plan(request).matches[1].reason == "evicted"
    Cold(llama).check(request, ask(engine, request))


def test_entries_and_pages_have_one_budget(llama: LM) -> None:
    """Chunks that are read stay, prefix pages that are not go, and the other way round."""
    engine = tiny_engine(llama, memory=MemorySettings(page_size=4, pool_tokens=480), admit="none")
    engine.ingest([rag("a", 0), rag("b", 1)])
    keys = [entry.key for entry in engine.store]
    engine.admit = "all"
    cold = Cold(llama)
    for i in range(12):
        request = text(f"{i}", prose(520 + i, 25), max_new_tokens=1)
        cold.check(request, ask(engine, request))
        engine.admit = "none"
        assert ask(engine, rag(f"r{i}", 1, 0, max_new_tokens=0)).counts()["chunk"] > 10
        engine.admit = "all"
        assert engine.memory.pool.n_cached <= 120
    assert engine.memory.evictions["capacity"] > 0
    assert all(engine.store.get(key) is not None for key in keys)


def scale(lm: LM, by: float) -> None:
    with torch.no_grad():
        lm.model.model.layers[1].self_attn.k_proj.weight.mul_(by)


def test_kv_of_an_old_version_is_a_miss_and_goes_first() -> None:
    """Weights changed in place between two requests: 0 hits, answers of the new weights."""
    lm, changed = tiny_lm("llama"), tiny_lm("llama")
    scale(changed, 1.05)
    engine = tiny_engine(lm, memory=MemorySettings(page_size=4, pool_tokens=400))
    old, request = text("o", prose(530, 25)), rag("a", 0, 1)
    ask(engine, old)
    ask(engine, request)
    assert ask(engine, request).plan.n_paged > 0
    n_old = len(engine.memory.prefix) + len(engine.store)
    scale(lm, 1.05)
    output = ask(engine, request)
    assert (output.plan.n_paged, output.plan.miss) == (0, "old_version")
    assert output.counts()["new"] == output.plan.n_tokens
    cold = Cold(changed)
    cold.check(request, output)
    cold.check(request, ask(engine, request))
    new = {key for key, b in engine.memory.prefix._blocks.items() if b.version == lm.namespace()}
    assert new
    i = 0
    while engine.memory.pool.n_old_blocks:
        ask(engine, text(f"{i}", prose(540 + i, 20)))
        if engine.memory.pool.n_old_blocks:
            assert new <= set(engine.memory.prefix._blocks)
            assert engine.memory.evictions["capacity"] == 0
        i += 1
    assert engine.memory.evictions["old_version"] == n_old


def test_a_request_that_saw_two_versions_leaves_nothing() -> None:
    """Weights changed while it was in flight: its KV is neither version's."""
    lm, changed = tiny_lm("llama"), tiny_lm("llama")
    scale(changed, 1.5)
    engine = semantic(lm)
    request = rag("a", 0, 1)
    flight = engine.prefill(request)
    scale(lm, 1.5)
    engine.leave(flight, lm.decode(flight.first, flight.kv, 3, lm.stop_tokens))
    assert_at_rest(engine)
    output = ask(engine, request)
    assert output.counts()["new"] == output.plan.n_tokens
    Cold(changed).check(request, output)


Look = Callable[[PagedKV], object]


@pytest.mark.parametrize("look", [lambda kv: kv.read(0, 1), lambda kv: kv.keys[0]])
def test_kv_that_was_given_back_cannot_be_used(llama: LM, look: Look) -> None:
    engine = paged(llama)
    for end in (engine.leave, engine.drop):
        done = engine.prefill(text("a", prose(217, 5)))
        look(done.kv)
        end(done)
        with pytest.raises(KvsemError, match="given back"):
            look(done.kv)
        with pytest.raises(KvsemError, match="given back"):
            llama.extend([5], done.kv)
        with pytest.raises(KvsemError, match="given back"):
            end(done)
        assert_at_rest(engine)


def test_the_models_of_the_tests_are_as_they_were(lm: LM, kind: str) -> None:
    """The failures above were made by hooks: none is left."""
    ids = tokens(20)
    assert (exact(lm, ids)[1] - plain_logits(tiny_model(kind), ids)[-1]).abs().max() <= 1e-4
