"""One request, four steps: plan, prefill, decode, admit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from kvsem.admit import Admission
from kvsem.aligners.base import Aligner
from kvsem.aligners.edit import EditAligner
from kvsem.chunkers.base import Chunker
from kvsem.chunkers.segment import SegmentChunker
from kvsem.contexts.base import Donor, DonorContext
from kvsem.contexts.in_company import InCompany
from kvsem.embedders.base import Embedder
from kvsem.embedders.hashing import HashingEmbedder
from kvsem.errors import KvsemError, SettingError, check_count, check_range
from kvsem.fingerprint import of_tenant
from kvsem.forward import Job
from kvsem.gates.all_of import AllOf
from kvsem.gates.base import Gate
from kvsem.gates.lexical import LexicalGate
from kvsem.gates.threshold import ThresholdGate
from kvsem.index.base import ChunkIndex
from kvsem.index.flat import FlatIndex
from kvsem.ingest import build
from kvsem.keys import digest
from kvsem.lm import LM
from kvsem.memory.gather import gather
from kvsem.memory.memory import Memory, MemorySettings, exact_tokens
from kvsem.memory.pages import PagedKV
from kvsem.memory.pool import PoolFullError
from kvsem.memory.prefix import Matched
from kvsem.memory.store import ChunkStore
from kvsem.memory.vectors import ChunkVectors
from kvsem.model import hand
from kvsem.planner import KINDS_OF_REUSE, Planner
from kvsem.prompt import Prompt, render
from kvsem.recompute.base import Recompute
from kvsem.recompute.none import NoRecompute
from kvsem.repair import Repair
from kvsem.types import (
    ChunkKV,
    Cost,
    Output,
    Provenance,
    Request,
    ReusePlan,
)

Admit = Literal["all", "exact_only", "none"]
Track = Callable[[Sequence[Donor]], Iterable[Donor]]
# logits at the last position, what was computed, and log probabilities on request
Computed = tuple[torch.Tensor, np.ndarray, torch.Tensor | None]


@dataclass
class Loaded:
    """A request whose reused KV is in place, and of which nothing is computed yet. Its pages
    belong to it until `Engine.compute` or `Engine.drop`."""

    request: Request
    prompt: Prompt
    plan: ReusePlan
    kv: PagedKV
    job: Job  # what is left to forward
    n_rows: int  # tokens that its first layer computes
    repair: Repair
    namespace: str
    depth: int  # of the entries that it was put together from, the deepest
    started: float
    plan_ms: float
    load_ms: float
    look_ms: float  # passes ahead of the last one


@dataclass
class Prefilled:
    """A request up to its first token. ``kv`` holds its KV, in pages that belong to it until
    `Engine.leave` or `Engine.drop`; what follows may be appended."""

    request: Request
    prompt: Prompt
    plan: ReusePlan
    kv: PagedKV
    logits: torch.Tensor  # fp32 [vocab]
    first: int
    computed: np.ndarray  # bool [layers, n]
    cost: Cost
    gauges: Mapping[str, float] = field(default_factory=dict)  # of the memory, this one in flight
    prompt_logprobs: torch.Tensor | None = None  # fp32 [n - 1], of tokens 1 … on request
    namespace: str = ""  # that its KV belongs to
    depth: int = 0  # of the entries that it was put together from, the deepest
    unsettled: np.ndarray | None = None  # bool [n]: recomputed in a pass before the last only


class Engine:
    """Semantic KV reuse around one `LM`.

    Parts that are left out are those of ``conf/arm/base.yaml``, but without an ``embedder`` only
    identical content is reused. Texts whose hashed words agree by ``surface_score`` (cosine) are
    near without asking it; None: it is always asked. ``index`` makes an empty index, given dim and
    identity.
    A part that reads the model (`kvsem.model.UsesModel`) is given it here.
    ``admit``: what a served request leaves behind: ``all``, ``exact_only`` (nothing computed on
    reused KV) or ``none`` (the cache is read-only). ``reuse``: what may be reused: ``prefix``
    (exact prefix pages), ``segment`` (a whole chunk behind the very tokens it was computed
    behind), ``chunk`` (identical content behind others; includes segment), ``semantic``.
    """

    def __init__(
        self,
        lm: LM,
        *,
        chunker: Chunker | None = None,
        aligner: Aligner | None = None,
        gate: Gate | None = None,
        recompute: Recompute | None = None,
        context: DonorContext | None = None,
        embedder: Embedder | None = None,
        index: Callable[..., ChunkIndex] = FlatIndex,
        admit: Admit = "all",
        reuse: Iterable[str] = KINDS_OF_REUSE,
        memory: MemorySettings | None = None,
        n_candidates: int = 4,
        surface_score: float | None = 0.95,
        seed: int = 0,
    ) -> None:
        if unknown := set(reuse := frozenset(reuse)) - KINDS_OF_REUSE:
            raise SettingError("reuse", sorted(unknown)[0], f"one of {sorted(KINDS_OF_REUSE)}")
        if admit not in ("all", "exact_only", "none"):
            raise SettingError("admit", admit, "all, exact_only or none")
        check_count("n_candidates", n_candidates, 1)
        self.lm = lm
        self.chunker: Chunker = chunker or SegmentChunker()
        self.aligner: Aligner = aligner or EditAligner()
        self.gate: Gate = gate or AllOf((ThresholdGate(0.75), LexicalGate()))
        self.recompute: Recompute = recompute or NoRecompute()
        self.context: DonorContext = context or InCompany()
        self.admit, self.n_candidates, self.seed = admit, n_candidates, seed
        self.reuse = reuse
        for part in (self.chunker, self.aligner, self.gate, self.context, embedder):
            hand(part, lm)
        self.vectors = _vectors(embedder, index, surface_score)
        self.memory = Memory(lm, memory, forgotten=self.vectors.forget)

    @property
    def admission(self) -> Admission:
        """How KV gets into the memory."""
        return Admission(self.lm, self.memory, self.vectors, self.reuse)

    @property
    def store(self) -> ChunkStore:
        """The chunk entries, in the pages of ``memory``."""
        return self.memory.chunks

    # -- ingest ---------------------------------------------------------------------------------

    def ingest(
        self, texts: Iterable[str | Request], system: str | None = None, track: Track = iter
    ) -> int:
        """Compute and store the KV of passages ahead of time; returns how many entries are new.

        Plain texts each count as a request of their own (behind ``system``); of a `Request`, its
        passages are taken. The donor context decides what stands ahead of each. ``track`` wraps
        the donors, for a progress bar.
        """
        requests = [
            t if isinstance(t, Request) else Request.rag(f"text-{i}", [t], "?", system=system)
            for i, t in enumerate(texts)
        ]
        donors = self.context.donors(requests, self.seed)
        tenants = {request.tenant for request in requests}
        if len(tenants) > 1:
            raise KvsemError("ingest takes the requests of one tenant at a time")
        before = len(self.store)
        for donor in track([] if self._is_plain else donors):
            namespace, _ = self._names(next(iter(tenants), ""))
            build(donor, self.lm, self._planner(namespace), self.admission)
        return len(self.store) - before

    def share(self, other: Engine) -> None:
        """Reuse what ``other`` ingested, out of the same pool.

        Both engines must be read-only (``admit=none``) and their pool without a limit: then
        neither changes what the other finds.
        """
        if (self.admit, other.admit) != ("none", "none"):
            raise KvsemError("only engines with admit=none share what was ingested")
        if other.memory.pool.limit is not None:
            raise KvsemError("only a pool without a limit is shared")
        if self.memory.settings.salt != other.memory.settings.salt:
            raise KvsemError("only engines of one memory.salt share what was ingested")
        self.memory = other.memory.view()
        self.vectors.share(other.vectors)

    @property
    def _is_plain(self) -> bool:
        """Whether plain transformers answers, with nothing reused."""
        return bool(self.lm.hooked) and not self.lm.resumes

    def forget(self, key: str) -> bool:
        """Remove an entry from the store and every index."""
        return self.store.forget(key)

    def _names(self, tenant: str) -> tuple[str, str]:
        """The namespace of ``tenant``, and the version of the model it belongs to; what other
        versions left behind goes first from now on."""
        version = self.lm.namespace()
        self.memory.pool.renew(version)
        return of_tenant(version, tenant, self.memory.settings.salt), version

    # -- plan -----------------------------------------------------------------------------------

    def _planner(self, namespace: str) -> Planner:
        moved = "; ".join(filter(None, map(self._off, ("moved_chunk", "blend"))))
        return Planner(
            self.chunker,
            self.aligner,
            self.gate,
            self.store,
            self.vectors,
            namespace,
            moved,
            self.n_candidates,
            self._off("exact_prefix"),
            self.reuse,
        )

    def _off(self, capability: str) -> str:
        """Why the model cannot do something, as its self-check says; empty where it can."""
        ok, reason = self.lm.support.get(capability, (False, "not checked"))
        return "" if ok else f"{capability} is off: {reason}"

    def plan(self, request: Request) -> ReusePlan:
        """What would be reused for ``request``, and why not the rest."""
        prompt = render(self.lm.tokenizer, request)
        return self._plan(request, prompt, self._names(request.tenant)[0])[0]

    def _plan(self, request: Request, prompt: Prompt, namespace: str) -> tuple[ReusePlan, Matched]:
        """The plan, and the prefix pages that it starts with: never of the last token."""
        planner = self._planner(namespace)
        if request.prompt_logprobs:  # KV that is read has no logits
            planner = replace(planner, off="log probabilities of the prompt were asked for")
        if reason := self._unsteady(request, len(prompt.ids)):
            planner = replace(planner, off=reason)
        matched = Matched(reason=planner.off or "reuse of prefix is off")
        if "prefix" in self.reuse and not planner.off:
            matched = self.admission.match(namespace, prompt.ids[:-1])
        return planner.plan(prompt, matched.n_tokens, matched.reason), matched

    def _unsteady(self, request: Request, n: int) -> str:
        """Why KV of shorter prompts is wrong in this one; empty where it is right."""
        steady, whole = self.lm.steady_tokens, n + request.max_new_tokens
        if whole <= steady:
            return ""
        return f"rope: its frequencies change past {steady} tokens, prompt and answer have {whole}"

    def render(self, request: Request) -> Prompt:
        """The tokens of ``request``, as `prefill` sees them."""
        return render(self.lm.tokenizer, request)

    def check(self, request: Request, n: int | None = None) -> None:
        """Raise `KvsemError` where ``request`` (of ``n`` tokens) is empty or too long."""
        n = len(render(self.lm.tokenizer, request).ids) if n is None else n
        self.lm.check_prompt(n, request.max_new_tokens, f"request {request.id!r}")
        self.memory.check_room(n + request.max_new_tokens, f"request {request.id!r}")

    # -- prefill --------------------------------------------------------------------------------

    def prefill(self, request: Request, room: int | None = None) -> Prefilled:
        """From text to first token. ``room``: tokens that may be appended to the KV afterwards.

        Raises `PoolFullError`, and changes nothing, where the pool has no pages for it.
        """
        return self.compute([self.load(request, room)])[0]

    def prefill_many(self, requests: Sequence[Request]) -> list[Prefilled]:
        """`prefill` of several requests in one forward: all of them or, where the pool has no
        pages for all, none. What they could reuse of each other is not there yet."""
        loaded: list[Loaded] = []
        try:
            for request in requests:
                loaded.append(self.load(request))
        except BaseException:
            for one in loaded:
                self.drop(one)
            raise
        return self.compute(loaded)

    def load(self, request: Request, room: int | None = None) -> Loaded:
        """The first half of `prefill`: what is reused of ``request`` is planned and put in place.

        Raises `PoolFullError`, and changes nothing, where the pool has no pages for it.
        """
        start = time.perf_counter()
        prompt = render(self.lm.tokenizer, request)
        n = len(prompt.ids)
        room = request.max_new_tokens if room is None else room
        self.check(request, n)
        namespace, _ = self._names(request.tenant)
        with self.memory.pool.lock:  # what is planned must not be evicted before it is held
            plan, matched = self._plan(request, prompt, namespace)
            planned = time.perf_counter()
            plan, kv = self._open(plan, matched, prompt, n + room)
        try:
            entries = self._entries(plan)
            gather(self.lm, kv, plan.runs, entries)
            self.memory.settle(kv)
            seed = int(digest("seed", run=self.seed, r=request.id)[:15], 16)
            repair = Repair.of(self.lm, self.recompute, plan, entries, kv, prompt.ids, seed)
            self.lm.wait()
            loaded = time.perf_counter()
            job, n_rows = repair.ready()
            looked = time.perf_counter()
        except BaseException:
            self.memory.close(kv)
            raise
        return Loaded(
            request,
            prompt,
            plan,
            kv,
            job,
            n_rows,
            repair,
            namespace,
            max((entry.depth for entry in entries.values()), default=0),
            start,
            (planned - start) * 1e3,
            (loaded - planned) * 1e3,
            (looked - loaded) * 1e3,
        )

    def compute(self, loaded: Sequence[Loaded]) -> list[Prefilled]:
        """The second half of `prefill`, of several requests in one forward; where it fails, all
        pages are given back.

        What was multiplied is counted by request. Times of the forward are the batch's: each
        request has ``prefill_ms`` of all, and ``ttft_ms`` from where the first one started.
        """
        start = time.perf_counter()
        try:
            results = self._forward(loaded)
            firsts = [int(logits.argmax()) for logits, _, _ in results]
        except BaseException:
            for one in loaded:
                self.drop(one)
            raise
        done = time.perf_counter()
        ttft_ms = (done - min((one.started for one in loaded), default=done)) * 1e3
        gauges = self.memory.gauges()
        return [
            Prefilled(
                one.request,
                one.prompt,
                one.plan,
                one.kv,
                logits,
                first,
                one.repair.computed(computed),
                self._cost(one, computed, (done - start) * 1e3, ttft_ms),
                gauges,
                logprobs,
                one.namespace,
                one.depth,
                one.repair.unsettled(computed),
            )
            for one, first, (logits, computed, logprobs) in zip(
                loaded, firsts, results, strict=True
            )
        ]

    def _cost(self, one: Loaded, computed: np.ndarray, forward_ms: float, ttft_ms: float) -> Cost:
        heads = len(one.prompt.ids) if one.request.prompt_logprobs else 1
        return Cost(
            plan_ms=one.plan_ms,
            load_ms=one.load_ms,
            prefill_ms=one.look_ms + forward_ms,
            ttft_ms=ttft_ms,
            multiplications=self.lm.multiplications(computed, heads) + one.repair.multiplications,
            recomputed_layer_tokens=int((computed & one.plan.matched).sum())
            + one.repair.layer_tokens,
            kv_bytes=self.memory.nbytes,
        )

    def _open(
        self, plan: ReusePlan, matched: Matched, prompt: Prompt, n_tokens: int
    ) -> tuple[ReusePlan, PagedKV]:
        """Pages for the request. Where the chunks it would read leave it no room, it goes without
        them: what nobody reads may be evicted for it."""
        entries = list(dict.fromkeys(run.entry for run in plan.runs))
        try:
            kv = self.memory.open(matched, n_tokens, entries)
        except PoolFullError:
            if not entries and not matched.tail:
                raise
            whole = replace(
                matched,
                n_tokens=len(matched.blocks) * self.memory.settings.page_size,
                tail=None,
                reason="pool_full",
            )
            none = replace(self._planner(""), off="pool_full")
            plan, entries = none.plan(prompt, whole.n_tokens, "pool_full"), []
            kv = self.memory.open(whole, n_tokens)
            matched = whole
        self.memory.prefix.use(matched)
        self.store.use(entries)
        return plan, kv

    def _forward(self, loaded: Sequence[Loaded]) -> list[Computed]:
        """All that need one row of logits together, the others one by one."""
        jobs = [one.job for one in loaded if not one.request.prompt_logprobs]
        packed = iter(self.lm.prefill_many(jobs))
        return [
            self._with_logprobs(one) if one.request.prompt_logprobs else (*next(packed), None)
            for one in loaded
        ]

    def _with_logprobs(self, one: Loaded) -> Computed:
        ids = one.prompt.ids
        logits = self.lm.extend(ids.tolist(), one.kv)
        log_probs = logits[:-1].log_softmax(-1)
        picked = log_probs[torch.arange(len(log_probs)), torch.from_numpy(ids[1:])]
        return logits[-1], np.ones((self.lm.n_layers, len(ids)), dtype=bool), picked

    def _entries(self, plan: ReusePlan) -> dict[str, ChunkKV]:
        found = {run.entry: self.store.get(run.entry) for run in plan.runs}
        return {key: entry for key, entry in found.items() if entry is not None}

    # -- decode and admit -----------------------------------------------------------------------

    def generate(self, request: Request) -> Output:
        """Answer ``request`` greedily, then leave its KV behind as ``admit`` allows.

        A model without selective prefill answers by plain transformers, exactly.
        """
        if self._is_plain:
            return self._generate_plain(request)
        done = self.prefill(request)
        start = time.perf_counter()
        steps = request.max_new_tokens
        try:
            tokens = self._decode(done, steps)
        except BaseException:
            self.drop(done)
            raise
        decoded = time.perf_counter()
        self.leave(done, tokens)
        cost = replace(
            done.cost,
            decode_ms_per_token=(decoded - start) * 1e3 / max(1, len(tokens) - 1),
            store_ms=(time.perf_counter() - decoded) * 1e3,
        )
        text = self.lm.tokenizer.decode(tokens, skip_special_tokens=True)
        provenance = final_provenance(done.plan, done.computed)
        return Output(
            tuple(tokens),
            text,
            done.logits,
            done.plan,
            provenance,
            done.computed,
            cost,
            done.gauges,
            done.prompt_logprobs,
        )

    def _decode(self, done: Prefilled, steps: int) -> list[int]:
        """Greedy tokens. Where the frequencies change on the way, architectures differ in what
        they do: transformers' own loop decides."""
        if done.plan.n_tokens <= self.lm.steady_tokens < done.plan.n_tokens + steps:
            return self.lm.plain_decode(done.prompt.ids, steps)
        return self.lm.decode(done.first, done.kv, steps, self.lm.stop_tokens)[:steps]

    def _generate_plain(self, request: Request) -> Output:
        start = time.perf_counter()
        prompt = render(self.lm.tokenizer, request)
        n = len(prompt.ids)
        self.check(request, n)
        logits = self.lm.plain(prompt.ids)
        cost = Cost(ttft_ms=(time.perf_counter() - start) * 1e3)
        steps = request.max_new_tokens
        tokens = self.lm.plain_decode(prompt.ids, steps) if steps else []
        text = self.lm.tokenizer.decode(tokens, skip_special_tokens=True)
        new = np.zeros(n, dtype=np.int8)
        plan = ReusePlan(n, new, (), (), (), prompt.n_cacheable, (self.lm.hooked,))
        computed = np.ones((self.lm.n_layers, n), dtype=bool)
        return Output(tuple(tokens), text, logits, plan, new, computed, cost)

    def leave(self, done: Prefilled, tokens: Sequence[int] = ()) -> None:
        """A request is over: remember of it and of its answer ``tokens`` what ``admit`` allows,
        and give its pages back.

        What stands behind nothing approximate becomes prefix pages. Chunks that the cache does
        not know are stored; one that was aligned from another only where it was computed exactly
        after all.
        """
        try:
            if self.admit != "none" and bool(torch.isfinite(done.logits).all()):
                self._admit(done, np.asarray(tokens, dtype=np.int64))
        finally:
            self.drop(done)

    def drop(self, done: Prefilled | Loaded) -> None:
        """A request was cancelled or failed: give its pages back, remember nothing of it."""
        self.memory.close(done.kv)

    def _admit(self, done: Prefilled, tokens: np.ndarray) -> None:
        plan, (namespace, _) = done.plan, self._names(done.request.tenant)
        if namespace != done.namespace:
            return  # the model changed while it was in flight: its KV is of no version
        ids = np.concatenate([done.prompt.ids, tokens])[: done.kv.length]
        if len(ids) > self.lm.steady_tokens:
            return  # its frequencies are those of long prompts only
        settled = done.computed.all(axis=0)
        if done.unsettled is not None:
            settled &= ~done.unsettled
        approximate = plan.matched & ~settled
        n_exact = exact_tokens(approximate, len(ids))
        admission = self.admission
        for chunk, match in zip(plan.chunks, plan.matches, strict=True):
            exact = chunk.end <= n_exact
            if exact or (self.admit == "all" and match.kind != "semantic"):
                depth = 0 if exact else 1 + done.depth
                admission.keep([chunk], done.kv, done.prompt.ids, namespace, "in_request", depth)
        admission.remember(done.kv, ids[:n_exact], namespace)


def _vectors(
    embedder: Embedder | None, index: Callable[..., ChunkIndex], surface_score: float | None
) -> ChunkVectors:
    if surface_score is None or embedder is None or isinstance(embedder, HashingEmbedder):
        return ChunkVectors(embedder, index)
    check_range("surface_score", surface_score, 0.0, 1.0)
    surface = ChunkVectors(HashingEmbedder(), FlatIndex)
    return ChunkVectors(embedder, index, surface, surface_score)


def final_provenance(plan: ReusePlan, computed: np.ndarray) -> np.ndarray:
    """int8 ``[n_tokens]``: the plan's provenance, with what the last layer computed afresh."""
    provenance = plan.provenance.copy()
    provenance[plan.matched & computed[-1]] = Provenance.RECOMPUTED
    return provenance
