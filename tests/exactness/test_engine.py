"""One request, four steps: what is reused, what it is called, and what is left behind.

LMCache#305, #2496; kvpress PR 264; TensorRT-LLM#14918, #2217; vllm#44223.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvsem.chunkers.sentence import SentenceChunker
from kvsem.contexts.alone import Alone
from kvsem.contexts.in_company import InCompany
from kvsem.contexts.in_company_own import InCompanyOwn
from kvsem.embedders.hashing import HashingEmbedder
from kvsem.engine import Engine
from kvsem.errors import DataError, KvsemError, ModelError, SettingError
from kvsem.gates.threshold import ThresholdGate
from kvsem.index.flat import FlatIndex
from kvsem.keys import chain_key, chain_root
from kvsem.lm import LM
from kvsem.memory.pages import PagedKV
from kvsem.recompute.all import AllRecompute
from kvsem.recompute.base import Needs, State
from kvsem.recompute.cacheblend import CacheBlendRecompute
from kvsem.recompute.epic import EpicRecompute
from kvsem.recompute.none import NoRecompute
from kvsem.recompute.zero_kv import ZeroKV
from kvsem.types import CACHEABLE, Message, Provenance, Request, Segment
from tests.tiny import SYSTEM, exact, plain_generate, plain_logits, prose, tiny_engine

CONF = Path(__file__).parents[2] / "conf" / "recompute"
RULES = sorted(path.stem for path in CONF.glob("*.yaml"))
PASSAGES = [prose(40 + i, 20) for i in range(4)]


def rag(id: str, *passages: int, question: str = "Why?", **more: Any) -> Request:
    return Request.rag(id, [PASSAGES[i] for i in passages], question, system=SYSTEM, **more)


def semantic(lm: LM, **parts: Any) -> Engine:
    return tiny_engine(lm, embedder=HashingEmbedder(), index=FlatIndex, **parts)


def assert_counts(output: Any) -> None:
    """Every token is exactly one of five, and the layers' sets never grow."""
    counts = output.counts()
    assert sum(counts.values()) == output.plan.n_tokens == len(output.provenance)
    assert output.provenance[-1] == Provenance.NEW
    computed = torch.from_numpy(output.computed)
    assert (computed[1:] <= computed[:-1]).all()
    new = output.plan.provenance == Provenance.NEW
    assert output.computed[:, new].all()
    assert not output.computed[:, output.plan.provenance == Provenance.PREFIX].any()


def test_ratio_zero_recomputes_nothing(lm: LM) -> None:
    """new = question, template tail and edges that differ; the rest has a source."""
    engine = tiny_engine(lm, recompute=EpicRecompute(ratio=0.0), context=InCompanyOwn())
    requests = [rag("a", 0, 1, 2), rag("b", 3)]
    with pytest.warns(UserWarning, match="no company"):
        engine.ingest(requests)
    output = engine.generate(requests[0])
    counts = output.counts()
    assert_counts(output)
    assert counts["recomputed"] == 0
    assert output.cost.recomputed_layer_tokens == 0
    prompt = engine.prefill(requests[0]).prompt
    question = next(p for p in prompt.pieces if p.kind == "question")
    tail = output.plan.n_tokens - question.start
    edges = sum(
        int((output.plan.provenance[c.start : c.end] == Provenance.NEW).sum())
        for c in output.plan.chunks
    )
    assert edges <= 3 * len(output.plan.chunks)
    assert counts["new"] == tail + edges
    assert counts["prefix"] + counts["chunk"] == output.plan.n_cacheable - edges
    assert output.computed.sum() == lm.n_layers * counts["new"]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("words", range(1, 9))
