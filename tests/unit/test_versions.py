"""The namespace follows the model as it is now: weights in place, adapters on and off.

sgl-project/sglang#24758; vllm-project/vllm#42125, #30931, PR 48352. Adapters are peft's own.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from packaging.version import parse
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.hotswap import hotswap_adapter
from transformers.integrations.peft import MIN_PEFT_VERSION

from kvsem import fingerprint
from kvsem.fingerprint import SAMPLES, Fingerprint
from kvsem.lm import LM
from kvsem.types import Provenance, Request
from tests.tiny import (
    SYSTEM,
    exact,
    plain_logits,
    prose,
    relative,
    tiny_engine,
    tiny_model,
    tiny_tokenizer,
    tokens,
    wrap,
)

# peft still asks transformers for a property that has been renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

TARGETS = ["q_proj", "k_proj", "v_proj"]
Change = Callable[[Any], object]


def namespace(model: Any) -> str:
    """Of somebody who sees the model for the first time."""
    return Fingerprint(model, tiny_tokenizer()).current()


def k_proj(model: Any, layer: int = 2) -> torch.nn.Parameter:
    weight: torch.nn.Parameter = model.model.layers[layer].self_attn.k_proj.weight
    return weight


# Weights ------------------------------------------------------------------------------------


def by_multiplying(model: Any) -> None:
    with torch.no_grad():
        k_proj(model).mul_(1.05)


def by_a_step(model: Any) -> None:
    weight = k_proj(model).requires_grad_(True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    model(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
    optimizer.step()
    weight.requires_grad_(False)


def by_loading(model: Any) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.layers.2.self_attn.k_proj.weight"] *= 1.05
    model.load_state_dict(state)


def by_another_tensor(model: Any) -> None:
    k_proj(model).data = k_proj(model).data * 1.05


def by_another_parameter(model: Any) -> None:
    projection = model.model.layers[2].self_attn.k_proj
    projection.weight = torch.nn.Parameter(projection.weight.data * 1.05, requires_grad=False)


def by_data(model: Any) -> None:
    """No version of torch's moves here."""
    version = k_proj(model)._version
    k_proj(model).data.mul_(1.05)
    assert k_proj(model)._version == version


def by_one_row_of_data(model: Any) -> None:
    k_proj(model).data[5] += 0.01


def by_a_bias(model: Any) -> None:
    projection = model.model.layers[2].self_attn.k_proj
    projection.bias = torch.nn.Parameter(torch.ones(projection.out_features))


