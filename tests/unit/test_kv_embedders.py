"""Embeddings of the KV itself, against plain transformers: what is pooled, and what runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvsem.embedders.hidden import HiddenEmbedder
from kvsem.embedders.kv_mean import KvMeanEmbedder
from kvsem.engine import Engine
from kvsem.errors import KvsemError, ModelError, SettingError
from kvsem.gates.threshold import ThresholdGate
from kvsem.lm import CACHE, LM
from kvsem.types import Request
from tests.tiny import KINDS, SYSTEM, prose, relative, tiny_engine, tiny_lm, tiny_model

TEXT = prose(5, 30)


def ids_of(lm: LM, text: str) -> list[int]:
    found: list[int] = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def made(lm: LM, kind: type[Any], **settings: Any) -> Any:
    embedder = kind(**settings)
    embedder.use(lm)
    return embedder


def unit(vector: torch.Tensor) -> np.ndarray:
    return np.asarray((vector.double() / vector.double().norm()).numpy())


@pytest.mark.parametrize("n", [1, 3, 4])
def test_hidden_is_the_mean_hidden_state_of_plain_transformers(lm: LM, plain: Any, n: int) -> None:
    ids = torch.tensor([[lm.tokenizer.bos_token_id, *ids_of(lm, TEXT)]])
    seen: list[torch.Tensor] = []
    layer = plain.model.layers[n - 1]
    hook = layer.register_forward_hook(
        lambda *given: seen.append(given[2][0] if isinstance(given[2], tuple) else given[2])
    )
    with torch.no_grad():
        plain(input_ids=ids)
    hook.remove()
    got = made(lm, HiddenEmbedder, n_layers=n, standardised=False).embed([f" {TEXT}\n"])[0]
    assert np.abs(got - unit(seen[0][0, 1:].mean(0))).max() < 1e-5


@pytest.mark.parametrize("part", ["values", "keys"])
def test_kv_mean_is_the_mean_of_what_transformers_caches(lm: LM, plain: Any, part: str) -> None:
    """Keys are unlike those that are cached at their positions: they are turned back first."""
    ids = torch.tensor([[lm.tokenizer.bos_token_id, *ids_of(lm, TEXT)]])
    cache = DynamicCache()
    with torch.no_grad():
        plain(input_ids=ids, use_cache=True, **{CACHE: cache})
    cached = [getattr(cache.layers[i], part)[0, :, 1:] for i in (0, 2)]
    means = np.concatenate([unit(t.mean(dim=1).flatten()) for t in cached])
    got = made(lm, KvMeanEmbedder, layers=[2, 0], part=part, standardised=False).embed([TEXT])[0]
    same = float(got @ (means / np.linalg.norm(means)))
    assert same > 1 - 1e-6 if part == "values" else same < 0.999


def test_unrotated_keys_do_not_depend_on_the_position(lm: LM) -> None:
    """Layer 0 sees no context: the mean of a text's keys is that of its tokens in any order."""
    embedder = made(lm, KvMeanEmbedder, layers=[0], part="keys")
    words = TEXT.rstrip(".").replace(".", "").split(" ")
    one, other = embedder.embed([" ".join(words[1:]), " ".join(words[1:][::-1])])
    # the first word of a text has no space ahead of it, and is another token
    assert float(one @ other) > 0.9
    rows = np.array([[lm.tokenizer.bos_token_id, *ids_of(lm, TEXT)]])
    back = embedder._per_token(rows)[0]
    swapped = embedder._per_token(np.concatenate([rows[:, :1], rows[:, :0:-1]], axis=1))[0]
    assert relative(swapped[1:].flip(0), back[1:]) < 1e-5


@pytest.mark.parametrize("kind", [HiddenEmbedder, KvMeanEmbedder])
def test_long_texts_are_read_to_their_end(llama: LM, kind: type[Any]) -> None:
    """The mean over windows of at most so many tokens, each behind BOS, weighted by tokens."""
    ids = ids_of(llama, TEXT)
    parts = [llama.tokenizer.decode(ids[:15]), llama.tokenizer.decode(ids[15:])]
    assert [i for p in parts for i in ids_of(llama, p.strip())] != []
    small = made(llama, kind, window=16, standardised=False)
    whole = small._pool.of([TEXT])[0]
    bos = llama.tokenizer.bos_token_id
    chosen = [np.array([[bos, *ids[a : a + 15]]]) for a in range(0, len(ids), 15)]
    per_token = [
        llama.first_layers(c, 2).hidden if kind is HiddenEmbedder else small._per_token(c)
        for c in chosen
    ]
    assert len(chosen) > 2
    want = torch.cat([t[0, 1:] for t in per_token]).double().mean(dim=0).numpy()
    assert np.abs(whole - want).max() < 1e-5
    longer = made(llama, kind).embed([prose(6, 600), prose(6, 600) + " copper"])
    assert 0.9 < float(longer[0] @ longer[1]) < 1 - 1e-7


