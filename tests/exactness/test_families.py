"""Every family of the support table: exact, or off with the reason and answered exactly.

LMCache#242, #4666; CacheBlend#6; llama.cpp#4097, #8498, #12357, PR 10401, PR 12161;
transformers#37574; tpu-inference PR 3412.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedTokenizerFast

from kvsem import rope
from kvsem.aligners.edit import EditAligner
from kvsem.errors import ModelError
from kvsem.forward import Job, KVBuffer
from kvsem.lm import CACHE, LM
from kvsem.memory.gather import gather
from kvsem.prompt import render
from kvsem.recompute.all import AllRecompute
from kvsem.selfcheck import check
from kvsem.types import ChunkKV, Message, Output, Request, Run
from tests.families import FAMILIES, HOOKED, LEARNED, MOVABLE, ORIGINAL, family_lm, family_plain
from tests.tiny import (
    SYSTEM,
    WINDOW,
    copy_of,
    every,
    exact,
    fast,
    only,
    plain_generate,
    plain_logits,
    prose,
    relative,
    tiny_engine,
    tiny_tokenizer,
    tokens,
    wrap,
)

N = 40
IDS = tokens(N, seed=31)
REUSING = [name for name, family in FAMILIES.items() if not family.prefix]
WINDOWED = ["Mistral", "Gemma 2", "Gemma 3", "Cohere 2", "GPT-OSS", "GPT-Neo"]
EDGES = [(kept, new) for kept in (WINDOW - 1, WINDOW, WINDOW + 1) for new in (1, WINDOW + 5)]
PREFIXES = [(name, kept, WINDOW + 5) for name in REUSING for kept in (1, 3 * WINDOW)]
PREFIXES += [(name, *edge) for name in WINDOWED for edge in (*EDGES, (3 * WINDOW, 1))]
LONGROPE = [name for name in FAMILIES if "longrope" in name]
REQUEST = Request.rag("r", [prose(1), prose(2)], "Why?", system=SYSTEM, max_new_tokens=12)
REORDERED = Request.rag("s", [prose(2), prose(1)], "Why?", system=SYSTEM, max_new_tokens=12)


def assert_answers_exactly(name: str, request: Request, output: Output) -> None:
    ids = render(family_lm(name).tokenizer, request).ids
    want = plain_logits(family_plain(name), ids)[-1]
    assert want.abs().max() > 0.1
    assert (output.logits - want).abs().max() <= 1e-4
    assert list(output.tokens) == plain_generate(family_plain(name), ids, request.max_new_tokens)


# What is supported ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_support_table_says_what_is_on_and_why_not_the_rest(name: str) -> None:
    family, lm = FAMILIES[name], family_lm(name)
    expected = {"exact_prefix": family.prefix, "moved_chunk": family.moved}
    for capability, reason in expected.items():
        ok, why = lm.support[capability]
        assert ok == (not reason)
        assert reason in why
        assert "\n" not in why
    assert lm.support["blend"][0] or family.moved  # what can be moved can be recomputed
    assert bool(lm.hooked) == (not family.hooked)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_answers_exactly(name: str) -> None:
    """Cold, over its own prefix, and with every chunk moved and recomputed."""
    engine = tiny_engine(family_lm(name), recompute=AllRecompute())
    engine.ingest([REQUEST])
    outputs = [engine.generate(request) for request in (REQUEST, REQUEST, REORDERED)]
    for request, output in zip((REQUEST, REQUEST, REORDERED), outputs, strict=True):
        assert_answers_exactly(name, request, output)
        assert sum(output.counts().values()) == output.plan.n_tokens
    first, again, reordered = (output.counts() for output in outputs)
    family = FAMILIES[name]
    assert (again["prefix"] > first["prefix"] > 0) == (not family.prefix)
    assert (reordered["recomputed"] > 20) == (not family.moved)
    if family.moved:
        assert any(family.moved in reason for reason in outputs[2].plan.refused)
        assert first["new"] + first["prefix"] == outputs[0].plan.n_tokens
    if family.prefix:
        assert first["new"] == again["new"] == outputs[1].plan.n_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plain_forward_is_left_as_it_was(name: str) -> None:
    want = plain_logits(family_plain(name), IDS)[-1]
    assert (family_lm(name).plain(IDS) - want).abs().max() <= 1e-5 * want.abs().max()
    ids = torch.from_numpy(np.stack([IDS, IDS]))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0  # padded on the left
    got, wanted = (
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -1]
        for model in (family_lm(name).model, family_plain(name))
    )
    assert (got - wanted).abs().max() <= 1e-4


# Exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kept", "new"), PREFIXES)
def test_a_reused_prefix_is_exact(name: str, kept: int, new: int) -> None:
    """From a prompt that went on differently; with windows, around their edge (G9)."""
    lm, n = family_lm(name), kept + new
    ids = IDS[:n]
    want = plain_logits(family_plain(name), IDS)
    donor, _ = exact(lm, np.concatenate([ids[:kept], tokens(9, seed=78)]))
    kv = noise(lm, N)
    for mine, theirs in zip((*kv.keys, *kv.values), (*donor.keys, *donor.values), strict=True):
        mine[:, :, :kept] = theirs[:, :, :kept]
    first, computed = lm.prefill(ids, kv, lambda _: torch.arange(n) >= kept)
    assert computed.sum() == lm.n_layers * new
    assert (first - want[n - 1]).abs().max() <= 1e-4
    if rest := IDS[n:].tolist():
        assert (lm.extend(rest, kv) - want[n:]).abs().max() <= 1e-4


@pytest.mark.parametrize("name", HOOKED)
def test_all_over_wrong_donors_is_exact(name: str) -> None:
    lm = family_lm(name)
    want = plain_logits(family_plain(name), IDS)
    kv = noise(lm, N)
    first, computed = lm.prefill(IDS[:-8], kv, lambda _: every(N - 8))
    assert computed.all()
    assert (first - want[-9]).abs().max() <= 1e-4
    for i, token in enumerate(IDS[-8:].tolist()):
        assert (lm.extend([token], kv)[0] - want[N - 8 + i]).abs().max() <= 1e-4


@pytest.mark.parametrize("name", HOOKED)
def test_only_the_named_rows_change_and_are_exact(name: str) -> None:
    """A middle subset over exact KV; what stands behind is not looked at."""
    lm, rows = family_lm(name), only(N, (3, 17, 29))
    want, logits = exact(lm, IDS)
    before = copy_of(want)
    for tensor in (*before.keys, *before.values):
        tensor[:, :, rows] = 9.0
    after = copy_of(before)
    got, _ = lm.prefill(IDS, after, lambda _: rows)
    assert (got - logits).abs().max() <= 1e-4
    pairs = zip(tensors(before), tensors(after), tensors(want), strict=True)
    for old, new, cold in pairs:
        assert torch.equal(old[:, :, ~rows], new[:, :, ~rows])
        assert relative(new[:, :, rows], cold[:, :, rows]) <= 1e-5


@pytest.mark.parametrize("name", HOOKED)
def test_several_requests_a_step_are_as_exact_as_one(name: str) -> None:
    """Softcap, sinks and latents too."""
    lm = family_lm(name)
    kvs = [exact(lm, IDS[:n], room=2)[0] for n in (5, WINDOW + 3, N - 4)]
    want = plain_logits(family_plain(name), IDS)
    for _ in range(2):
        at = [kv.length for kv in kvs]
        got = lm.step([int(IDS[n]) for n in at], kvs)
        assert (got - want[at]).abs().max() <= 1e-4


@pytest.mark.parametrize("name", [n for n in REUSING if n not in HOOKED])
def test_without_selective_prefill_only_a_prefix_is_left_out(name: str) -> None:
    lm = family_lm(name)
    with pytest.raises(ModelError, match="only what follows an exact prefix"):
        lm.prefill(IDS, lm.buffer(N), lambda _: only(N, (3, 17)))
    with pytest.raises(ModelError, match="another attention function"):
        lm.question_attention(IDS, lm.buffer(N), np.array([N - 1]))


def noise(lm: LM, capacity: int) -> KVBuffer:
    kv = lm.buffer(capacity)
    for tensor in tensors(kv):
        tensor.normal_(std=3.0, generator=torch.Generator().manual_seed(1))
    return kv


def tensors(kv: KVBuffer) -> list[torch.Tensor]:
    return [*kv.keys, *kv.values]


# Moving ---------------------------------------------------------------------------------------


def entry(lm: LM, ids: np.ndarray, position: int) -> ChunkKV:
    """``ids`` computed with nothing else, the first at ``position``."""
    keys, values = lm.alone(ids, position)
    where = (position, "alone", "", 0)
    return ChunkKV("k", lm.namespace(), "", ids, (0, len(ids)), *where, keys, values)


@pytest.mark.parametrize("name", MOVABLE)
@pytest.mark.parametrize(("base", "target"), [(37, 5), (3, 210)])
def test_moved_keys_are_the_keys_computed_there(name: str, base: int, target: int) -> None:
    """Every rope kind, layout and window (A6, G1 to G4)."""
    lm, ids = family_lm(name), IDS[:24]
    stored = entry(lm, ids, base)
    kv = lm.buffer(300)
    gather(lm, kv, [Run("k", 0, target, len(ids))], {"k": stored})
    there, same = lm.alone(ids, target)
    moved = slice(target, target + len(ids))
    for layer in range(lm.n_layers):
        assert relative(kv.keys[layer][0, :, moved], there[layer]) <= 1e-5
        assert relative(kv.values[layer][0, :, moved], same[layer]) <= 1e-5
        unmoved = relative(stored.keys[layer], there[layer])
        assert (unmoved > 0.02) == (lm.pairs[layer] != rope.NO_TURN)


def test_layouts_are_found_out() -> None:
    layouts = {name: set(family_lm(name).pairs) for name in MOVABLE}
    assert layouts["Llama"] == layouts["Phi"] == layouts["GPT-OSS"] == {"half"}
    assert layouts["GLM"] == layouts["Cohere"] == {"interleaved"}
    assert layouts["Cohere 2"] == {"interleaved", "none"}


@pytest.mark.parametrize("name", ["Phi", "StableLM", "GLM", "GPT-NeoX"])
def test_only_the_rotated_dims_move(name: str) -> None:
    lm = family_lm(name)
    stored = entry(lm, IDS[:24], 0)
    cos, sin = (t[0] for t in lm.angles([50])[lm.layer_types[0]])
    moved = rope.shift(stored.keys[0], cos, sin, lm.pairs[0])
    rotary = 2 * len(cos)
    assert 0 < rotary < moved.shape[-1]
    assert torch.equal(moved[..., rotary:], stored.keys[0][..., rotary:])
    assert (moved[:, :, :rotary] - stored.keys[0][:, :, :rotary]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["Llama, yarn", "Llama, longrope", "GPT-OSS"])
def test_scaled_angles_do_not_stretch(name: str) -> None:
    """yarn multiplies cos and sin: moved keys must keep their length all the same (G2)."""
    lm = family_lm(name)
    layer_type = lm.layer_types[0]
    at = torch.zeros(1, 1, dtype=torch.long)
    assert lm.rotary is not None
    assert float(lm.rotary(torch.zeros(1), at)[0].max()) > 1.05
    for cos, sin in zip(*lm.angles([3, 90, 200])[layer_type], strict=True):
        assert torch.allclose(cos**2 + sin**2, torch.ones(len(cos)), atol=1e-5)


@pytest.mark.parametrize("name", ["GPT-2", "OPT", "DeepSeek-V2", "DeepSeek-V3"])
def test_what_is_refused_would_be_wrong(name: str) -> None:
    """Learned positions and latents: K or V differ by position beyond any rotation of K."""
    lm = family_lm(name)
    (here, values), (there, same) = (lm.alone(IDS[:24], position) for position in (0, 50))
    turned = [here[0]]
    if FAMILIES[name].moved != LEARNED:
        latent = family_lm("DeepSeek-V3")  # V2's module gives complex angles
        cos, sin = (t[0] for t in latent.angles([50])[latent.layer_types[0]])
        turned += [rope.shift(here[0], cos, sin, pairs) for pairs in rope.PAIRS]
    wrong = min(relative(keys, there[0]) for keys in turned)
    assert max(wrong, relative(values[0], same[0])) > 0.02


def test_rope_is_in_the_namespace() -> None:
    """Keys turned by other frequencies are never found (A6)."""
    names = [name for name in FAMILIES if name.startswith("Llama")]
    assert len({family_lm(name).namespace() for name in names}) == len(names) >= 6


@pytest.fixture(scope="module")
def stored() -> tuple[LM, ChunkKV]:
    lm = family_lm("GLM")
    return lm, entry(lm, np.arange(30, 54), 37)


@settings(max_examples=15, deadline=None)
@given(kept=st.sets(st.integers(0, 23), min_size=1), start=st.integers(0, 200))
def test_after_random_deletions_every_kept_token_is_matched_once(
    stored: tuple[LM, ChunkKV], kept: set[int], start: int
) -> None:
    """Offsets are those of what was stored, whatever was moved before (A7)."""
    lm, donor = stored
    target = donor.ids[sorted(kept)]
    source = EditAligner().align(target, donor.ids)
    assert source.tolist() == sorted(kept)
    runs = [Run("k", int(s), start + i, 1) for i, s in enumerate(source)]
    kv = lm.buffer(start + len(target))
    gather(lm, kv, runs, {"k": donor})
    for layer in range(lm.n_layers):
        turned = {}
        for i, s in enumerate(source.tolist()):
            delta = start + i - s - donor.position
            if delta not in turned:
                turned[delta] = lm.alone(donor.ids, donor.position + delta)[0][layer]
            got, want = kv.keys[layer][0, :, start + i], turned[delta][:, s]
            assert relative(got, want) <= 1e-5


# Another tokenizer ----------------------------------------------------------------------------


def single_bytes() -> PreTrainedTokenizerFast:
    """Every byte a token, where the tiny tokenizer has merged words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special),
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator([], trainer)
    return fast(backend, bos_token="<|bos|>", eos_token="<|eos|>")