CHANGES = (
    by_multiplying,
    by_a_step,
    by_loading,
    by_another_tensor,
    by_another_parameter,
    by_data,
    by_one_row_of_data,
    by_a_bias,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_change_in_place_is_another_namespace(change: Change, dtype: torch.dtype) -> None:
    """Seen by an LM that knew the model before, and the same as of one that did not."""
    lm = LM(tiny_model("llama", dtype), tiny_tokenizer())
    before = lm.namespace()
    assert lm.namespace() == before
    change(lm.model)
    assert before != lm.namespace() == namespace(lm.model)


def test_the_old_weights_have_the_old_namespace() -> None:
    lm = LM(tiny_model("llama"), tiny_tokenizer())
    before, weights = lm.namespace(), k_proj(lm.model).data.clone()
    by_data(lm.model)
    assert lm.namespace() != before
    k_proj(lm.model).data.copy_(weights)
    assert lm.namespace() == before


def test_only_what_changed_is_digested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    seen: list[tuple[int, ...]] = []
    digested = fingerprint._known

    def counted(tensor: torch.Tensor, stamp: Any) -> Any:
        seen.append(tuple(tensor.shape))
        return digested(tensor, stamp)

    monkeypatch.setattr(fingerprint, "_known", counted)
    known = Fingerprint(model, tiny_tokenizer())
    known.current()
    assert len(seen) == len(list(model.parameters()))
    for change in (by_multiplying, by_data, by_another_tensor):
        seen.clear()
        change(model)
        known.current()
        known.current()
        assert seen == [tuple(k_proj(model).shape)]


def unseen(weight: torch.Tensor) -> int:
    """The flat index of an element that the probe does not read."""
    marks = torch.zeros_like(weight)
    fingerprint._sample(marks).fill_(1)
    return int((marks.flatten() == 0).nonzero()[0, 0])


def test_what_no_probe_sees_can_be_said() -> None:
    """One element written through `.data`: the documented blind spot."""
    lm = LM(tiny_model("llama"), tiny_tokenizer())
    before, weight = lm.namespace(), k_proj(lm.model)
    weight.data.view(-1)[unseen(weight)] += 1
    assert lm.namespace() == before
    lm.weights_changed()
    assert before != lm.namespace() == namespace(lm.model)


def test_one_element_is_seen_by_version_and_by_storage() -> None:
    """Also where the old storage was let go and could come back at the same address."""
    lm = LM(tiny_model("llama"), tiny_tokenizer())
    weight = k_proj(lm.model)
    found, at = {lm.namespace()}, unseen(weight)
    with torch.no_grad():
        weight.view(-1)[at] += 1
    found.add(lm.namespace())
    for _ in range(3):
        weight.data = weight.data.clone()
        weight.data = weight.data.clone()
        weight.data.view(-1)[at] += 1
        found.add(lm.namespace())
    assert len(found) == 5


@pytest.mark.parametrize("shape", [(576, 576), (192, 576), (64, 65), (64, 130), (128, 64)])
def test_the_probe_is_spread_over_rows_and_columns(shape: tuple[int, int]) -> None:
    """A step of whole rows would read one column only."""
    marks = torch.zeros(shape)
    fingerprint._sample(marks).fill_(1)
    rows, columns = marks.nonzero().T
    assert SAMPLES / 2 <= len(rows) <= SAMPLES
    for of, size in ((rows, shape[0]), (columns, shape[1])):
        quarters = torch.histc(of.float(), bins=4, min=0, max=size)
        assert (quarters >= len(rows) / 8).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(8, 6).T,
        lambda: torch.randn(8, 12)[:, ::2],
        lambda: torch.tensor(2.0),
        lambda: torch.randn(3),
        lambda: torch.randn(2, 3, 4).bfloat16(),
        lambda: torch.randint(0, 9, (40, 4)),
    ],
    ids=["transposed", "gaps", "scalar", "short", "bf16", "integers"],
)
def test_every_kind_of_tensor(make: Callable[[], torch.Tensor]) -> None:
    """Layout in memory does not count, values do."""
    model, plain = tiny_model("llama"), tiny_model("llama")
    tensor = make()
    model.more = torch.nn.Parameter(tensor, requires_grad=False)
    plain.more = torch.nn.Parameter(tensor.contiguous(), requires_grad=False)
    lm = LM(model, tiny_tokenizer())
    assert lm.namespace() == namespace(plain)
    model.more.data.mul_(3)
    plain.more.data.mul_(3)
    assert lm.namespace() == namespace(plain) != namespace(tiny_model("llama"))


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        model = tiny_model("llama")
    lm = LM(model, tiny_tokenizer())
    before = lm.namespace()
    assert before == namespace(tiny_model("llama"))
    with torch.inference_mode():
        k_proj(model).mul_(1.05)
    assert lm.namespace() != before


def test_persistent_buffers_are_weights() -> None:
    """Rotary frequencies are not: the configuration says them."""
    model = tiny_model("llama")
    base = namespace(model)
    model.model.layers[0].register_buffer("gain", torch.ones(4))
    lm = LM(model, tiny_tokenizer())
    with_gain = lm.namespace()
    model.model.layers[0].gain.data.mul_(2)
    assert len({base, with_gain, lm.namespace()}) == 3
    other = tiny_model("llama")
    other.model.rotary_emb.register_buffer("more", torch.ones(4), persistent=False)
    assert namespace(other) == base


