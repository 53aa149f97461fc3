"""On a GPU: the same exactness, in fp32 and bf16. Skipped where there is none."""

import pytest
import torch

from kvsem.lm import LM
from kvsem.recompute.all import AllRecompute
from kvsem.recompute.cacheblend import CacheBlendRecompute
from kvsem.selfcheck import check
from kvsem.types import Request
from tests.tiny import SYSTEM, prose, tiny_engine, tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ASKED = [
    Request.rag(f"q-{i}", [prose(i + j, 60) for j in range(5)], "Which river?", system=SYSTEM)
    for i in range(2)
]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recompute_all_is_exact_and_a_subset_is_finite(kind: str, dtype: torch.dtype) -> None:
    model = tiny_model(kind, dtype, max_position_embeddings=2048).to("cuda")
    lm = LM(model, tiny_tokenizer(), kind)
    lm.support = check(lm)
    assert lm.support["moved_chunk"][0], lm.support
    assert lm.support["blend"][0], lm.support
    exact = tiny_engine(lm).prefill(ASKED[1]).logits
    for rule, limit in ((AllRecompute(), 1e-4), (CacheBlendRecompute(0.3), float("inf"))):
        engine = tiny_engine(lm, recompute=rule)
        engine.ingest(ASKED)
        done = engine.prefill(ASKED[1])
        assert done.plan.matched.any()
        assert torch.isfinite(done.logits).all()
        scale = float(exact.abs().max()) if dtype == torch.bfloat16 else 1.0
        allowed = 5e-2 * scale if dtype == torch.bfloat16 else limit
        if rule.needs.fresh_layers == ():
            assert float((done.logits - exact).abs().max()) <= allowed
