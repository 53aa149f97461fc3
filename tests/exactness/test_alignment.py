"""Aligned KV in a prompt: every token moved by its own delta, whatever order its source has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvsem.aligners.edit import EditAligner
from kvsem.aligners.hybrid import HybridAligner
from kvsem.aligners.nearest import NearestAligner
from kvsem.contexts.alone import Alone
from kvsem.contexts.behind_system import BehindSystem
from kvsem.embedders.hashing import HashingEmbedder
from kvsem.gates.lexical import LexicalGate
from kvsem.gates.threshold import ThresholdGate
from kvsem.harness import Arm, Harness
from kvsem.lm import LM
from kvsem.metrics.base import Metric
from kvsem.metrics.divergence import DivergenceMetric
from kvsem.metrics.kv_error import KvErrorMetric
from kvsem.recompute.all import AllRecompute
from kvsem.types import Provenance, Request
from tests.tiny import SYSTEM, exact, prose, relative, tiny_engine

DONOR = prose(1, 20)
WORDS = DONOR.rstrip(".").split(" ")
# turned round, with words said twice and words of its own
TARGET = " ".join([*WORDS[10:], *WORDS[3:9], "lantern", *WORDS[3:9], "lantern", WORDS[0]]) + "."
QUESTION = "Which river?"
REQUEST = Request.donor_target("r", DONOR, TARGET, QUESTION, system=SYSTEM)
PARTS: dict[str, Callable[[], Any]] = {
    "aligner": NearestAligner,
    "embedder": HashingEmbedder,
    "gate": lambda: ThresholdGate(-1.0),
}


def test_each_token_has_its_source_moved_by_its_own_delta(lm: LM) -> None:
    engine = tiny_engine(lm, **{name: make() for name, make in PARTS.items()}, admit="none")
    engine.ingest([REQUEST])
    loaded = engine.load(REQUEST)
    plan = loaded.plan
    moved = [run for run in plan.runs if plan.provenance[run.target] == Provenance.SEMANTIC]
    pairs = [(run.target + i, run.source + i) for run in moved for i in range(run.length)]
    sources = [s for _, s in sorted(pairs)]
    assert len(set(sources)) < len(sources)  # one donor token serves several
    assert sources != sorted(sources)
    entry = engine.store.get(moved[0].entry)
    assert entry is not None
    prompt = engine.render(Request.rag("d", [DONOR], QUESTION, system=SYSTEM))
    donor = prompt.ids[: entry.position + len(entry.ids)]
    assert donor[entry.position :].tolist() == entry.ids.tolist()
    there: dict[int, tuple[torch.Tensor, ...]] = {}
    values = lm.alone(donor, 0)[1]
    for target, source in pairs:
        at = entry.position + source
        if target - at not in there:  # the whole donor prompt, as if it began elsewhere
            there[target - at] = lm.alone(donor, target - at)[0]
        for layer in range(lm.n_layers):
            keys, kept = loaded.kv.read(layer, plan.n_tokens)
            assert relative(keys[0, :, target], there[target - at][layer][:, at]) <= 1e-5
            assert relative(kept[0, :, target], values[layer][:, at]) <= 1e-5
    engine.drop(loaded)


@pytest.mark.parametrize(
    "aligner", [NearestAligner, lambda: HybridAligner(EditAligner(), NearestAligner(-1.0))]
)
def test_what_is_recomputed_whole_is_exact_whatever_was_aligned(
    lm: LM, aligner: Callable[[], Any]
) -> None:
    parts = {name: make() for name, make in (PARTS | {"aligner": aligner}).items()}
    engine = tiny_engine(lm, **parts, recompute=AllRecompute(), admit="none")
    engine.ingest([REQUEST])
    done = engine.prefill(REQUEST)
    assert done.plan.matched.any()
    _, want = exact(lm, done.prompt.ids)
    assert relative(done.logits, want) <= 1e-5
    engine.drop(done)


def test_what_is_not_near_enough_is_computed(llama: LM) -> None:
    engine = tiny_engine(llama, **{name: make() for name, make in PARTS.items()}, admit="none")
    engine.ingest([REQUEST])
    plan = engine.plan(REQUEST)
    (chunk,) = (c for c in plan.chunks if c.kind == "target")
    new = plan.provenance[chunk.start : chunk.end] == Provenance.NEW
    ids = chunk.ids[new]
    entry = engine.store.get(str(plan.matches[-1].entry))
    assert entry is not None
    assert len(ids)
    assert not np.isin(ids, entry.ids).all()


# Control: the donor's own text ----------------------------------------------------------------


def test_substitute_reads_the_donor_in_the_targets_place(llama: LM) -> None:
    """Its answer is exact's to the donor's text, and is compared with exact's to the target's."""
    engine = tiny_engine(llama, admit="none")
    engine.ingest([REQUEST])
    exact_engine = tiny_engine(llama, admit="none", reuse=())
    arm = Arm("substitute", engine, substitute=True)
    metrics: list[Metric] = [DivergenceMetric(), KvErrorMetric()]
    ((row,),) = [r[2:] for r in Harness(llama, exact_engine, [arm], metrics).run([REQUEST])]
    asked = [Request.donor_target("x", t, t, QUESTION, system=SYSTEM) for t in (DONOR, TARGET)]
    read, wanted = (exact(llama, engine.render(a).ids)[1].log_softmax(-1) for a in asked)
    kl = float((wanted.exp() * (wanted - read)).sum())
    assert row["quality/kl_first_nats"] == pytest.approx(kl, rel=1e-3, abs=1e-6)
    assert kl > 1e-3
    assert row["reuse/prefix_tokens"] > 0
    assert row["reuse/semantic_tokens"] == 0
    assert "quality/kv_error_rel" not in row  # other tokens: nothing to compare one by one


@pytest.mark.parametrize("which", ["left out", "put in", "behind others"])
def test_how_far_apart_prompt_and_donor_are_ahead_of_each_token(llama: LM, which: str) -> None:
    """Of the tokens ahead of it in either, those that only one has: counted in the two prompts."""
    short = " ".join([prose(1, 12), prose(3, 20)])
    long = " ".join([prose(1, 12), prose(2, 30), prose(3, 20)])
    texts = {
        "left out": (long, short),
        "put in": (short, long),
        "behind others": (short, f"{short} lantern"),
    }
    donor, target = texts[which]
    others = [prose(4)] if which == "behind others" else []
    engine = tiny_engine(
        llama,
        aligner=EditAligner(),
        embedder=HashingEmbedder(),
        gate=ThresholdGate(-1.0),
        context=BehindSystem(),
        admit="none",
    )
    engine.ingest([donor], system=SYSTEM)
    loaded = engine.load(Request.rag("r", [*others, target], QUESTION, system=SYSTEM))
    prompt, apart = loaded.prompt.ids, loaded.repair.state.apart
    there = engine.render(Request.rag("d", [donor], QUESTION, system=SYSTEM)).ids
    assert apart is not None
    checked = 0
    for run in loaded.plan.runs:
        entry = engine.store.get(run.entry)
        assert entry is not None
        if loaded.plan.provenance[run.target] == Provenance.PREFIX:
            continue
        for i in range(run.length):
            here, at = run.target + i, entry.position + run.source + i
            same = int((EditAligner().align(prompt[:here], there[:at]) >= 0).sum())
            assert float(apart[here]) == pytest.approx(1 - same / (here + at - same), abs=0.02)
            checked += 1
    assert checked >= 20
    assert float(apart[loaded.plan.computed].max()) == 0
    engine.drop(loaded)


def test_how_far_apart_they_are_does_not_hang_on_other_requests_or_on_the_gate(llama: LM) -> None:
    """Prefix pages that a request left behind say nothing of the donor; what a gate has computed
    stands in both texts."""
    first, shared = prose(4, 40), " ".join(f"{i} {prose(i, 12)}" for i in range(6))
    edited = shared.replace("2 ", "7 ").replace("4 ", "9 ")
    asked = Request.rag("q", [first, edited], QUESTION, system=SYSTEM, max_new_tokens=1)
    found = []
    for gate in (ThresholdGate(-1.0), LexicalGate()):
        for before in ([], [Request.rag("p", [first], QUESTION, system=SYSTEM, max_new_tokens=1)]):
            engine = tiny_engine(
                llama, embedder=HashingEmbedder(), gate=gate, context=BehindSystem(), admit="all"
            )
            for request in before:
                engine.generate(request)
            engine.ingest([shared], system=SYSTEM)
            loaded = engine.load(asked)
            apart, similar = loaded.repair.state.apart, loaded.repair.state.similar
            assert apart is not None
            assert similar is not None
            found.append((similar.numpy(), apart.numpy()))
            engine.drop(loaded)
    first_similar, first_apart = found[0]
    for also_similar, also_apart in found:
        both = also_similar & first_similar
        assert both.sum() > 20
        np.testing.assert_allclose(also_apart[both], first_apart[both], atol=0.02)


def test_a_donor_that_stood_alone_shares_nothing_ahead(llama: LM) -> None:
    short, long = prose(3, 30), " ".join([prose(2, 8), prose(3, 30)])
    engine = tiny_engine(
        llama,
        embedder=HashingEmbedder(),
        gate=ThresholdGate(-1.0),
        context=Alone(),
        admit="none",
    )
    engine.ingest([long], system=SYSTEM)
    loaded = engine.load(Request.rag("q", [short], QUESTION, system=SYSTEM))
    run = max(loaded.plan.runs, key=lambda run: run.length)
    entry = engine.store.get(run.entry)
    apart = loaded.repair.state.apart
    assert entry is not None
    assert apart is not None
    assert entry.position == 1  # behind the token that begins a text
    assert float(apart[run.target]) >= 1 - 2 / run.target
    engine.drop(loaded)