def test_the_same_bits_in_another_dtype_or_shape() -> None:
    bits = torch.arange(1, 13, dtype=torch.int32)
    found = set()
    for buffer in (bits, bits.view(torch.float32), bits.view(3, 4)):
        model = tiny_model("llama")
        model.register_buffer("more", buffer)
        found.add(namespace(model))
    assert len(found) == 3


def test_kv_of_changed_weights_is_not_reused() -> None:
    """B1: one k_proj times 1.05, same name and configuration: no hit, and the cold output."""
    request = Request.rag("r", [prose(1), prose(2)], "Why?", system=SYSTEM)
    lm = wrap(tiny_model("llama"))
    engine = tiny_engine(lm, admit="none")
    engine.ingest([request])
    weights = k_proj(lm.model).data.clone()
    reused = engine.generate(request)
    by_data(lm.model)
    warm, cold = engine.generate(request), tiny_engine(lm).generate(request)
    assert (warm.plan.provenance == Provenance.NEW).all()
    assert torch.equal(warm.logits, cold.logits)
    k_proj(lm.model).data.copy_(weights)
    again = engine.generate(request)
    assert again.plan.matched.any()
    assert torch.equal(again.logits, reused.logits)


# Adapters -----------------------------------------------------------------------------------


def lora(seed: int, model: Any = None, name: str = "default", **more: Any) -> Any:
    """A tiny model, or ``model``, wrapped by peft, its adapter drawn with ``seed``."""
    config: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS} | more
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = peft.PeftModel(
            model if model is not None else tiny_model("llama"),
            peft.LoraConfig(init_lora_weights=False, **config),
            name,
        )
    return wrapped.eval()


def add(model: Any, seed: int, name: str, **more: Any) -> None:
    """Another adapter beside the first, not active."""
    config: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS} | more
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(name, peft.LoraConfig(init_lora_weights=False, **config))
    model.eval()


@pytest.fixture(scope="module")
def base() -> str:
    return namespace(tiny_model("llama"))


@pytest.fixture
def lm() -> LM:
    """With hooks in place, over a model with one adapter."""
    wrapped = LM(lora(0), tiny_tokenizer())
    assert not wrapped.hooked
    return wrapped


def test_an_adapter_is_switched_on_and_off(lm: LM, base: str) -> None:
    on = lm.namespace()
    with lm.model.disable_adapter():
        off = lm.namespace()
    assert off == base != on
    assert lm.namespace() == on == namespace(lora(0))