@pytest.mark.parametrize("make", [tiny_tokenizer, single_bytes])
def test_another_tokenizer_brings_its_own_separators(
    make: Callable[[], PreTrainedTokenizerFast],
) -> None:
    """Chunks are found as they stand in its tokens, and nothing of ours gets into the prompt or
    the answer: both are a plain engine's (A9: lmcache-vllm#38, LMCache#194)."""
    lm = LM(FAMILIES["Llama"].make(), make(), "Llama")
    lm.support = check(lm)
    engine = tiny_engine(lm, recompute=AllRecompute())
    request = Request.rag("r", [prose(1, 8), prose(2, 8)], "Why?", max_new_tokens=12)
    engine.ingest([request])
    output = engine.generate(replace(request, messages=swapped(request)))
    ids = render(lm.tokenizer, replace(request, messages=swapped(request))).ids
    assert output.counts()["recomputed"] > 10
    assert list(output.tokens) == plain_generate(family_plain("Llama"), ids, 12)


def swapped(request: Request) -> tuple[Message, ...]:
    (user,) = request.messages
    first, second, question = user.segments
    return (Message("user", (second, first, question)),)


# A broken rotation ----------------------------------------------------------------------------


def break_rotation(model: Any) -> Any:
    """Angles grow with the root of the position: no rotation group, though the model runs."""
    found = [m for n, m in model.named_modules() if n.split(".")[-1] == "rotary_emb"]
    for rotary in found:
        right = rotary.forward

        def forward(
            x: torch.Tensor,
            position_ids: torch.Tensor,
            *more: Any,
            right: Any = right,
            **named: Any,
        ) -> Any:
            return right(x, position_ids.clamp_min(0).float().sqrt(), *more, **named)

        forward.__signature__ = inspect.signature(right)  # type: ignore[attr-defined]
        rotary.forward = forward
    assert found
    return model