def test_short_chunks_and_small_ratios(llama: LM, name: str, words: int) -> None:
    """At least one token runs, and with a ratio at least one matched one; all logits finite."""
    config = OmegaConf.load(CONF / f"{name}.yaml")
    request = Request.rag("r", [prose(60, words), prose(61, words)], "Why?", system=SYSTEM)
    donor = tiny_engine(llama, admit="none")
    donor.ingest([request])
    ratios = (0.01, 0.1, 0.5, 0.9, 0.99) if "ratio" in config else (None,)
    for ratio in ratios:
        rule = instantiate(config if ratio is None else {**config, "ratio": ratio})
        engine = tiny_engine(llama, recompute=rule, admit="none")
        engine.share(donor)
        output = engine.generate(request)
        assert_counts(output)
        assert output.computed[-1].sum() >= 1
        assert output.logits.isfinite().all()
        matched = int(output.plan.matched.sum())
        if ratio is not None and matched:
            recomputed = output.counts()["recomputed"]
            assert 1 <= recomputed <= max(2, round(ratio * matched) + 2)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]])
def test_no_state_is_left_between_requests(lm: LM, order: list[int]) -> None:
    """A read-only engine answers the same after serving others, in any order (LMCache#2496)."""
    requests = [rag("a", 0, 1), rag("b", 2, 1, 0), rag("c", 3), rag("d", 1, 2), rag("e", 2, 2)]
    served = tiny_engine(lm, recompute=CacheBlendRecompute(0.3), admit="none")
    served.ingest(requests)
    answers = {i: served.generate(requests[i]) for i in order}
    for i in (0, 1, 4):
        fresh = tiny_engine(lm, recompute=CacheBlendRecompute(0.3), admit="none")
        fresh.ingest(requests)
        alone = fresh.generate(requests[i])
        assert alone.tokens == answers[i].tokens
        assert torch.equal(alone.logits, answers[i].logits)
        assert (alone.provenance == answers[i].provenance).all()


def test_a_chunk_behind_company_is_chunk(lm: LM) -> None:
    """Same content in another context: moved, labelled, with its context in the entry."""
    requests = [rag("a", 0, 1), rag("b", 2, 3)]
    engine = tiny_engine(lm, context=InCompany())
    engine.ingest(requests)
    for entry in engine.store:
        assert entry.depth == 0
        assert entry.context == "in_company"
        assert entry.position > 0
    output = engine.generate(requests[0])
    assert_counts(output)
    assert [match.kind for match in output.plan.matches] == ["prefix", "chunk", "chunk"]
    assert output.counts()["chunk"] > 20


def test_a_chunk_that_continues_the_prefix_is_prefix(lm: LM, plain: Any) -> None:
    """The first passage behind the system prompt: bit-equal KV, exact answer."""
    request = rag("a", 0)
    engine = tiny_engine(lm)
    engine.ingest([request])
    done = engine.prefill(request)
    assert [match.kind for match in done.plan.matches] == ["prefix", "prefix"]
    cold, _ = exact(lm, done.prompt.ids)
    reused = done.plan.provenance == Provenance.PREFIX
    assert reused.sum() > 40
    for mine, theirs in zip(done.kv.keys, cold.keys, strict=True):
        assert (mine[:, :, : len(reused)] - theirs)[:, :, reused].abs().max() <= 1e-5
    output = engine.generate(request)
    assert (output.logits - plain_logits(plain, done.prompt.ids)[-1]).abs().max() <= 1e-4
    head, passage = done.plan.chunks
    root = chain_root(lm.namespace())
    pages = engine.memory.prefix.match(root, done.prompt.ids[: head.end])
    assert pages.n_tokens == head.end
    assert done.kv.pages[: len(pages.blocks)] == pages.pages  # shared, not copied
    stored = PagedKV(engine.memory.pages, pages.held, head.end)
    entry = engine.store.get(passage.key)
    assert entry is not None
    assert entry.context_key == chain_key(lm.namespace(), done.prompt.ids[: passage.start])
    n = int(reused[passage.start : passage.end].sum())
    for layer in range(lm.n_layers):  # bit for bit what was stored
        keys = done.kv.keys[layer]
        assert torch.equal(keys[:, :, : head.end], stored.keys[layer])
        got = keys[0, :, passage.start : passage.start + n]
        assert torch.equal(got, entry.keys[layer][:, :n])
    engine.drop(done)