def test_kv_is_another_with_the_adapter_and_the_base_models_without(lm: LM) -> None:
    """What the namespace stands for, in numbers."""
    ids, plain = tokens(40), LM(tiny_model("llama"), tiny_tokenizer())
    want, logits = exact(plain, ids)
    on, on_logits = exact(lm, ids)
    with lm.model.disable_adapter():
        off, off_logits = exact(lm, ids)
    assert relative(on.keys[0], want.keys[0]) > 0.01
    assert relative(on_logits, plain_logits(lora(0), ids)[-1]) < 1e-4
    assert all(torch.equal(a, b) for a, b in zip(off.keys, want.keys, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(off.values, want.values, strict=True))
    assert torch.equal(off_logits, logits)


def test_an_lm_made_before_its_model_is_wrapped(base: str) -> None:
    lm = LM(tiny_model("llama"), tiny_tokenizer())
    assert lm.namespace() == base
    wrapped = lora(0, lm.model)
    assert base != lm.namespace() == namespace(wrapped)
    wrapped.unload()
    assert lm.namespace() == base


def test_one_name_with_other_weights_is_another_namespace(lm: LM, tmp_path: Path) -> None:
    """B3: loaded anew under the same name, from disk."""
    first = lm.namespace()
    for seed in (0, 1):
        lora(seed).save_pretrained(tmp_path / f"{seed}")
    found = []
    for seed in (1, 0):
        add(lm.model, 9, "spare")
        lm.model.set_adapter("spare")
        lm.model.delete_adapter("default")
        lm.model.load_adapter(tmp_path / f"{seed}", "default")
        lm.model.set_adapter("default")
        lm.model.delete_adapter("spare")
        found.append(lm.namespace())
    assert found[0] == namespace(lora(1)) != first
    assert found[1] == first


def test_weights_swapped_in_place(lm: LM, tmp_path: Path) -> None:
    first = lm.namespace()
    lora(1).save_pretrained(tmp_path)
    hotswap_adapter(lm.model, str(tmp_path), "default", torch_device="cpu")
    assert first != lm.namespace() == namespace(lora(1))


def test_the_name_of_an_adapter_does_not_count(lm: LM) -> None:
    assert namespace(lora(0, name="other")) == lm.namespace()
    assert namespace(lora(1, name="default")) != lm.namespace()


def test_scaling_counts(lm: LM) -> None:
    first = lm.namespace()
    layers = [m for m in lm.model.modules() if hasattr(m, "set_scale")]
    for layer in layers:
        layer.set_scale("default", 0.5)
    half = lm.namespace()
    for layer in layers:
        layer.set_scale("default", 1)
    assert first != half
    assert lm.namespace() == first
    assert len({first, half, namespace(lora(0, lora_alpha=16))}) == 3
    assert namespace(lora(0, use_rslora=True)) != first


def test_adapters_that_are_not_active_do_not_count(lm: LM, base: str) -> None:
    """Though the second sits on layers where the first has nothing."""
    first = lm.namespace()
    add(lm.model, 1, "second", target_modules=["q_proj", "o_proj"])
    assert lm.namespace() == first
    lm.model.set_adapter("second")
    second = lm.namespace()
    assert second == namespace(lora(1, target_modules=["q_proj", "o_proj"]))
    lm.model.base_model.set_adapter(["default", "second"])
    both = lm.namespace()
    assert len({base, first, second, both}) == 4
    lm.model.set_adapter("default")
    assert lm.namespace() == first


def test_a_merged_adapter_counts_through_the_weights(lm: LM) -> None:
    before = lm.namespace()
    lm.model.merge_adapter()
    assert lm.namespace() == namespace(lora(0).merge_and_unload()) != before
    lm.model.unmerge_adapter()
    assert lm.namespace() == namespace(lm.model)


def test_a_delta_that_no_probe_sees_is_merged(lm: LM) -> None:
    """peft adds it through `.data`; one row that the probe reads not at all."""
    plain = lm.namespace()
    for name, weight in lm.model.named_parameters():
        if "lora_B" in name:
            weight.data.zero_()
            weight.data[-1, 0] = 0.5 if "layers.1.self_attn.v_proj" in name else 0.0
        if "lora_A" in name:
            weight.data.zero_()
            weight.data[0, 1] = 0.5
    before = lm.namespace()
    lm.model.merge_adapter()
    assert len({plain, before, lm.namespace()}) == 3
    assert lm.namespace() == namespace(lm.model)


def test_merged_and_disabled_is_what_the_next_forward_computes(lm: LM) -> None:
    """peft unmerges inside that forward: the key is of those weights already."""
    lm.model.merge_adapter()
    with lm.model.disable_adapter():
        before = lm.namespace()
        exact(lm, tokens(8))
        assert lm.namespace() == before == namespace(lm.model)


def own_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def test_adapters_that_transformers_loads_itself(base: str, tmp_path: Path) -> None:
    """Without a wrapper; switched at the layers, as transformers' own methods do."""
    lm = LM(tiny_model("llama"), tiny_tokenizer())
    lora(0).save_pretrained(tmp_path)
    lm.model.load_adapter(str(tmp_path), adapter_name="a")
    assert lm.namespace() == namespace(lora(0)) != base
    for enabled, want in ((False, base), (True, namespace(lora(0)))):
        for layer in own_layers(lm.model):
            layer.enable_adapters(enabled)
        assert lm.namespace() == want


@pytest.mark.skipif(
    parse(peft.__version__) < parse(MIN_PEFT_VERSION),
    reason=f"these methods of transformers refuse peft below {MIN_PEFT_VERSION}",
)
def test_transformers_own_switches(base: str, tmp_path: Path) -> None:
    lm = LM(tiny_model("llama"), tiny_tokenizer())
    lora(0).save_pretrained(tmp_path)
    lm.model.load_adapter(str(tmp_path), adapter_name="a")
    lm.model.add_adapter(peft.LoraConfig(target_modules=["o_proj"]), adapter_name="b")
    b = lm.namespace()
    lm.model.set_adapter("a")
    assert lm.namespace() == namespace(lora(0))
    lm.model.disable_adapters()
    assert lm.namespace() == base
    lm.model.enable_adapters()
    assert lm.namespace() == namespace(lora(0))
    lm.model.delete_adapter("a")
    lm.model.set_adapter("b")
    assert lm.namespace() == b != base


OTHERS: dict[str, Callable[[], Any]] = {
    "dora": lambda: peft.LoraConfig(use_dora=True, target_modules=TARGETS, init_lora_weights=False),
    "embedding": lambda: peft.LoraConfig(target_modules=["embed_tokens"]),
    "modules_to_save": lambda: peft.LoraConfig(
        target_modules=TARGETS, modules_to_save=["embed_tokens"]
    ),
    "tokens": lambda: peft.LoraConfig(target_modules=TARGETS, trainable_token_indices=[3, 5]),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS, init_weights=False),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, target_modules=TARGETS),
    "shira": lambda: peft.ShiraConfig(r=4, target_modules=TARGETS),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_tuners_count_as_they_are(kind: str, base: str) -> None:
    """Every active tensor, on and off; a change of any one of them is seen."""
    model = peft.get_peft_model(tiny_model("llama"), OTHERS[kind]()).eval()
    lm = LM(model, tiny_tokenizer())
    on = lm.namespace()
    with model.disable_adapter():
        assert lm.namespace() == base
    assert lm.namespace() == on != base
    trained = [n for n, p in lora_parameters(model)]
    for name in (trained[0], trained[-1]):
        before = lm.namespace()
        model.get_parameter(name).data.add_(0.25)
        assert before != lm.namespace() == namespace(model)


