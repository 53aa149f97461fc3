"""The same requests and documents in another order: nothing is left over, little is lost.

LMCache#2496 (later items garbled in one process), LMCache#4667 (a fixed grid loses at every seam).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvsem.contexts.behind_system import BehindSystem
from kvsem.embedders.hashing import HashingEmbedder
from kvsem.engine import Engine
from kvsem.lm import LM
from kvsem.recompute.cacheblend import CacheBlendRecompute
from kvsem.types import SEPARATOR, Output, Provenance, Request
from tests.tiny import SYSTEM, prose, tiny_engine

DOCUMENTS = [prose(70 + i, 12 + i % 3) for i in range(8)]
DONORS = [Request.rag(f"donor-{i}", [d], "?", system=SYSTEM) for i, d in enumerate(DOCUMENTS)]
SCRIPT = """
import json, sys, torch
torch.set_num_threads(1)
from tests.exactness.test_orders import DONORS, blending, item
from tests.tiny import tiny_lm
output = blending(tiny_lm("llama"), DONORS).generate(item(int(sys.argv[1])))
print(json.dumps([output.tokens, output.logits.tolist(), output.provenance.tolist()]))
"""


def item(i: int) -> Request:
    """Two or three documents in an order of its own; one of them is edited now and then."""
    rng = np.random.default_rng(i)
    texts = [DOCUMENTS[k] for k in rng.permutation(len(DOCUMENTS))[: 2 + i % 2]]
    if i % 4 == 0:
        texts[0] = texts[0].replace(" ", " old ", 1)
    return Request.rag(f"item-{i}", texts, f"Why {i}?", system=SYSTEM, max_new_tokens=6)


def blending(lm: LM, donors: Sequence[Request], **more: Any) -> Engine:
    """A read-only engine with everything on: prefix, chunks, similar chunks, recomputation."""
    engine = tiny_engine(
        lm,
        recompute=CacheBlendRecompute(0.3),
        embedder=HashingEmbedder(),
        admit="none",
        context=BehindSystem(),
        **more,
    )
    engine.ingest(donors)
    return engine


@pytest.fixture(scope="module")
def fresh(llama: LM) -> list[Output]:
    """Twenty engines, one for each item."""
    return [blending(llama, DONORS).generate(item(i)) for i in range(20)]


@pytest.mark.parametrize("order", ["as they come", "shuffled"])
def test_twenty_items_in_one_engine_are_twenty_engines(
    llama: LM, fresh: list[Output], order: str
) -> None:
    """A14."""
    served = blending(llama, DONORS)
    shuffled = np.random.default_rng(0).permutation(20).tolist()
    for i in range(20) if order == "as they come" else shuffled:
        output = served.generate(item(i))
        assert output.tokens == fresh[i].tokens
        assert torch.equal(output.logits, fresh[i].logits)
        assert (output.provenance == fresh[i].provenance).all()
    kinds = set(np.concatenate([output.provenance for output in fresh]).tolist())
    assert kinds == set(Provenance)  # every path was taken
    assert served.memory.pool.n_active == 0


def test_an_item_in_a_process_of_its_own_is_answered_alike(fresh: list[Output]) -> None:
    """A14: neither the engines nor the modules keep anything of the items before."""
    command = [sys.executable, "-c", SCRIPT]
    root = Path(__file__).parents[2]
    processes = {
        i: subprocess.Popen([*command, str(i)], cwd=root, stdout=subprocess.PIPE, text=True)
        for i in (4, 19)
    }
    for i, process in processes.items():
        tokens, logits, provenance = json.loads(process.communicate()[0])
        assert tokens == list(fresh[i].tokens)
        assert (torch.tensor(logits) - fresh[i].logits).abs().max() <= 1e-6
        assert provenance == fresh[i].provenance.tolist()


def test_a_cache_that_fills_answers_as_cold(llama: LM) -> None:
    """With exact pages only, order decides what is reused, never what is answered."""
    cold = tiny_engine(llama, reuse=(), admit="none")
    want = [cold.generate(item(i)) for i in range(20)]
    for order in (range(20), reversed(range(20))):
        engine = tiny_engine(llama, reuse=("prefix",))
        n = 0
        for i in order:
            output = engine.generate(item(i))
            assert output.tokens == want[i].tokens
            assert (output.logits - want[i].logits).abs().max() <= 1e-4
            n += output.counts()["prefix"]
        assert n > 19 * 10  # the system prompt at least


# Seams ----------------------------------------------------------------------------------------


def seam_loss(output: Output) -> int:
    """What is declared: of a document the tokens of its first and last word, and of the separator
    ahead of it, may differ from those that it was stored with (`kvsem.types.Chunk.inner`)."""
    passages = [c for c in output.plan.chunks if c.kind == "passage"]
    return sum(len(c.ids) - (c.inner[1] - c.inner[0]) for c in passages)


@pytest.mark.parametrize("context", ["ingested", "served"])
def test_ten_documents_of_odd_length_in_two_orders(lm: LM, context: str) -> None:
    documents = [prose(90 + i, 7 + 2 * i) for i in range(10)]
    orders = [list(range(10)), [7, 2, 9, 0, 5, 8, 1, 6, 3, 4]]
    first, second = (
        Request.rag(f"r{k}", [documents[i] for i in order], "Why?", system=SYSTEM)
        for k, order in enumerate(orders)
    )
    engine = tiny_engine(lm)
    if context == "ingested":
        engine.ingest([first])
    else:
        engine.generate(first)
    output = engine.generate(second)
    passages = [c for c in output.plan.chunks if c.kind == "passage"]
    assert [c.text for c in passages] == [documents[i] for i in orders[1]]
    lengths = [len(c.ids) for c in passages]
    assert any(n % 16 for n in lengths)
    reused = sum(
        int((output.provenance[c.start : c.end] != Provenance.NEW).sum()) for c in passages
    )
    assert reused >= sum(lengths) - seam_loss(output)
    separator = len(lm.tokenizer(SEPARATOR, add_special_tokens=False)["input_ids"])
    assert reused >= sum(lengths) - separator * len(passages)  # here nothing else differs
    assert reused > 1.2 * sum(n // 16 * 16 for n in lengths)  # what a grid of 16 could keep
