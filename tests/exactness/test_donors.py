"""Donors behind dummies, and donors of filler: what was really computed, and who finds it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvsem import rope
from kvsem.contexts.base import FILLER, DonorContext
from kvsem.contexts.behind_dummy import BehindDummy
from kvsem.contexts.behind_filler import BehindFiller
from kvsem.contexts.behind_system import BehindSystem
from kvsem.contexts.filler_kv import FillerKV
from kvsem.contexts.in_company import InCompany
from kvsem.engine import Engine
from kvsem.harness import Arm, Harness
from kvsem.lm import LM
from kvsem.memory.memory import MemorySettings
from kvsem.metrics.divergence import DivergenceMetric
from kvsem.recompute.all import AllRecompute
from kvsem.types import ChunkKV, Provenance, Request
from tests.tiny import SYSTEM, exact, prose, relative, tiny_engine

PASSAGES = [prose(seed) for seed in range(4)]
REQUESTS = [
    Request.rag(f"q-{i}", [prose(3 * i + j) for j in range(3)], "Which river?", system=SYSTEM)
    for i in range(4)
]
ALONE = [Request.rag(f"a-{i}", [text], "?", system=SYSTEM) for i, text in enumerate(PASSAGES)]


def entries(lm: LM, context: DonorContext) -> dict[str, ChunkKV]:
    engine = tiny_engine(lm, context=context)
    engine.ingest(ALONE)
    found = {entry.text: entry for entry in engine.store if entry.context != "start"}
    assert found.keys() == set(PASSAGES)
    return found


def head(lm: LM) -> np.ndarray:
    """Tokens ahead of the first passage."""
    prompt = tiny_engine(lm).render(ALONE[0])
    return prompt.ids[: prompt.pieces[0].end]


def ids_of(lm: LM, text: str) -> np.ndarray:
    return np.array(lm.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def holds(lm: LM, entry: ChunkKV, ids: np.ndarray, start: int) -> bool:
    """Whether the entry's KV is that of the tokens from ``start`` on in a forward over ``ids``."""
    kv, _ = exact(lm, ids)
    keys, values = kv.cut(start, start + len(entry.ids))
    wanted = zip((*entry.keys, *entry.values), (*keys, *values), strict=True)
    return all(relative(got, want) < 1e-5 for got, want in wanted)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("bare", [False, True])
def test_dummies_stand_ahead_of_the_passage_and_are_dropped(lm: LM, n: int, bare: bool) -> None:
    ahead = np.array([lm.tokenizer.bos_token_id]) if bare else head(lm)
    dummy = ids_of(lm, "\n")[-1:]
    for text, entry in entries(lm, BehindDummy(n, bare)).items():
        assert lm.tokenizer.decode(entry.ids).strip() == text
        assert entry.position == len(ahead) + n
        assert entry.context == "behind_dummy"
        assert entry.depth == 0
        ids = np.concatenate([ahead, np.repeat(dummy, n), entry.ids])
        assert holds(lm, entry, ids, len(ahead) + n)
        ids[len(ahead)] += 1  # another dummy makes another KV
        assert not holds(lm, entry, ids, len(ahead) + n)


def test_a_passage_behind_dummies_is_never_exact(llama: LM) -> None:
    engine = tiny_engine(llama, context=BehindDummy(), admit="none")
    engine.ingest(ALONE)
    plan = engine.plan(ALONE[0])
    assert [match.kind for match in plan.matches] == ["prefix", "chunk"]


@pytest.mark.parametrize("words", [None, 5, 40])
def test_filler_ahead_is_as_long_as_the_passage_or_as_asked(llama: LM, words: int | None) -> None:
    engine = tiny_engine(llama, context=BehindFiller(words))
    engine.ingest(ALONE)
    n_head = len(head(llama))
    for entry in (e for e in engine.store if e.text in PASSAGES):
        (donor,) = [d for d in engine.context.donors(ALONE, 0) if d.text == entry.text]
        (filler,) = donor.company
        assert FILLER.startswith(filler[:20])
        assert entry.position == n_head + len(ids_of(llama, filler))
        if words is None:
            assert 0.9 < len(filler) / len(entry.text) <= 1
        else:
            assert len(filler.split()) == words


def test_filler_kv_is_that_of_filler_under_the_passage_s_name(lm: LM) -> None:
    own, ahead = entries(lm, BehindSystem()), head(lm)
    for text, entry in entries(lm, FillerKV()).items():
        assert entry.key == own[text].key
        assert lm.tokenizer.decode(entry.ids).strip() == text
        filler = np.resize(ids_of(lm, FILLER), len(entry.ids))
        assert holds(lm, entry, np.concatenate([ahead, filler]), len(ahead))
        assert not holds(lm, entry, np.concatenate([ahead, entry.ids]), len(ahead))
        assert (entry.context, entry.depth) == ("filler_kv", 1)


