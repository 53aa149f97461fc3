"""One request, four steps: plan, prefill, decode, admit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from kvsem.aligners.base import Aligner
from kvsem.aligners.edit import EditAligner
from kvsem.chunkers.base import Chunker
from kvsem.chunkers.segment import SegmentChunker
from kvsem.contexts.base import Donor, DonorContext
from kvsem.contexts.in_company import InCompany
from kvsem.embedders.base import Embedder
from kvsem.errors import KvsemError, SettingError
from kvsem.forward import KVBuffer
from kvsem.gates.base import Gate
from kvsem.gates.threshold import ThresholdGate
from kvsem.index.base import ChunkIndex
from kvsem.index.flat import FlatIndex
from kvsem.keys import digest
from kvsem.lm import LM
from kvsem.memory.gather import gather
from kvsem.memory.store import ChunkStore, entry_of
from kvsem.memory.vectors import ChunkVectors
from kvsem.planner import Planner
from kvsem.prompt import Prompt, render
from kvsem.recompute.base import Adjusts, Needs, Recompute, State
from kvsem.recompute.none import NoRecompute
from kvsem.types import (
    Chunk,
    ChunkKV,
    Cost,
    Message,
    Output,
    Provenance,
    Request,
    ReusePlan,
    Segment,
)

Admit = Literal["all", "exact_only", "none"]
Track = Callable[[Sequence[Donor]], Iterable[Donor]]


@dataclass
class Prefilled:
    """A request up to its first token. ``kv`` holds its KV; what follows may be appended."""

    request: Request
    prompt: Prompt
    plan: ReusePlan
    kv: KVBuffer
    logits: torch.Tensor  # fp32 [vocab]
    first: int
    computed: np.ndarray  # bool [layers, n]
    cost: Cost


class Engine:
    """Semantic KV reuse around one `LM`.

    Parts that are left out are those of ``conf/arm/base.yaml``, but without an ``embedder`` only
    identical content is reused. ``index`` makes an empty index, given dim and identity.
    ``admit``: what a served request leaves behind: ``all``, ``exact_only`` (nothing computed on
    reused KV) or ``none`` (the cache is read-only).
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
        n_candidates: int = 4,
        seed: int = 0,
    ) -> None:
        if admit not in ("all", "exact_only", "none"):
            raise SettingError("admit", admit, "all, exact_only or none")
        if n_candidates < 1:
            raise SettingError("n_candidates", n_candidates, "a whole number from 1 up")
        self.lm = lm
        self.chunker: Chunker = chunker or SegmentChunker()
        self.aligner: Aligner = aligner or EditAligner()
        self.gate: Gate = gate or ThresholdGate()
        self.recompute: Recompute = recompute or NoRecompute()
        self.needs = getattr(self.recompute, "needs", Needs())
        self.context: DonorContext = context or InCompany()
        self.admit, self.n_candidates, self.seed = admit, n_candidates, seed
        self.store = ChunkStore()
        self.vectors = ChunkVectors(embedder, index)

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
        for donor in track([] if self.lm.hooked else donors):
            self._build(donor, next(iter(tenants), ""))
        return len(self.store) - before

    def share(self, other: Engine) -> None:
        """Start from what ``other`` ingested: a store of its own over the same entries.

        Both engines must be read-only (``admit=none``): the index is the same object.
        """
        if (self.admit, other.admit) != ("none", "none"):
            raise KvsemError("only engines with admit=none share what was ingested")
        self.store.share(other.store)
        self.vectors.share(other.vectors)

    def _build(self, donor: Donor, tenant: str) -> None:
        """One exact forward over the donor prompt, up to the end of its passage."""
        namespace = self.lm.namespace(tenant)
        prompt = render(self.lm.tokenizer, _donor_request(donor))
        planner = self._planner(namespace)
        last = [p for p in prompt.pieces if p.kind == "passage" and p.text == donor.text.strip()]
        chunks = planner.chunks(prompt, last[-1]) if last else []  # none: the text makes no token
        if self._all_stored(chunks):
            return
        ids = prompt.ids[: last[-1].end]
        if len(ids) > self.lm.max_tokens and donor.company:
            warnings.warn("a passage and its company are longer than the context", stacklevel=2)
            self._build(replace(donor, company=(), context="behind_system"), tenant)
            return
        self.lm.check_prompt(len(ids), what=f"the donor prompt of {donor.text[:40]!r}")
        head = planner.chunks(prompt, prompt.pieces[0]) if prompt.pieces[0].kind == "system" else []
        if donor.bare:
            self._store_bare(prompt, chunks, namespace, donor)
            ids, chunks = ids[: head[0].end] if head else ids[:0], []
        if self._all_stored(head + chunks):
            return
        kv = self._exact(ids, head)
        self._keep(head, kv, ids, namespace, "start")
        self._keep(chunks, kv, ids, namespace, donor.context)

    def _all_stored(self, chunks: Sequence[Chunk]) -> bool:
        return all(self.store.get(chunk.key) is not None for chunk in chunks)

    def _exact(self, ids: np.ndarray, head: list[Chunk]) -> KVBuffer:
        """Exact KV of ``ids``; the head is copied where it is stored."""
        kv = self.lm.buffer(len(ids))
        rest = torch.ones(len(ids), dtype=torch.bool)
        for chunk in head:
            entry = self.store.get(chunk.key)
            if entry is not None and len(chunk.ids) < len(ids):
                for layer in range(self.lm.n_layers):
                    kv.keys[layer][0, :, : len(chunk.ids)] = entry.keys[layer]
                    kv.values[layer][0, :, : len(chunk.ids)] = entry.values[layer]
                rest[: len(chunk.ids)] = False
        self.lm.prefill(ids, kv, lambda _: rest)
        return kv

    def _store_bare(
        self, prompt: Prompt, chunks: list[Chunk], namespace: str, donor: Donor
    ) -> None:
        bos = self.lm.tokenizer.bos_token_id
        ahead = np.array([] if bos is None else [bos], dtype=np.int64)
        ids = np.concatenate([ahead, prompt.ids[chunks[0].start : chunks[-1].end]])
        kv = self._exact(ids, [])
        moved = len(ahead) - chunks[0].start
        placed = [replace(c, start=c.start + moved, end=c.end + moved) for c in chunks]
        self._keep(placed, kv, ids, namespace, donor.context)

    def _keep(
        self,
        chunks: Sequence[Chunk],
        kv: KVBuffer,
        ids: np.ndarray,
        namespace: str,
        context: str,
        depth: int = 0,
    ) -> None:
        """Store chunks that are not there yet; findable by meaning once their bytes are whole."""
        new = [chunk for chunk in chunks if self.store.get(chunk.key) is None]
        for chunk in new:
            self.store.put(entry_of(chunk, kv, ids, namespace, context, depth))
        passages = [c for c in new if c.kind != "system" and self.store.get(c.key) is not None]
        self.vectors.add(namespace, {c.key: c.text for c in passages})

    def forget(self, key: str) -> bool:
        """Remove an entry from the store and every index."""
        self.vectors.forget(key)
        return self.store.forget(key)

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
        )

    def _off(self, capability: str) -> str:
        """Why the model cannot do something, as its self-check says; empty where it can."""
        ok, reason = self.lm.support.get(capability, (False, "not checked"))
        return "" if ok else f"{capability} is off: {reason}"

    def plan(self, request: Request) -> ReusePlan:
        """What would be reused for ``request``, and why not the rest."""
        prompt = render(self.lm.tokenizer, request)
        return self._planner(self.lm.namespace(request.tenant)).plan(prompt)

    def check(self, request: Request, n: int | None = None) -> None:
        """Raise `KvsemError` where ``request`` (of ``n`` tokens) is empty or too long."""
        n = len(render(self.lm.tokenizer, request).ids) if n is None else n
        self.lm.check_prompt(n, request.max_new_tokens, f"request {request.id!r}")

    # -- prefill --------------------------------------------------------------------------------

    def prefill(self, request: Request, room: int | None = None) -> Prefilled:
        """From text to first token. ``room``: tokens that may be appended to the KV afterwards."""
        start = time.perf_counter()
        prompt = render(self.lm.tokenizer, request)
        n = len(prompt.ids)
        room = request.max_new_tokens if room is None else room
        self.check(request, n)
        plan = self._planner(self.lm.namespace(request.tenant)).plan(prompt)
        planned = time.perf_counter()
        kv = self.lm.buffer(n + room)
        gather(self.lm, kv, plan.runs, self._entries(plan))
        seed = int(digest("seed", run=self.seed, request=request.id)[:15], 16)
        state = self._state(plan, kv, seed)
        self.lm.wait()
        loaded = time.perf_counter()
        attended = self._look(prompt, kv, state)
        logits, computed = self.lm.prefill(prompt.ids, kv, self._select(state))
        first = int(logits.argmax())
        done = time.perf_counter()
        cost = Cost(
            plan_ms=(planned - start) * 1e3,
            load_ms=(loaded - planned) * 1e3,
            prefill_ms=(done - loaded) * 1e3,
            ttft_ms=(done - start) * 1e3,
            multiplications=self.lm.multiplications(computed) + attended,
            recomputed_layer_tokens=int((computed & plan.matched).sum()),
            kv_bytes=self.store.nbytes,
        )
        return Prefilled(request, prompt, plan, kv, logits, first, computed, cost)

    def _entries(self, plan: ReusePlan) -> dict[str, ChunkKV]:
        found = {run.entry: self.store.get(run.entry) for run in plan.runs}
        return {key: entry for key, entry in found.items() if entry is not None}

    def _state(self, plan: ReusePlan, kv: KVBuffer, seed: int) -> State:
        """What the rule may look at; its ``adjust`` is applied to the reused KV here."""
        n = plan.n_tokens
        matched = torch.from_numpy(plan.matched)
        spans = [(c.start, c.end) for c in plan.chunks if bool(matched[c.start : c.end].any())]
        state = State(n, matched, torch.from_numpy(plan.provenance == Provenance.NEW), spans, seed)
        if isinstance(self.recompute, Adjusts) and bool(matched.any()):
            at = matched.nonzero()[:, 0].to(kv.keys[0].device)
            for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
                new = self.recompute.adjust(layer, keys[0, :, at], values[0, :, at], state)
                keys[0, :, at], values[0, :, at] = new
        for layer in self.needs.fresh_layers:
            if layer >= len(kv.keys):
                raise SettingError(
                    "recompute: layer", layer, f"a layer from 0 to {len(kv.keys) - 1}"
                )
            fresh = kv.keys[layer][0, :, :n], kv.values[layer][0, :, :n]
            state.reused[layer] = fresh[0].clone(), fresh[1].clone()
            state.fresh[layer] = fresh
        return state

    def _look(self, prompt: Prompt, kv: KVBuffer, state: State) -> int:
        """The question's pass over the assembled cache, where the rule needs it; its cost."""
        if not self.needs.question_attention:
            return 0
        rows = state.new.nonzero()[:, 0].numpy()
        state.question_attention = self.lm.question_attention(prompt.ids, kv, rows)
        passed = np.zeros((self.lm.n_layers, state.n_tokens), dtype=bool)
        passed[:, rows] = True
        return self.lm.multiplications(passed)

    def _select(self, state: State) -> Callable[[int], torch.Tensor]:
        whole, version = state.new, -1

        def select(layer: int) -> torch.Tensor:
            nonlocal whole, version
            chosen = self.recompute.tokens(layer, state)
            # an unchanged set stays the same object; the version tells of changes made in place
            if chosen is not state.previous or chosen._version != version:
                whole, version = state.new | (chosen & state.matched), chosen._version
            state.previous = chosen
            return whole

        return select

    # -- decode and admit -----------------------------------------------------------------------

    def generate(self, request: Request) -> Output:
        """Answer ``request`` greedily, then leave its KV behind as ``admit`` allows.

        A model without selective prefill answers by plain transformers, exactly.
        """
        if self.lm.hooked:
            return self._generate_plain(request)
        done = self.prefill(request)
        start = time.perf_counter()
        steps = request.max_new_tokens
        tokens = self.lm.decode(done.first, done.kv, steps, self.lm.stop_tokens) if steps else []
        decoded = time.perf_counter()
        self.leave(done)
        cost = replace(
            done.cost,
            decode_ms_per_token=(decoded - start) * 1e3 / max(1, len(tokens) - 1),
            store_ms=(time.perf_counter() - decoded) * 1e3,
        )
        text = self.lm.tokenizer.decode(tokens, skip_special_tokens=True)
        provenance = final_provenance(done.plan, done.computed)
        return Output(tuple(tokens), text, done.logits, done.plan, provenance, done.computed, cost)

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

    def leave(self, done: Prefilled) -> None:
        """Store the chunks of a served request that the cache did not know.

        One that was aligned from another is stored only where it was computed exactly after all.
        """
        if self.admit == "none":
            return
        plan, namespace = done.plan, self.lm.namespace(done.request.tenant)
        approximate = plan.matched & ~done.computed.all(axis=0)
        used = self._entries(plan).values()
        depth = 1 + max((entry.depth for entry in used), default=0)
        for chunk, match in zip(plan.chunks, plan.matches, strict=True):
            exact = not approximate[: chunk.end].any()
            known = match.kind in ("prefix", "chunk") or (match.kind == "semantic" and not exact)
            if known or not (exact or self.admit == "all"):
                continue
            context = "start" if chunk.kind == "system" else "in_request"
            at = 0 if exact else depth
            self._keep([chunk], done.kv, done.prompt.ids, namespace, context, at)


def final_provenance(plan: ReusePlan, computed: np.ndarray) -> np.ndarray:
    """int8 ``[n_tokens]``: the plan's provenance, with what the last layer computed afresh."""
    provenance = plan.provenance.copy()
    provenance[plan.matched & computed[-1]] = Provenance.RECOMPUTED
    return provenance


def _donor_request(donor: Donor) -> Request:
    """System, company, passage; a question follows so that the passage's end tokenises alike."""
    passages = [Segment("passage", text) for text in (*donor.company, donor.text)]
    user = Message("user", (*passages, Segment("question", "Question: ?")))
    head = (Message("system", (Segment("system", donor.system),)),) if donor.system else ()
    return Request("donor", (*head, user))
