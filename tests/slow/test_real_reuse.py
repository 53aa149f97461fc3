"""Reuse on the real small model: an edited document, and a gate that must not be asked twice."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator

import pytest
import torch

from kvsem.embedders.minilm import MinilmEmbedder
from kvsem.engine import Engine
from kvsem.lm import LM, load
from kvsem.recompute.all import AllRecompute
from kvsem.types import Request
from kvsem.workloads.pydoc import PydocWorkload

pytestmark = [pytest.mark.slow, pytest.mark.ci]


@pytest.fixture(scope="module")
def lm() -> Iterator[LM]:
    torch.set_num_threads(2)
    yield load("smollm2", packaged=True, device="cpu")
    torch.set_num_threads(1)


def kl(exact: torch.Tensor, other: torch.Tensor) -> float:
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def test_the_real_model_supports_reuse(lm: LM) -> None:
    assert {name for name, (ok, _) in lm.support.items() if ok} == {
        "exact_prefix",
        "moved_chunk",
        "blend",
    }


def test_bf16_supports_the_same() -> None:
    lm = load("smollm2", packaged=True, device="cpu", dtype="bfloat16")
    assert all(lm.support[name][0] for name in ("exact_prefix", "moved_chunk", "blend")), lm.support


def test_an_edited_document_is_reused_where_it_did_not_change(lm: LM) -> None:
    requests = list(PydocWorkload(limit=1))
    document = "\n".join(requests[0].segments("passage")[:3])
    words = document.split(" ")
    edited = " ".join([*words[:40], "however,", *words[40:]])
    asked = Request.donor_target("edit", document, edited, "What is said?", system="Answer.")
    exact = Engine(lm).prefill(asked)
    engine = Engine(lm, embedder=MinilmEmbedder(), admit="none")
    engine.ingest([asked])
    done = engine.prefill(asked)
    match = done.plan.matches[1]
    assert match.kind == "semantic"
    assert match.score is not None
    assert match.score > 0.85
    provenance = done.plan.provenance
    assert (provenance == 1).sum() > 40  # up to the edit the context is the same: exact
    assert (provenance == 3).sum() > 200
    assert 0 < kl(exact.logits, done.logits) < 0.05
    again = Engine(lm, embedder=MinilmEmbedder(), admit="none", recompute=AllRecompute())
    again.ingest([asked])
    assert kl(exact.logits, again.prefill(asked).logits) < 1e-7