def lora_parameters(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """The adapter's own: those that the plain model lacks."""
    plain = {name for name, _ in tiny_model("llama").named_parameters()}
    own = []
    for name, weight in model.named_parameters():
        bare = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if bare.replace(".original_module", "").replace(".token_adapter", "") not in plain:
            own.append((name, weight))
    return own


def test_sparse_indices_count() -> None:
    """The same values at other places of the matrix: not parameters, and other KV."""
    model = peft.get_peft_model(tiny_model("llama"), OTHERS["shira"]()).eval()
    lm = LM(model, tiny_tokenizer())
    before = lm.namespace()
    layer = next(m for m in model.modules() if hasattr(m, "shira_indices"))
    layer.shira_indices["default"] = layer.shira_indices["default"].flip(1)
    assert lm.namespace() != before


def test_a_copy_of_a_model_has_its_namespace(lm: LM) -> None:
    assert namespace(deepcopy(lm.model)) == lm.namespace()


def test_what_left_the_model_is_let_go(lm: LM) -> None:
    """Many adapters, one after another, do not pile up."""
    lm.namespace()
    known = len(lm._fingerprint._known)
    for seed in range(3):
        add(lm.model, seed, f"a{seed}")
        lm.model.set_adapter(f"a{seed}")
        lm.namespace()
        lm.model.set_adapter("default")
        lm.model.delete_adapter(f"a{seed}")
        lm.namespace()
    assert len(lm._fingerprint._known) == known
