"""Plans are plain data: what is reused, from where, called what; no model touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsem.aligners.edit import EditAligner
from kvsem.aligners.identical import IdenticalAligner
from kvsem.chunkers.segment import SegmentChunker
from kvsem.embedders.hashing import HashingEmbedder
from kvsem.errors import KvsemError
from kvsem.gates.threshold import ThresholdGate
from kvsem.index.flat import FlatIndex
from kvsem.keys import chain_key
from kvsem.memory.vectors import ChunkVectors
from kvsem.planner import Planner
from kvsem.prompt import Prompt, render
from kvsem.types import Chunk, ChunkKV, Provenance, Request, ReusePlan
from tests.tiny import SYSTEM, prose, tiny_store, tiny_tokenizer

NS = "namespace"
TEXTS = [prose(100 + i, 14) for i in range(4)]


class Bench:
    """A planner over a store that is filled without a model."""

    def __init__(self, **parts: Any) -> None:
        self.store = tiny_store(n_layers=1, kv_heads=1, head_dim=2)
        self.vectors = ChunkVectors(HashingEmbedder(), FlatIndex)
        default: dict[str, Any] = {
            "chunker": SegmentChunker(),
            "aligner": EditAligner(),
            "gate": ThresholdGate(0.5),
            "store": self.store,
            "vectors": self.vectors,
            "namespace": NS,
        }
        self.planner = Planner(**default | parts)

    def chunks(self, prompt: Prompt) -> list[Chunk]:
        return [c for piece in prompt.pieces for c in self.planner.chunks(prompt, piece)]

    def learn(self, request: Request, *, depth: int = 0) -> list[Chunk]:
        """Store every chunk of ``request`` as if it had been served exactly."""
        prompt = render(tiny_tokenizer(), request)
        chunks = self.chunks(prompt)
        for chunk in chunks:
            n = len(chunk.ids)
            kv = (torch.zeros(1, n, 2),)
            ahead = chain_key(NS, prompt.ids[: chunk.start])
            parts = (chunk.inner, chunk.start, "test", ahead, depth, kv, kv)
            self.store.put(ChunkKV(chunk.key, NS, chunk.text, chunk.ids, *parts))
            if chunk.kind != "system":
                self.vectors.add(NS, {chunk.key: chunk.text})
        return chunks

    def change(self, entry: ChunkKV, **new: Any) -> None:
        """Store another entry under the key of ``entry``."""
        self.store.forget(entry.key)
        kv = (torch.zeros(1, len(entry.ids), 2),)
        assert self.store.put(replace(entry, keys=kv, values=kv, **new))

    def plan(self, request: Request, n_paged: int = 0) -> tuple[ReusePlan, Prompt]:
        prompt = render(tiny_tokenizer(), request)
        plan = self.planner.plan(prompt, min(n_paged, len(prompt.ids) - 1), "diverged")
        assert plan.miss == "diverged"
        self.check(plan, prompt)
        return plan, prompt

    def check(self, plan: ReusePlan, prompt: Prompt) -> None:
        """Prefix pages and runs cover exactly the tokens that are not new, each by an equal
        token; what is called prefix stood behind these very tokens, and nothing approximate is
        ahead of it."""
        covered = np.zeros(plan.n_tokens, dtype=int)
        covered[: plan.n_paged] = 1
        assert (plan.provenance[: plan.n_paged] == Provenance.PREFIX).all()
        for run in plan.runs:
            entry = self.store.get(run.entry)
            assert entry is not None
            here = slice(run.target, run.target + run.length)
            assert run.length > 0
            assert run.source + run.length <= len(entry.ids)
            donor = entry.ids[run.source : run.source + run.length]
            assert (prompt.ids[here] == donor).all()
            covered[here] += 1
            prefix = plan.provenance[here] == Provenance.PREFIX
            if prefix.any():  # stays at its place
                assert run.target == entry.position + run.source
                assert entry.depth == 0
                assert entry.context_key == chain_key(NS, prompt.ids[: entry.position])
        assert ((plan.provenance != Provenance.NEW) == (covered == 1)).all()
        assert covered.max(initial=0) <= 1
        assert plan.provenance[-1] == Provenance.NEW
        assert len(plan.matches) == len(plan.chunks)
        assert (plan.matched <= (plan.provenance != Provenance.NEW)).all()
        approximate = np.flatnonzero(plan.matched)
        first = approximate[0] if len(approximate) else plan.n_tokens
        assert not (plan.provenance[first:] == Provenance.PREFIX).any()


def rag(*passages: str, system: str | None = SYSTEM) -> Request:
    return Request.rag("r", passages, "Why?", system=system)


def kinds(plan: ReusePlan) -> list[str]:
    return [match.kind for match in plan.matches]


def test_an_empty_store_plans_nothing() -> None:
    plan, prompt = Bench().plan(rag(*TEXTS[:2]))
    assert kinds(plan) == ["none"] * 3
    assert {match.reason for match in plan.matches} == {"unknown"}
    assert plan.runs == ()
    assert plan.reuse_ratio == 0
    assert plan.n_tokens == len(prompt.ids)
    assert plan.n_cacheable == plan.chunks[-1].end


def test_the_same_request_is_prefix() -> None:
    bench = Bench()
    chunks = bench.learn(rag(*TEXTS[:2]))
    plan, _ = bench.plan(rag(*TEXTS[:2]))
    assert kinds(plan) == ["prefix"] * 3
    assert (plan.provenance == Provenance.PREFIX).sum() == chunks[-1].end


def test_another_order_is_chunk() -> None:
    """All of a passage but the edge that differs; the separator stays with what follows it."""
    bench = Bench()
    bench.learn(rag(*TEXTS[:3]))
    plan, _ = bench.plan(rag(TEXTS[2], TEXTS[0], TEXTS[1]))
    assert kinds(plan) == ["prefix", "chunk", "chunk", "chunk"]
    for chunk in plan.chunks[1:]:
        labels = plan.provenance[chunk.start : chunk.end]
        assert (labels == Provenance.NEW).sum() <= 2
        inner = labels[chunk.inner[0] : chunk.inner[1]]
        assert (inner == Provenance.CHUNK).all()


@pytest.mark.parametrize("edge", ["before", "behind"])
def test_edges_that_are_cut_otherwise_are_new(edge: str) -> None:
    """The text is the same, the id of its first or last word is not: that word is computed."""
    bench = Bench()
    bench.learn(rag(*TEXTS[:2]))
    plan, _ = bench.plan(rag(TEXTS[1], TEXTS[0]))
    chunk = plan.chunks[2]
    stored = bench.store.get(chunk.key)
    assert stored is not None
    from_start, from_entry = (chunk.inner[0] - 1, stored.inner[0] - 1)
    if edge == "behind":
        from_start, from_entry = chunk.inner[1], stored.inner[1]
    ids = stored.ids.copy()
    ids[from_entry] += 1
    bench.change(stored, ids=ids)
    again, _ = bench.plan(rag(TEXTS[1], TEXTS[0]))
    assert kinds(again) == ["prefix", "chunk", "chunk"]
    assert plan.provenance[chunk.start + from_start] == Provenance.CHUNK
    assert again.provenance[chunk.start + from_start] == Provenance.NEW


def test_the_shared_head_of_a_request_is_prefix_until_it_parts() -> None:
    bench = Bench()
    bench.learn(rag(*TEXTS[:3]))
    plan, _ = bench.plan(rag(TEXTS[0], TEXTS[3], TEXTS[2]))
    assert kinds(plan) == ["prefix", "prefix", "none", "chunk"]
    assert (plan.provenance[: plan.chunks[1].end] == Provenance.PREFIX).all()


@pytest.mark.parametrize("change", ["depth", "context_key", "position"])
def test_what_makes_a_chunk_no_prefix(change: str) -> None:
    """Same content at the same place, but approximate, behind other tokens, or from elsewhere."""
    bench = Bench()
    chunks = bench.learn(rag(*TEXTS[:2]))
    target = bench.store.get(chunks[1].key)
    assert target is not None
    new: dict[str, Any] = {"depth": 1, "context_key": "other", "position": chunks[1].start + 1}
    bench.change(target, **{change: new[change]})
    plan, _ = bench.plan(rag(*TEXTS[:2]))
    assert kinds(plan) == ["prefix", "chunk", "chunk"]  # and nothing behind it is prefix either


def test_what_stood_behind_these_tokens_is_prefix_across_a_gap_that_is_computed() -> None:
    bench = Bench(vectors=ChunkVectors(None, FlatIndex))
    chunks = bench.learn(rag(*TEXTS[:3]))
    bench.store.forget(chunks[1].key)
    plan, _ = bench.plan(rag(*TEXTS[:3]))
    assert kinds(plan) == ["prefix", "none", "prefix", "prefix"]
    gap = plan.chunks[1]
    new = np.flatnonzero(plan.provenance[: plan.chunks[-1].end] == Provenance.NEW)
    assert new.tolist() == list(range(gap.start, gap.end))


def test_an_approximate_gap_ends_the_prefix() -> None:
    """The entry behind it was computed behind these tokens, but they are not exact here."""
    bench = Bench()
    bench.learn(rag(TEXTS[3], TEXTS[0]))
    chunks = bench.learn(rag(*TEXTS[:3]))  # its first text is known from elsewhere
    plan, _ = bench.plan(rag(*TEXTS[:3]))
    assert [c.text for c in chunks] == [c.text for c in plan.chunks]
    assert kinds(plan) == ["prefix", "chunk", "chunk", "chunk"]


def test_prefix_pages_come_before_entries() -> None:
    """Of a chunk in which they end, the rest comes from its entry, as exact as it is."""
    bench = Bench()
    chunks = bench.learn(rag(*TEXTS[:2]))
    for n_paged in (0, 1, chunks[0].end, chunks[1].start + 3, chunks[1].end, chunks[2].end):
        plan, _ = bench.plan(rag(*TEXTS[:2]), n_paged)
        assert plan.n_paged == n_paged
        assert kinds(plan) == ["prefix"] * 3
        assert (plan.provenance == Provenance.PREFIX).sum() == chunks[2].end
        assert all(run.target >= n_paged for run in plan.runs)
    moved, _ = bench.plan(rag(TEXTS[1], TEXTS[0]), chunks[0].end + 5)
    assert kinds(moved) == ["prefix", "chunk", "chunk"]
    assert (moved.provenance == Provenance.PREFIX).sum() == chunks[0].end + 5


def test_prefix_pages_are_read_where_chunks_may_not_move() -> None:
    bench = Bench(moved="moved_chunk is off: why")
    chunks = bench.learn(rag(*TEXTS[:2]))
    plan, _ = bench.plan(rag(TEXTS[1], TEXTS[0]), chunks[0].end + 5)
    assert kinds(plan) == ["prefix", "none", "none"]
    assert (plan.provenance == Provenance.PREFIX).sum() == chunks[0].end + 5
    assert plan.refused == ("moved_chunk is off: why",) * 2


def test_an_evicted_entry_says_so() -> None:
    bench = Bench()
    chunks = bench.learn(rag(TEXTS[0]))
    pool = bench.store.pool
    entry = bench.store.get(chunks[1].key)
    assert entry is not None
    bench.store.pool.drop(bench.store._entries[chunks[1].key][2], "capacity")
    pool.check()
    plan, _ = bench.plan(rag(TEXTS[0]))
    assert [(m.kind, m.reason) for m in plan.matches] == [("prefix", ""), ("none", "evicted")]
    with pytest.raises(KvsemError, match="given back"):
        _ = entry.keys[0]


def test_other_ids_under_one_key_are_refused() -> None:
    """A collision of keys is noticed by the ids (GHSA-rm76-4mrf-v9r8)."""
    bench = Bench()
    chunks = bench.learn(rag(TEXTS[0]))
    stored = bench.store.get(chunks[1].key)
    assert stored is not None
    ids = stored.ids.copy()
    ids[len(ids) // 2] += 1
    bench.change(stored, ids=ids)
    plan, _ = bench.plan(rag(TEXTS[1], TEXTS[0]))
    match = plan.matches[2]
    assert (match.kind, match.reason) == ("none", "ids_differ")


def test_a_head_with_other_ids_is_refused() -> None:
    bench = Bench()
    chunks = bench.learn(rag(TEXTS[0]))
    head = bench.store.get(chunks[0].key)
    assert head is not None
    ids = head.ids.copy()
    ids[5] += 1
    bench.change(head, ids=ids)
    plan, _ = bench.plan(rag(TEXTS[0]))
    assert plan.matches[0].reason == "ids_differ"
    assert kinds(plan) == ["none", "prefix"]  # the head is computed: the passage behind it is exact
    assert (plan.provenance[: plan.chunks[0].end] == Provenance.NEW).all()


def test_a_wholly_known_prompt_leaves_its_last_token() -> None:
    bench = Bench()
    request = Request("p", text=TEXTS[0])
    bench.learn(request)
    plan, prompt = bench.plan(request)
    assert (plan.provenance == Provenance.PREFIX).sum() == len(prompt.ids) - 1


def test_nothing_moves_where_moving_is_off() -> None:
    bench = Bench(moved="moved_chunk is off: rope type 'yarn'")
    bench.learn(rag(*TEXTS[:2]))
    plan, _ = bench.plan(rag(TEXTS[1], TEXTS[0]))
    assert kinds(plan) == ["prefix", "none", "none"]
    assert plan.refused == ("moved_chunk is off: rope type 'yarn'",) * 2
    assert not plan.matched.any()
    same, _ = bench.plan(rag(*TEXTS[:2]))
    assert kinds(same) == ["prefix"] * 3
    assert same.refused == ()


def test_nothing_is_reused_where_prefixes_are_off() -> None:
    bench = Bench(off="exact_prefix is off: why")
    bench.learn(rag(*TEXTS[:2]))
    plan, _ = bench.plan(rag(*TEXTS[:2]))
    assert not (plan.provenance != Provenance.NEW).any()
    assert {match.reason for match in plan.matches} == {"exact_prefix is off: why"}


def edited(text: str) -> str:
    words = text.split(" ")
    return " ".join([*words[:6], "lantern", *words[7:]])


def test_similar_content_is_aligned() -> None:
    bench = Bench()
    bench.learn(rag(*TEXTS[:2]))
    plan, _ = bench.plan(rag(TEXTS[1], edited(TEXTS[0])))
    match, chunk = plan.matches[2], plan.chunks[2]
    assert match.kind == "semantic"
    assert match.score is not None
    assert match.score < 1
    labels = plan.provenance[chunk.start : chunk.end]
    assert set(labels.tolist()) == {Provenance.SEMANTIC, Provenance.NEW}


def test_similar_content_that_continues_the_prefix_is_prefix_up_to_the_edit() -> None:
    bench = Bench()
    bench.learn(rag(TEXTS[0]))
    plan, _ = bench.plan(rag(edited(TEXTS[0])))
    chunk = plan.chunks[1]
    labels = plan.provenance[chunk.start : chunk.end].tolist()
    first_new = labels.index(Provenance.NEW)
    assert set(labels[:first_new]) == {Provenance.PREFIX}
    assert first_new > 4
    assert Provenance.PREFIX not in labels[first_new:]
    assert Provenance.SEMANTIC in labels


def test_refusals_are_counted_with_their_reasons() -> None:
    bench = Bench(gate=ThresholdGate(0.99))
    bench.learn(rag(*TEXTS[:2]))
    plan, _ = bench.plan(rag(edited(TEXTS[0])))
    assert plan.refused == ("below_threshold",) * 2
    assert plan.matches[1].reason == "below_threshold"
    none = Bench(aligner=IdenticalAligner())
    none.learn(rag(*TEXTS[:1]))
    plan, _ = none.plan(rag(edited(TEXTS[0])))
    assert plan.refused == ("nothing_aligned",)


def test_a_refused_chunk_shows_its_best_candidate() -> None:
    bench = Bench(gate=ThresholdGate(0.999))
    known = bench.learn(rag(*TEXTS[:3]))
    plan, _ = bench.plan(rag(edited(TEXTS[1])))
    assert len(plan.refused) == 3
    assert plan.matches[1].entry == known[2].key


def test_a_stale_index_is_no_source() -> None:
    bench = Bench()
    chunks = bench.learn(rag(TEXTS[0]))
    bench.store.forget(chunks[1].key)
    plan, _ = bench.plan(rag(TEXTS[1], edited(TEXTS[0])))
    assert kinds(plan) == ["prefix", "none", "none"]


def test_the_frame_has_a_row_a_chunk() -> None:
    bench = Bench()
    bench.learn(rag(*TEXTS[:2]))
    plan, _ = bench.plan(rag(TEXTS[1], edited(TEXTS[0]), TEXTS[3]))
    frame = plan.to_frame()
    assert list(frame["match"]) == kinds(plan)
    assert frame["reused"].sum() == (plan.provenance != Provenance.NEW).sum()
    assert plan.reuse_ratio == frame["reused"].sum() / plan.n_tokens


ORDERS = st.lists(
    st.tuples(
        st.booleans(),
        st.lists(st.integers(0, 5), min_size=1, max_size=4),
        st.integers(0, 2),
        st.integers(0, 120),
    ),
    min_size=1,
    max_size=5,
)
POOL = [*TEXTS, edited(TEXTS[0]), "bridge"]


@settings(max_examples=40, deadline=None)
@given(orders=ORDERS)
def test_any_history_gives_a_sound_plan(orders: list[tuple[bool, list[int], int, int]]) -> None:
    """`Bench.check` after every request, with and without prefix pages."""
    bench = Bench()
    for has_system, order, depth, n_paged in orders:
        request = rag(*(POOL[i] for i in order), system=SYSTEM if has_system else None)
        bench.plan(request)
        bench.plan(request, n_paged)
        bench.learn(request, depth=depth)


class Counting(HashingEmbedder):
    """The real embedder, and how many texts it was given."""

    n_texts = 0

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.n_texts += len(texts)
        return super().embed(texts)


def test_identical_content_is_found_without_embedding() -> None:
    embedder = Counting()
    bench = Bench(vectors=ChunkVectors(embedder, FlatIndex))
    bench.vectors = bench.planner.vectors
    bench.learn(rag(*TEXTS[:2]))
    learnt = embedder.n_texts
    assert kinds(bench.plan(rag(*TEXTS[:2][::-1]))[0])[1:] == ["chunk", "chunk"]
    assert embedder.n_texts == learnt
    bench.plan(rag(TEXTS[2]))
    assert embedder.n_texts == learnt + 1