@pytest.mark.parametrize("name", MOVABLE)
def test_a_broken_rotation_turns_blending_off(name: str) -> None:
    """By itself, with the reason; the answer stays exact (G10)."""
    lm, plain = wrap(break_rotation(FAMILIES[name].make())), break_rotation(FAMILIES[name].make())
    ok, reason = lm.support["moved_chunk"]
    assert not ok
    assert "keys moved by" in reason
    engine = tiny_engine(lm)
    engine.ingest([REQUEST])
    ids = render(lm.tokenizer, REORDERED).ids
    output = engine.generate(REORDERED)
    counts = output.counts()
    assert counts["chunk"] == counts["semantic"] == counts["recomputed"] == 0
    assert any("moved_chunk is off" in why for why in output.plan.refused)
    assert (output.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4
    assert engine.generate(REORDERED).counts()["prefix"] > counts["prefix"] > 0


# Frequencies that depend on the length --------------------------------------------------------


def rag(id: str, n_passages: int, max_new_tokens: int = 8) -> Request:
    passages = [prose(50 + i) for i in range(n_passages)]
    return Request.rag(id, passages, "Why?", system=SYSTEM, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("name", LONGROPE)
def test_longrope_reuses_where_the_short_factors_hold(name: str) -> None:
    engine = tiny_engine(family_lm(name))
    request = rag("short", 3)
    engine.ingest([request])
    first, again = engine.generate(request), engine.generate(request)
    assert first.plan.n_tokens + 8 <= ORIGINAL
    assert first.counts()["chunk"] > 20
    assert again.counts()["prefix"] > 20


@pytest.mark.parametrize("name", LONGROPE)
def test_longrope_computes_what_is_longer_and_leaves_nothing_of_it(name: str) -> None:
    """Short KV in a long prompt would be wrong, and long KV in a short one."""
    engine = tiny_engine(family_lm(name))
    engine.ingest([rag("short", 3)])
    engine.generate(rag("short", 3))
    long = rag("long", 9)
    held = engine.memory.nbytes
    for _ in range(2):
        output = engine.generate(long)
        assert output.plan.n_tokens > ORIGINAL
        assert output.counts()["new"] == output.plan.n_tokens
        assert f"past {ORIGINAL} tokens" in output.plan.miss
        assert any(f"past {ORIGINAL} tokens" in match.reason for match in output.plan.matches)
        assert_answers_exactly(name, long, output)
    assert engine.memory.nbytes == held
    fresh = tiny_engine(family_lm(name))
    fresh.generate(long)
    output = fresh.generate(rag("short", 3))
    assert output.counts()["new"] == output.plan.n_tokens


@pytest.mark.parametrize("name", LONGROPE)
def test_an_answer_that_crosses_is_transformers_own(name: str) -> None:
    """The prompt has the short factors, its answer ends under the long ones."""
    engine = tiny_engine(family_lm(name))
    lengths = [len(render(engine.lm.tokenizer, rag("n", i)).ids) for i in range(9)]
    n = max(n for n in lengths if n < ORIGINAL)
    request = rag("crossing", lengths.index(n), max_new_tokens=ORIGINAL - n + 6)
    for _ in range(2):
        output = engine.generate(request)
        assert output.counts()["new"] == output.plan.n_tokens == n
        assert f"past {ORIGINAL} tokens" in output.plan.miss
        assert_answers_exactly(name, request, output)


@pytest.mark.parametrize("name", LONGROPE)
def test_short_and_long_prompts_do_not_share_a_forward(name: str) -> None:
    lm, plain = family_lm(name), family_plain(name)
    lengths = (ORIGINAL - 1, ORIGINAL + 3)
    prompts = [tokens(n + 1, seed=n) for n in lengths]
    kvs = [lm.buffer(n + 1) for n in lengths]
    jobs = [
        Job(ids[:-1], kv, partial(lambda n, _: every(n), n))
        for ids, kv, n in zip(prompts, kvs, lengths, strict=True)
    ]
    for ids, (logits, _) in zip(prompts, lm.prefill_many(jobs), strict=True):
        assert (logits - plain_logits(plain, ids[:-1])[-1]).abs().max() <= 1e-4
    got = lm.step([int(ids[-1]) for ids in prompts], kvs)
    for ids, row in zip(prompts, got, strict=True):
        assert (row - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4


def test_a_passage_behind_long_company_is_ingested_nowhere_wrong() -> None:
    """What would stand where the long factors hold goes behind the system prompt instead."""
    lm = family_lm("Llama, longrope")
    engine = tiny_engine(lm)
    with pytest.warns(UserWarning, match=f"past {ORIGINAL} tokens"):
        engine.ingest([prose(3, 200)])
    assert not len(engine.store)


def test_dynamic_ntk_reuses_prefixes_within_its_length_only() -> None:
    lm = family_lm("Llama, dynamic")
    assert lm.steady_tokens == lm.max_tokens - 1
    engine = tiny_engine(lm)
    whole = replace(REQUEST, max_new_tokens=lm.max_tokens - len(render(lm.tokenizer, REQUEST).ids))
    engine.generate(REQUEST)
    assert engine.plan(REQUEST).n_paged > 20
    assert "frequencies change" in engine.plan(whole).miss


# Recurrent layers -----------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["Jamba", "Qwen3-Next", "Falcon-H1"])
def test_hybrids_keep_their_own_cache_and_have_no_gap_of_ours(name: str) -> None:
    """Transformers' own gap between full and cached is what a hybrid has; kvsem adds none (H5)."""
    lm, plain = family_lm(name), family_plain(name)
    ids = torch.from_numpy(IDS)[None]
    gaps = []
    for model in (lm.model, plain):
        cache: Any = DynamicCache(config=model.config)
        model(input_ids=ids[:, :-8], use_cache=True, **{CACHE: cache})
        cached = model(input_ids=ids[:, -8:], use_cache=True, **{CACHE: cache}).logits[0, -1]
        gaps.append(float((cached - plain_logits(model, IDS)[-1]).abs().max()))
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-5)
    assert not lm.resumes
    assert lm.shapes == []


@pytest.mark.parametrize("name", ["Llama", "GPT-Neo", "Jamba", "Qwen3-Next"])
def test_what_a_model_says_of_generation_changes_no_answer(name: str) -> None:
    """Penalties are no greedy decoding, and an offloaded cache once went wrong from the second
    forward on (G8)."""
    lm = wrap(FAMILIES[name].make(), name)
    said = lm.model.generation_config
    said.cache_implementation, said.repetition_penalty, said.no_repeat_ngram_size = (
        "offloaded",
        3,
        1,
    )
    engine = tiny_engine(lm)
    for _ in range(2):
        assert_answers_exactly(name, REQUEST, engine.generate(REQUEST))


# What it costs --------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["Llama", "GPT-2", "OPT", "Bloom", "Mixtral", "Qwen3-MoE", "GPT-OSS", "DeepSeek-V3"]
)
def test_multiplications_are_those_that_torch_counts(name: str) -> None:
    """Experts by routing, latents by expansion, whatever the linear modules are called."""
    model = FAMILIES[name].make()
    model.set_attn_implementation("eager")  # torch sees neither its own fused kernels
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.from_numpy(IDS[:1])[None], use_cache=False)
    computed = np.ones((family_lm(name).n_layers, 1), dtype=bool)
    counted = family_lm(name).multiplications(computed)
    assert counted == pytest.approx(counter.get_total_flops() / 2, rel=0.01)
