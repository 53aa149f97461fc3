"""Token sets that shrink with depth, against loops written by hand from the model's own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvsem.errors import KvsemError
from kvsem.forward import KVBuffer
from kvsem.lm import LM
from kvsem.recompute.cacheblend import CacheBlendRecompute
from kvsem.types import Request
from tests.tiny import (
    SYSTEM,
    copy_of,
    every,
    exact,
    only,
    prose,
    relative,
    tiny_engine,
    tiny_lm,
    tiny_model,
    tokens,
)

N = 48
IDS = tokens(N, seed=6)
SIZES = (34, 21, 12, 4)


def shrinking() -> list[torch.Tensor]:
    """Nested sets of `SIZES` tokens, the last token in each."""
    order = torch.randperm(N - 1, generator=torch.Generator().manual_seed(3))
    return [only(N, order[: size - 1]) for size in SIZES]


def noise(lm: LM) -> KVBuffer:
    kv = exact(lm, IDS)[0]
    generator = torch.Generator().manual_seed(1)
    for tensor in (*kv.keys, *kv.values):
        tensor += 0.5 * torch.randn(tensor.shape, generator=generator)
    return kv


@torch.no_grad()
def by_hand(model: Any, kv: KVBuffer, sets: list[torch.Tensor]) -> torch.Tensor:
    """Llama, one layer after the other; logits of the last row. Writes into ``kv``."""
    rows = sets[0].nonzero()[:, 0]
    hidden = model.model.embed_tokens(torch.from_numpy(IDS)[rows])[None]
    for layer, keep in zip(model.model.layers, sets, strict=True):
        index = layer.self_attn.layer_idx
        hidden, rows = hidden[:, keep[rows]], keep.nonzero()[:, 0]
        normed = layer.input_layernorm(hidden)
        heads = (1, len(rows), -1, layer.self_attn.head_dim)
        query = layer.self_attn.q_proj(normed).view(heads).transpose(1, 2)
        key = layer.self_attn.k_proj(normed).view(heads).transpose(1, 2)
        value = layer.self_attn.v_proj(normed).view(heads).transpose(1, 2)
        cos, sin = model.model.rotary_emb(hidden, rows[None])
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        kv.keys[index][:, :, rows], kv.values[index][:, :, rows] = key, value
        groups = layer.self_attn.num_key_value_groups
        keys = kv.keys[index].repeat_interleave(groups, dim=1)
        values = kv.values[index].repeat_interleave(groups, dim=1)
        scores = query @ keys.transpose(2, 3) * layer.self_attn.scaling
        hidden_from = torch.arange(N)[None] > rows[:, None]
        weights = scores.masked_fill(hidden_from, float("-inf")).softmax(-1)
        mixed = (weights @ values).transpose(1, 2).reshape(1, len(rows), -1)
        hidden = hidden + layer.self_attn.o_proj(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits: torch.Tensor = model.lm_head(model.model.norm(hidden))[0, -1]
    return logits


@pytest.mark.parametrize("name", ["llama", "llama3"])
def test_shrinking_sets_as_a_hand_written_loop_does(name: str) -> None:
    lm, sets = tiny_lm(name), shrinking()
    mine, theirs = noise(lm), noise(lm)
    logits, computed = lm.prefill(IDS, mine, lambda layer: sets[layer])
    want = by_hand(tiny_model(name), theirs, sets)
    assert [int(c.sum()) for c in computed] == list(SIZES)
    assert (torch.from_numpy(computed) == torch.stack(sets)).all()
    assert (logits - want).abs().max() <= 1e-4
    for a, b in zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True):
        assert relative(a, b) <= 1e-5


def test_shrinking_sets_as_one_layer_at_a_time(lm: LM) -> None:
    """For every architecture: a full forward of the plain layers whose cache keeps layer l's rows.

    Layer l of the narrowed run sees the donor's KV outside its set, so a forward over set 0 in
    which each layer writes only its own rows gives the same rows at every layer.
    """
    sets = shrinking()
    mine, oracle = noise(lm), noise(lm)
    logits, _ = lm.prefill(IDS, mine, lambda layer: sets[layer])
    want = masked_writes(lm, oracle, sets)
    assert (logits - want).abs().max() <= 1e-4
    for a, b in zip((*mine.keys, *mine.values), (*oracle.keys, *oracle.values), strict=True):
        assert relative(a, b) <= 1e-5


def masked_writes(lm: LM, kv: KVBuffer, sets: list[torch.Tensor]) -> torch.Tensor:
    """Compute set 0 at every layer, layer by layer from below, and undo what is not in its set.

    Run l writes rows of set 0 in layers ≥ l; those outside set l get the donor's KV back.
    """
    donor = copy_of(kv)
    for layer in range(lm.n_layers):
        logits, _ = lm.prefill(IDS, kv, _frozen(sets, layer))
        gone = ~sets[layer]
        for mine, theirs in ((kv.keys, donor.keys), (kv.values, donor.values)):
            mine[layer][:, :, gone] = theirs[layer][:, :, gone]
            for above in range(layer + 1, lm.n_layers):
                mine[above][:] = theirs[above]
    return logits


def _frozen(sets: list[torch.Tensor], layer: int) -> Any:
    return lambda at: sets[min(at, layer)]


def test_a_set_that_grows_is_refused(lm: LM) -> None:
    small, large = only(N, [5, 6]), only(N, [5, 6, 7])
    with pytest.raises(KvsemError, match="layer before left out"):
        lm.prefill(IDS, noise(lm), lambda layer: large if layer == 2 else small)
    assert lm.prefill(IDS, noise(lm), lambda _: small)[0].isfinite().all()  # no hook is left


@pytest.mark.parametrize(
    "bad", [torch.zeros(N, dtype=torch.bool), every(N - 1), every(N + 1)], ids=["last", "-", "+"]
)
@pytest.mark.parametrize("at", [0, 2])
def test_a_set_without_the_last_token_or_of_another_length_is_refused(
    llama: LM, bad: torch.Tensor, at: int
) -> None:
    with pytest.raises(KvsemError, match=f"layer {at}"):
        llama.prefill(IDS, noise(llama), lambda layer: bad if layer == at else every(N))


def test_cacheblend_narrows_to_the_values_that_deviate_most(lm: LM) -> None:
    """The set shrinks behind layer 1, to what an independent computation of the deviation gives."""
    passages = [prose(20 + i, 30) for i in range(3)]
    request = Request.rag("r", passages, "Why?", system=SYSTEM)
    engine = tiny_engine(lm, recompute=CacheBlendRecompute(ratio=0.2))
    engine.ingest([request])
    done = engine.prefill(request)
    matched, computed = torch.from_numpy(done.plan.matched), torch.from_numpy(done.computed)
    assert computed[0][matched].all()
    assert computed[1][matched].all()
    chosen = computed[2] & matched
    assert (computed[2] == computed[3]).all()

    none = tiny_engine(lm)
    none.ingest([request])
    reused = none.prefill(request).kv.values[1][0]
    cold = exact(lm, done.prompt.ids)[0].values[1][0]
    assert computed[:2].sum() == 2 * int((matched | computed[2]).sum())
    deviation = (cold - reused[:, : len(matched)]).square().sum(dim=(0, 2))
    deviation[~matched] = -1
    budget = round(0.2 * int(matched.sum()))
    assert set(deviation.topk(budget).indices.tolist()) == set(chosen.nonzero()[:, 0].tolist())


def test_cacheblend_by_keys_chooses_otherwise(llama: LM) -> None:
    request = Request.rag("r", [prose(20 + i, 30) for i in range(3)], "Why?", system=SYSTEM)
    sets = []
    for deviation in ("value", "key"):
        engine = tiny_engine(llama, recompute=CacheBlendRecompute(0.2, deviation=deviation))
        engine.ingest([request])
        sets.append(engine.prefill(request).computed[-1])
    assert sets[0].sum() == sets[1].sum()
    assert (sets[0] != sets[1]).any()