def test_several_draws_store_the_mean_and_count_as_approximate(lm: LM) -> None:
    """Keys as they would be at the place of the first draw; no more bytes than of one."""
    drawn = InCompany(n=1, draws=3)
    one = entries(lm, InCompany(n=1))
    asked = {d.text: (d.company, *d.also) for d in drawn.donors(ALONE, 0)}
    for text, entry in entries(lm, drawn).items():
        assert len(asked[text]) == 3
        assert (entry.position, entry.depth) == (one[text].position, 1)
        assert entry.nbytes == one[text].nbytes
        keys, values = [], []
        for company in asked[text]:
            ids = ids_to(lm, [*company, text])
            kv, _ = exact(lm, ids)
            start = len(ids) - len(entry.ids)
            own, value = kv.cut(start, len(ids))
            turns = lm.angles([entry.position - start])
            kinds = zip(own, lm.layer_types, lm.pairs, strict=True)
            keys.append([rope.shift(k, *turns[at], pair) for k, at, pair in kinds])
            values.append(value)
        for layer in range(lm.n_layers):
            for got, draws in ((entry.keys, keys), (entry.values, values)):
                mean = torch.stack([draw[layer] for draw in draws]).mean(0)
                assert relative(got[layer], mean) < 1e-5
                assert relative(got[layer], draws[0][layer]) > 1e-3 or layer == 0


def test_the_mean_is_never_reused_as_a_segment_and_its_head_is_exact(llama: LM) -> None:
    engine = tiny_engine(
        llama, context=InCompany(draws=2), admit="none", reuse=["prefix", "segment"]
    )
    engine.ingest(ALONE)
    (donor, *_) = engine.context.donors(ALONE, 0)
    served = Request.rag("", [*donor.company, donor.text], "?", system=SYSTEM)
    assert [m.kind for m in engine.plan(served).matches][-1] == "none"
    same = tiny_engine(llama, context=InCompany(), admit="none", reuse=["prefix", "segment"])
    same.ingest(ALONE)
    assert [m.kind for m in same.plan(served).matches][-1] == "prefix"
    done = engine.prefill(served)
    assert done.plan.provenance[: len(head(llama))].tolist() == [Provenance.PREFIX] * len(
        head(llama)
    )
    logits = exact(llama, done.prompt.ids)[1]
    assert relative(done.logits, logits) < 1e-5


def ids_to(lm: LM, passages: list[str]) -> np.ndarray:
    """The prompt up to the end of its last passage."""
    prompt = tiny_engine(lm).render(Request.rag("", passages, "Question: ?", system=SYSTEM))
    return prompt.ids[: [p for p in prompt.pieces if p.kind == "passage"][-1].end]


def control(lm: LM, **parts: object) -> Engine:
    """As ``conf/arm/filler_kv.yaml`` makes it."""
    salted = MemorySettings(salt="filler_kv")
    return tiny_engine(lm, context=FillerKV(), memory=salted, admit="none", **parts)


def test_filler_is_far_from_exact_and_costs_what_none_costs(lm: LM) -> None:
    engines = {"filler_kv": control(lm)}
    engines["none"] = tiny_engine(lm, context=InCompany(), admit="none")
    for engine in engines.values():
        engine.ingest(REQUESTS)
    harness = Harness(
        lm,
        tiny_engine(lm, admit="none", reuse=()),
        [Arm(name, engine) for name, engine in engines.items()],
        (DivergenceMetric(),),
    )
    rows = [row for group in harness.run(REQUESTS) for row in group]
    kl = {
        arm: np.mean([row["quality/kl_nats"] for row in rows if row["arm"] == arm])
        for arm in engines
    }
    assert kl["filler_kv"] > 3 * kl["none"] > 0
    for key in ("reuse/prefix_tokens", "reuse/chunk_tokens", "reuse/new_tokens", "cost/flop_ratio"):
        counts = {arm: [row[key] for row in rows if row["arm"] == arm] for arm in engines}
        assert counts["filler_kv"] == counts["none"], key


def test_filler_is_never_exact_and_all_of_it_can_be_recomputed(llama: LM) -> None:
    """The first passage of a prompt stands where its donor stood: still no prefix."""
    engine = control(llama, recompute=AllRecompute())
    engine.ingest(ALONE)
    done = engine.prefill(ALONE[0])
    assert [match.kind for match in done.plan.matches] == ["prefix", "chunk"]
    _, want = exact(llama, done.prompt.ids)
    torch.testing.assert_close(done.logits, want, atol=1e-4, rtol=1e-4)
    engine.drop(done)


def test_nobody_else_finds_filler(llama: LM) -> None:
    """Its keys are its own, in whatever tier they lie."""
    engine, other = control(llama), tiny_engine(llama, context=FillerKV(), admit="none")
    for one in (engine, other):
        one.ingest(ALONE)
    chunks = ({e.key for e in one.store if e.text in PASSAGES} for one in (engine, other))
    mine, ordinary = chunks
    assert len(mine) == len(ordinary) == len(PASSAGES)
    assert not mine & ordinary
    plan = tiny_engine(llama).plan(REQUESTS[0])
    assert {chunk.key for chunk in plan.chunks} & ordinary
    assert not {chunk.key for chunk in plan.chunks} & mine