def test_only_the_layers_that_are_needed_run() -> None:
    lm = tiny_lm("llama")
    ran: list[int] = []
    for i, layer in enumerate(lm.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
    made(lm, HiddenEmbedder, n_layers=2, standardised=False).embed([TEXT])
    assert ran == [0, 1]
    ran.clear()
    made(lm, KvMeanEmbedder, layers=[0], standardised=False).embed([TEXT])
    assert ran == [0]
    ids = np.array(ids_of(lm, TEXT))
    before = lm.plain(ids)
    lm.first_layers(ids[None], 1)
    assert torch.equal(lm.plain(ids), before)
    assert not any(layer._forward_hooks for layer in lm.layers)


def test_the_identity_is_of_model_layers_and_what_is_pooled(llama: LM) -> None:
    identities = {
        made(lm, KvMeanEmbedder, **settings).identity
        for lm in (llama, tiny_lm("qwen3"))
        for settings in (
            {},
            {"layers": [1]},
            {"part": "keys"},
            {"standardised": False},
            {"window": 9},
        )
    }
    assert len(identities) == 10
    assert llama.namespace() in made(llama, HiddenEmbedder).identity


def test_changed_weights_are_another_embedding() -> None:
    lm = tiny_lm("llama")
    embedder = made(lm, HiddenEmbedder, n_layers=1)
    before, name = embedder.embed([TEXT])[0], embedder.identity
    lm.model.model.layers[0].mlp.down_proj.weight.mul_(3)
    assert embedder.identity != name
    fresh = made(lm, HiddenEmbedder, n_layers=1).embed([TEXT])[0]
    assert np.abs(embedder.embed([TEXT])[0] - fresh).max() < 1e-6  # its centre too
    assert np.abs(fresh - before).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("embedder", [HiddenEmbedder, KvMeanEmbedder])
def test_an_engine_finds_an_edited_text_by_it(kind: str, embedder: type[Any]) -> None:
    lm = tiny_lm(kind)
    engine: Engine = tiny_engine(lm, embedder=embedder(), gate=ThresholdGate(0.5), admit="none")
    assert engine.vectors.embedder is not None
    engine.ingest([prose(seed) for seed in range(4)], system=SYSTEM)
    words = prose(2).split(" ")
    edited = " ".join([*words[:6], "lantern", *words[7:]])
    plan = engine.plan(Request.rag("r", [prose(9), edited], "Why?", system=SYSTEM))
    assert plan.matches[-1].kind == "semantic"
    entry = engine.store.get(str(plan.matches[-1].entry))
    assert entry is not None
    assert entry.text == prose(2)


def test_a_mistake_is_said_in_one_line(llama: LM) -> None:
    with pytest.raises(ModelError, match="give it to an engine"):
        HiddenEmbedder().embed([TEXT])
    with pytest.raises(SettingError, match="layers"):
        tiny_engine(llama, embedder=KvMeanEmbedder(layers=[4]))
    with pytest.raises(SettingError, match="n_layers"):
        tiny_engine(llama, embedder=HiddenEmbedder(n_layers=5))
    with pytest.raises(KvsemError, match="belongs to"):
        tiny_engine(tiny_lm("qwen3"), embedder=made(llama, HiddenEmbedder))
    mistakes: list[dict[str, Any]] = [
        {"layers": []},
        {"layers": [-1]},
        {"part": "queries"},
        {"window": 1},
    ]
    for bad in mistakes:
        with pytest.raises(SettingError, match=next(iter(bad))):
            KvMeanEmbedder(**bad)


def test_keys_that_cannot_be_turned_back_are_refused() -> None:
    lm = LM(tiny_model("llama"), tiny_lm("llama").tokenizer, "unchecked")
    with pytest.raises(ModelError, match="part=values"):
        KvMeanEmbedder(part="keys").use(lm)
    KvMeanEmbedder(part="values").use(lm)