def test_same_text_at_the_same_place_behind_other_text_is_chunk(llama: LM) -> None:
    """Position and content are not enough: the tokens ahead decide."""
    twins = ["the river of stone market.", "the stone of river market."]
    first = Request.rag("a", [twins[0], PASSAGES[3]], "Why?", system=SYSTEM)
    second = Request.rag("b", [twins[1], PASSAGES[3]], "Why?", system=SYSTEM)
    engine = tiny_engine(llama)
    a, b = engine.generate(first), engine.generate(second)
    assert a.plan.chunks[2].start == b.plan.chunks[2].start
    assert [m.kind for m in b.plan.matches] == ["prefix", "none", "chunk"]


def test_approximate_kv_never_becomes_prefix(lm: LM, plain: Any) -> None:
    """What was computed on reused KV carries a depth and is never exact later (rule 3)."""
    engine = tiny_engine(lm, admit="all", context=InCompany())
    engine.ingest([rag("x", 0), rag("y", 1)])
    engine.generate(rag("a", 0, 2))  # passage 2 is computed behind a moved passage 0
    entries = {entry.text: entry for entry in engine.store}
    assert entries[PASSAGES[2]].depth == 1
    assert entries[PASSAGES[2]].context == "in_request"
    engine.generate(rag("b", 1, 2, 3))  # passage 3 behind KV that was itself approximate
    deeper = {entry.text: entry for entry in engine.store}[PASSAGES[3]]
    assert deeper.depth == 2

    again = engine.generate(rag("a", 0, 2))
    assert [match.kind for match in again.plan.matches] == ["prefix", "chunk", "chunk"]
    engine.recompute = AllRecompute()
    exactly = engine.generate(rag("a", 0, 2))
    ids = engine.prefill(rag("a", 0, 2)).prompt.ids
    assert (exactly.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4
    assert list(exactly.tokens) == plain_generate(plain, ids, 16)


def test_depth_outlives_what_stood_ahead(llama: LM) -> None:
    """Approximate KV behind tokens that are exact by now, at its very place: still a chunk."""
    engine = tiny_engine(llama, context=InCompany())
    engine.ingest([rag("x", 0), rag("y", 1)])
    engine.generate(rag("a", 0, 2))
    moved = next(entry for entry in engine.store if entry.text == PASSAGES[0])
    engine.forget(moved.key)
    engine.generate(rag("b", 0))  # passage 0 once more, exactly, directly behind the system prompt
    plan = engine.plan(rag("a", 0, 2))
    assert [match.kind for match in plan.matches] == ["prefix", "prefix", "chunk"]


class Eager:
    """A rule that asks for more than it may: prefix tokens too."""

    needs = Needs()

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        return torch.ones(state.n_tokens, dtype=torch.bool)


def test_a_rule_never_reaches_the_prefix(llama: LM) -> None:
    engine = tiny_engine(llama, recompute=Eager(), admit="none")
    engine.ingest([rag("a", 0), rag("b", 1)])
    output = engine.generate(rag("c", 1, 0))
    assert_counts(output)
    assert output.counts()["prefix"] > 20
    assert output.counts()["recomputed"] > 20


@pytest.mark.parametrize(
    "rule", [NoRecompute(), EpicRecompute(0.5), CacheBlendRecompute(0.5), ZeroKV()]
)
def test_partly_recomputed_is_still_approximate(llama: LM, rule: Any) -> None:
    engine = tiny_engine(llama, recompute=rule, context=InCompany())
    engine.ingest([rag("x", 0), rag("y", 1)])
    engine.generate(rag("a", 0, 2))
    assert {entry.text: entry.depth for entry in engine.store}[PASSAGES[2]] == 1


def test_wholly_recomputed_is_exact(lm: LM, plain: Any) -> None:
    engine = tiny_engine(lm, recompute=AllRecompute(), context=InCompany())
    engine.ingest([rag("x", 0), rag("y", 1)])
    engine.generate(rag("a", 0, 2))
    entry = {e.text: e for e in engine.store}[PASSAGES[2]]
    assert entry.depth == 0
    ids = engine.prefill(rag("a", 0, 2)).prompt.ids
    cold, _ = exact(lm, ids)
    end = entry.position + len(entry.ids)
    for layer in range(lm.n_layers):
        stored, want = entry.keys[layer], cold.keys[layer][0, :, entry.position : end]
        assert (stored - want).abs().max() <= 1e-4


def test_exact_only_leaves_approximate_kv_out(lm: LM) -> None:
    engine = tiny_engine(lm, admit="exact_only", context=InCompany())
    engine.ingest([rag("x", 0), rag("y", 1)])
    engine.generate(rag("a", 0, 2))
    assert PASSAGES[2] not in {entry.text for entry in engine.store}
    engine.generate(rag("b", 2, 3))
    stored = {entry.text: entry for entry in engine.store}
    assert stored[PASSAGES[2]].depth == stored[PASSAGES[3]].depth == 0
    assert all(entry.depth == 0 for entry in engine.store)


def test_admit_none_leaves_nothing(llama: LM) -> None:
    engine = tiny_engine(llama, admit="none")
    engine.generate(rag("a", 0, 1))
    assert len(engine.store) == 0
    with pytest.raises(SettingError, match="admit='some': expected all, exact_only or none"):
        tiny_engine(llama, admit="some")


@pytest.mark.parametrize("count", [0, "four", None, 1.5, True])
def test_candidates_are_counted(llama: LM, count: Any) -> None:
    with pytest.raises(SettingError, match=r"n_candidates=.*: expected a whole number from 1"):
        tiny_engine(llama, n_candidates=count)


def test_edited_passage_is_aligned(lm: LM) -> None:
    """One word changed: the other tokens are semantic, the changed ones new; its ids still rule."""
    words = PASSAGES[0].split(" ")
    words[10] = "lantern"
    edited = Request.rag("e", [PASSAGES[1], " ".join(words)], "Why?", system=SYSTEM)
    engine = semantic(lm, admit="none")
    engine.ingest([rag("a", 0), rag("b", 1)])
    output = engine.generate(edited)
    assert_counts(output)
    assert [match.kind for match in output.plan.matches] == ["prefix", "prefix", "semantic"]
    match, chunk = output.plan.matches[2], output.plan.chunks[2]
    assert match.score is not None
    assert 0.85 <= match.score < 1.0
    entry = engine.store.get(match.entry or "")
    assert entry is not None
    assert entry.text == PASSAGES[0]
    labels = output.plan.provenance[chunk.start : chunk.end]
    assert set(labels.tolist()) == {Provenance.SEMANTIC, Provenance.NEW}
    source = np.full(output.plan.n_tokens, -1)
    for run in output.plan.runs:
        if run.entry == entry.key:
            source[run.target : run.target + run.length] = run.source + np.arange(run.length)
    taken = source[chunk.start : chunk.end]
    assert ((taken >= 0) == (labels == Provenance.SEMANTIC)).all()
    assert (chunk.ids[taken >= 0] == entry.ids[taken[taken >= 0]]).all()
    offsets = engine.prefill(edited).prompt.offsets[chunk.start : chunk.end]
    at = engine.prefill(edited).prompt.text.index("lantern")
    inside = (offsets[:, 0] < at + len("lantern")) & (offsets[:, 1] > at)
    assert (labels[inside] == Provenance.NEW).any()
    assert (labels == Provenance.NEW).sum() <= inside.sum() + 4


def test_semantic_reuse_recomputed_is_exact(lm: LM, plain: Any) -> None:
    edited = Request.rag("e", [PASSAGES[0].replace(" ", " old ", 1)], "Why?", system=SYSTEM)
    engine = semantic(lm, recompute=AllRecompute(), admit="none")
    engine.ingest([rag("a", 1, 0)])
    output = engine.generate(edited)
    assert output.plan.matches[1].kind == "semantic"
    ids = engine.prefill(edited).prompt.ids
    assert (output.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4


def test_a_refused_candidate_says_why(llama: LM) -> None:
    engine = semantic(llama, admit="none")
    engine.ingest([rag("a", 0)])
    output = engine.generate(rag("b", 1))
    assert output.plan.refused == ("below_threshold",)
    assert output.plan.matches[1].kind == "none"
    assert output.plan.matches[1].reason == "below_threshold"
    frame = output.plan.to_frame()
    assert frame["tokens"].sum() == output.plan.n_cacheable
    assert list(frame["match"]) == ["prefix", "none"]


def test_tenants_are_apart(llama: LM) -> None:
    engine = semantic(llama)
    engine.ingest([rag("a", 0, tenant="A")])
    other = engine.generate(rag("b", 0, tenant="B"))
    assert other.counts()["new"] == other.plan.n_tokens
    own = engine.generate(rag("c", 0, tenant="A"))
    assert own.counts()["prefix"] > 0
    with pytest.raises(KvsemError, match="one tenant"):
        engine.ingest([rag("d", 1, tenant="A"), rag("e", 1, tenant="B")])


def test_a_forgotten_entry_is_a_miss(llama: LM) -> None:
    engine = semantic(llama, admit="none")
    engine.ingest([rag("a", 0, 1)])
    for key in [entry.key for entry in engine.store]:
        assert engine.forget(key)
        assert not engine.forget(key)
    assert engine.store.nbytes == 0
    output = engine.generate(rag("b", 0))
    assert output.counts()["prefix"] == output.plan.n_paged == output.plan.chunks[0].end
    assert output.counts()["new"] == output.plan.n_tokens - output.plan.n_paged
    engine.memory.prefix.clear()
    assert engine.memory.nbytes == 0
    output = engine.generate(rag("b", 0))
    assert output.counts()["new"] == output.plan.n_tokens


def test_kv_that_is_not_finite_is_recomputed(lm: LM, plain: Any) -> None:
    """The store refuses it; the request that would have used it computes (TensorRT-LLM#2217)."""
    engine = tiny_engine(lm, admit="none")
    engine.ingest([rag("a", 0)])
    entry = next(iter(engine.store))
    keys, values = ([t.clone() for t in kv] for kv in (entry.keys, entry.values))
    values[2][0, 3, 1] = float("nan")
    engine.forget(entry.key)
    used = engine.memory.nbytes
    assert not engine.store.put(replace(entry, keys=tuple(keys), values=tuple(values)))
    assert engine.store.n_not_finite == 1
    assert engine.memory.nbytes == used
    output = engine.generate(rag("b", 0))
    assert output.plan.matches[1].kind == "none"
    ids = engine.prefill(rag("b", 0)).prompt.ids
    assert (output.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4


def test_alone_stands_behind_bos_only(lm: LM) -> None:
    engine = tiny_engine(lm, context=Alone(), admit="none")
    engine.ingest([rag("a", 0, 1)])
    assert [entry.context for entry in engine.store] == ["alone", "alone"]
    for entry in engine.store:
        assert entry.position == 1
        bos = np.array([lm.tokenizer.bos_token_id])
        assert entry.context_key == chain_key(lm.namespace(), bos)
        ids = np.concatenate([bos, entry.ids])
        cold, _ = exact(lm, ids)
        for layer in range(lm.n_layers):
            assert torch.equal(entry.keys[layer], cold.keys[layer][0, :, 1:])
    output = engine.generate(rag("a", 0, 1))
    assert output.counts()["chunk"] > 20
    assert output.counts()["prefix"] == output.plan.chunks[0].end  # the system prompt, exact


def test_without_prefix_pages_the_head_is_an_entry(lm: LM, plain: Any) -> None:
    engine = tiny_engine(lm, reuse=("segment", "chunk"))
    assert engine.ingest([rag("a", 0)]) == 2
    assert [(e.context, e.position) for e in engine.store if e.position == 0] == [("start", 0)]
    assert len(engine.memory.prefix) == 0
    output = engine.generate(rag("b", 0))
    assert output.plan.n_paged == 0
    assert [match.kind for match in output.plan.matches] == ["prefix", "prefix"]
    ids = engine.prefill(rag("b", 0)).prompt.ids
    assert (output.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4
    assert len(engine.memory.prefix) == 0


def test_ingestion_is_exact_whatever_is_known(lm: LM) -> None:
    """A donor's head is copied where it is stored: the same KV as without."""
    warm, cold = tiny_engine(lm), tiny_engine(lm)
    warm.ingest([rag("a", 0)])
    assert warm.ingest([rag("b", 1)]) == 1
    assert warm.ingest([rag("b", 1)]) == 0
    cold.ingest([rag("b", 1)])
    mine = next(e for e in warm.store if e.text == PASSAGES[1])
    theirs = next(e for e in cold.store if e.text == PASSAGES[1])
    assert mine.key == theirs.key
    for a, b in zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True):
        assert (a - b).abs().max() <= 1e-5


def test_reused_kv_belongs_to_its_token_and_place(lm: LM) -> None:
    """At layer 0 K and V depend on the token and its position alone: all reused ones are exact
    there, whatever was aligned, cut or moved; prefix tokens are exact at every layer."""
    rng = np.random.default_rng(0)
    texts = [prose(70 + i, int(rng.integers(3, 30))) for i in range(6)]
    engine = semantic(lm, gate=ThresholdGate(0.3))
    seen = set()
    for i in range(12):
        passages = [texts[j] for j in rng.integers(0, 6, rng.integers(1, 5))]
        if i % 3 == 2:
            passages[-1] = passages[-1].replace(" ", " never ", int(rng.integers(1, 3)))
        system = SYSTEM if i % 4 else None
        request = Request.rag(str(i), passages, "Why?", system=system, max_new_tokens=1)
        done = engine.prefill(request)
        cold, _ = exact(lm, done.prompt.ids)
        provenance = torch.from_numpy(done.plan.provenance)
        seen |= set(provenance.tolist())
        n = len(provenance)
        for layer in range(lm.n_layers):
            rows = provenance == Provenance.PREFIX if layer else torch.ones(n, dtype=torch.bool)
            for mine, theirs in (
                (done.kv.keys[layer], cold.keys[layer]),
                (done.kv.values[layer], cold.values[layer]),
            ):
                assert (mine[:, :, :n] - theirs)[:, :, rows].abs().sum() <= 1e-4 * theirs.norm()
        engine.leave(done)
    assert seen == {Provenance.NEW, Provenance.PREFIX, Provenance.CHUNK, Provenance.SEMANTIC}


def test_plain_texts_are_ingested(llama: LM) -> None:
    engine = tiny_engine(llama)
    assert engine.ingest([PASSAGES[0], PASSAGES[1]], system=SYSTEM) == 2
    assert len(engine.memory.prefix) > 0  # and the head, in prefix pages
    output = engine.generate(rag("a", 1, 0))
    assert [m.kind for m in output.plan.matches] == ["prefix", "prefix", "chunk"]


@pytest.mark.parametrize("text", ["", "  ", "\n\n"])
def test_a_passage_without_content_is_left_out(llama: LM, text: str) -> None:
    request = Request.rag("r", [PASSAGES[0], text, PASSAGES[1]], "Why?", system=SYSTEM)
    for context in (InCompanyOwn(), Alone()):
        engine = semantic(llama, context=context)
        engine.ingest([request])
        assert {e.text for e in engine.store} == set(PASSAGES[:2])
        output = engine.generate(request)
        assert_counts(output)
        assert output.counts()["chunk"] > 20


def test_sentences_are_reused_out_of_order(lm: LM) -> None:
    """A finer chunker: sentences of a passage found again in another passage."""
    sentences = [prose(80 + i, 8) for i in range(4)]
    first, second = " ".join(sentences[:3]), " ".join([sentences[3], sentences[2], sentences[0]])
    engine = tiny_engine(lm, chunker=SentenceChunker(max_tokens=8), admit="none")
    engine.ingest([first], system=SYSTEM)
    output = engine.generate(Request.rag("r", [second], "Why?", system=SYSTEM))
    assert_counts(output)
    assert [m.kind for m in output.plan.matches] == ["prefix", "none", "chunk", "chunk"]


def test_donor_stands_in_for_target(llama: LM) -> None:
    donor, target = PASSAGES[0], PASSAGES[0].replace(" ", " old ", 1)
    request = Request.donor_target("r", donor, target, "Why?", system=SYSTEM)
    engine = semantic(llama, context=InCompany(), admit="none")
    engine.ingest([request])
    assert {entry.context for entry in engine.store} == {"behind_system"}
    output = engine.generate(request)
    assert [chunk.kind for chunk in output.plan.chunks] == ["system", "target"]
    assert output.plan.matches[1].kind == "semantic"
    assert output.counts()["semantic"] > 10


def test_conversations_grow_by_exact_turns(lm: LM, plain: Any) -> None:
    """Every turn is prefix of the next prompt, whose history renders alike."""
    turns = [Message("user", (Segment("turn", PASSAGES[0]),))]
    engine = tiny_engine(lm)
    before = -1
    for i in range(1, 4):
        ask = (*turns, Message("user", (Segment("question", f"Question {i}?"),)))
        output = engine.generate(Request(f"t{i}", ask, max_new_tokens=4))
        assert_counts(output)
        assert output.counts()["prefix"] > before
        assert output.counts()["chunk"] == 0
        before = output.counts()["prefix"]
        ids = engine.prefill(Request(f"t{i}", ask, max_new_tokens=4)).prompt.ids
        assert (output.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4
        turns += [
            Message("assistant", (Segment("turn", prose(i, 6)),)),
            Message("user", (Segment("turn", prose(90 + i, 10)),)),
        ]


@pytest.mark.parametrize(
    "request_",
    [
        Request("none"),
        Request("text", text=""),
        Request("space", text=" \n\t"),
        Request("message", (Message("user", (Segment("question", " "),)),)),
        Request("both", (Message("user", (Segment("question", "x"),)),), text=""),
    ],
    ids=lambda r: r.id,
)
def test_an_empty_prompt_is_refused(llama: LM, request_: Request) -> None:
    for verb in (tiny_engine(llama).generate, tiny_engine(llama).plan):
        with pytest.raises(DataError, match=f"request '{request_.id}': the prompt is empty"):
            verb(request_)


def test_a_passage_past_the_context_is_refused_at_ingestion(llama: LM) -> None:
    engine = tiny_engine(llama)
    with pytest.raises(ModelError, match="context of 512"):
        engine.ingest([prose(1, 900)])
    assert len(engine.store) == 0


def test_cost_is_counted_from_what_ran(lm: LM) -> None:
    request = rag("a", 0, 1, 2)
    cold = tiny_engine(lm, admit="none").generate(request).cost
    engine = tiny_engine(lm, recompute=EpicRecompute(0.2), context=InCompanyOwn(), admit="none")
    engine.ingest([request])
    output = engine.generate(request)
    assert output.cost.multiplications == lm.multiplications(output.computed)
    assert output.cost.multiplications < cold.multiplications
    assert cold.multiplications == lm.multiplications(np.ones_like(output.computed))
    assert output.cost.recomputed_layer_tokens == output.recomputed.sum()
    assert output.cost.recomputed_layer_tokens == lm.n_layers * output.counts()["recomputed"]
    at_rest = engine.memory.nbytes
    done = engine.prefill(request)
    assert output.cost.kv_bytes == done.cost.kv_bytes == engine.memory.nbytes
    own = len(done.kv.pages) - done.plan.n_paged // engine.memory.settings.page_size
    assert output.cost.kv_bytes == at_rest + own * engine.memory.pool.page_nbytes
    engine.drop(done)
    assert engine.memory.nbytes == at_rest > engine.store.nbytes > 0
    assert output.cost.ttft_ms >= output.cost.plan_ms + output.cost.load_ms
    kinds = {chunk.kind for chunk in output.plan.chunks}
    assert kinds <= CACHEABLE
