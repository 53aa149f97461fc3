"""One key function: constants, framing, the same in every process, what a namespace tells apart.

tinfoilsh/confidential-model-router PR 386; LMCache#2136; sglang#24758; aibrix#2329.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kvsem.fingerprint import of_tenant
from kvsem.harness import Harness
from kvsem.keys import chain_key, content_key, digest, entry_id
from kvsem.lm import LM
from kvsem.metrics.greedy import GreedyMetric
from kvsem.prompt import render
from kvsem.types import Request
from tests.tiny import TEMPLATE, fast, tiny_engine, tiny_model, tiny_tokenizer, wrap

IDS = np.array([3, 1, 4, 1, 5])
CONTENT = "0f67ca29643c732b4353ff827b839704dbe3dada82c2a87d8385311e428d28f1"
CHAIN = "297e223826c16d23524dc09668db3ccdaa4e857ef176efc9d864e2f3ccc73508"
ENTRY = 555039056147134869
SCRIPT = """
import numpy as np
from kvsem.keys import chain_key, content_key, entry_id
from kvsem.lm import LM
from tests.tiny import tiny_model, tiny_tokenizer
ids = np.array([3, 1, 4, 1, 5])
key = content_key("ns", "text", ids)
lm = LM(tiny_model("llama"), tiny_tokenizer())
print(key, chain_key("ns", ids), entry_id(key), lm.namespace("A"))
"""


def test_constants() -> None:
    """Written down once: a change here makes every stored key a miss."""
    assert content_key("ns", "text", IDS) == CONTENT
    assert chain_key("ns", IDS) == CHAIN
    assert entry_id(CONTENT) == ENTRY


def test_framing_by_hand() -> None:
    def frame(tag: bytes, body: bytes) -> bytes:
        return tag + len(body).to_bytes(8, "big") + body

    ids = b"".join(int(i).to_bytes(8, "little", signed=True) for i in IDS)
    parts = [frame(b"s", b"chain"), frame(b"s", b"ids"), frame(b"b", ids)]
    parts += [frame(b"s", b"namespace"), frame(b"s", b"ns")]
    assert chain_key("ns", IDS) == hashlib.sha256(b"".join(parts)).hexdigest()


def test_the_same_in_every_process() -> None:
    """Python's `hash` differs by PYTHONHASHSEED; keys and namespaces do not."""
    root, given = Path(__file__).parents[2], os.environ.get("PYTHONPATH", "")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=root,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{root}{os.pathsep}{given}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    lines = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    here = LM(tiny_model("llama"), tiny_tokenizer()).namespace("A")
    assert lines[0] == lines[1] == f"{CONTENT} {CHAIN} {ENTRY} {here}"


def test_neighbouring_fields_are_not_confused() -> None:
    assert digest("k", a="org_1", b="2345") != digest("k", a="org_12345", b="")
    assert digest("k", a="x") != digest("ka", x="")
    assert digest("k", a="b") != digest("k", b="a")
    assert content_key("ns", "text", IDS) != content_key("nste", "xt", IDS)
    assert chain_key("ns", IDS) != content_key("ns", "", IDS)


def test_types_are_not_confused() -> None:
    values: list[Any] = ["1", 1, 1.0, b"1", None, "", "None", 0, 0.0, -1]
    assert len({digest("k", a=value) for value in values}) == len(values)
    with pytest.raises(TypeError, match="list"):
        digest("k", a=[1])  # type: ignore[arg-type]


def test_order_of_fields_and_width_of_ids_do_not_matter() -> None:
    assert digest("k", a=1, b=2) == digest("k", b=2, a=1)
    assert chain_key("ns", IDS.astype(np.int32)) == chain_key("ns", IDS)
    assert chain_key("ns", np.repeat(IDS, 2)[::2]) == chain_key("ns", IDS)


@given(a=st.lists(st.integers(0, 9), max_size=6), b=st.lists(st.integers(0, 9), max_size=6))
def test_keys_are_equal_exactly_where_ids_are(a: list[int], b: list[int]) -> None:
    """Every token counts, not the last ones or their number (aibrix#2329)."""
    first, second = (chain_key("ns", np.array(ids, np.int64)) for ids in (a, b))
    assert (first == second) == (a == b)


@given(st.text(max_size=20))
def test_entry_ids_fit_faiss(text: str) -> None:
    assert 0 <= entry_id(digest("k", text=text)) < 2**63


def namespace(model: Any, tokenizer: Any = None, tenant: str = "") -> str:
    return LM(model, tokenizer or tiny_tokenizer()).namespace(tenant)


def scaled() -> Any:
    model = tiny_model("llama")
    model.model.layers[2].self_attn.k_proj.weight.data *= 1.05
    return model


def other_tokenizer(template: str = TEMPLATE, token: str = "") -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    backend.add_tokens([token] if token else [])
    return fast(backend, template, bos_token="<|bos|>", eos_token="<|eos|>")


def test_the_same_model_twice_is_one_namespace() -> None:
    again = namespace(tiny_model("llama"), other_tokenizer())
    assert namespace(tiny_model("llama")) == namespace(tiny_model("llama")) == again


def test_everything_that_changes_kv_changes_the_namespace() -> None:
    """One k_proj scaled by 1.05 under the same name and configuration among them (sglang#24758)."""
    llama = tiny_model("llama")
    found = {
        "plain": namespace(llama),
        "tenant A": namespace(llama, tenant="A"),
        "tenant B": namespace(llama, tenant="B"),
        "weights": namespace(scaled()),
        "dtype": namespace(tiny_model("llama", torch.bfloat16)),
        "rope": namespace(tiny_model("llama3")),
        "theta": namespace(
            tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        ),
        "architecture": namespace(tiny_model("qwen3")),
        "token": namespace(tiny_model("llama"), other_tokenizer(token="lantern")),
        "template": namespace(tiny_model("llama"), other_tokenizer(template=TEMPLATE + " ")),
    }
    assert len(set(found.values())) == len(found)


def quantised(bits: int) -> Any:
    """The same weights under another configuration; what a loader would make of it is no matter."""
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "gptq", "bits": bits}
    return model


def test_quantisation_counts() -> None:
    plain, four, eight = (namespace(m) for m in (tiny_model("llama"), quantised(4), quantised(8)))
    assert len({plain, four, eight}) == 3


def test_folders_do_not_count_and_their_bytes_do(tmp_path: Path) -> None:
    """Two folders of one name are two models; one model in two folders is one (B12)."""
    for parent, model in (("a", tiny_model("llama")), ("b", scaled()), ("c", tiny_model("llama"))):
        model.save_pretrained(tmp_path / parent / "m")
    a, b, c = (
        namespace(type(scaled()).from_pretrained(tmp_path / parent / "m")) for parent in "abc"
    )
    assert a == c != b


def test_sampling_is_not_in_the_key_of_kv() -> None:
    """B11: the same KV serves every temperature."""
    lm = LM(tiny_model("llama"), tiny_tokenizer())
    before = lm.namespace()
    config = lm.model.generation_config
    config.do_sample, config.temperature, config.top_p = True, 0.7, 0.9
    config.max_new_tokens = 99
    lm.weights_changed()
    assert lm.namespace() == before
    assert LM(lm.model, tiny_tokenizer()).namespace() == before


def test_what_makes_an_answer_is_in_the_key_of_measured_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B11, the other way round: greedy steps and reference answers, and the model as it is."""
    lm = wrap(tiny_model("llama"))
    exact = tiny_engine(lm, admit="none", reuse=())
    side = Harness(lm, exact, [], [GreedyMetric()])
    request = Request("r", text="river bridge stone", answers=("stone",))
    prompt = render(lm.tokenizer, request)
    keys = {side._key(request, prompt), side._key(replace(request, answers=("river",)), prompt)}
    lm.model.lm_head.weight.data.mul_(1.05)
    keys.add(side._key(request, prompt))
    monkeypatch.setattr("kvsem.harness.STEPS", 8)
    keys.add(side._key(request, prompt))
    assert len(keys) == 4


def test_tenants_and_salts_are_framed() -> None:
    """E3: unframed, the first two would be one."""
    base = digest("base")
    found = [
        of_tenant(base, *pair)
        for pair in [
            ("org_1", "2345"),
            ("org_12345", ""),
            ("", "org_12345"),
            ("org_1", ""),
            ("", "2345"),
            ("", ""),
        ]
    ]
    assert len(set(found)) == len(found)
    assert found[-1] == base
    assert of_tenant(digest("another"), "org_1", "2345") not in found


def test_one_salt_shares_and_another_does_not() -> None:
    """E2: the pair says that it is the salt that keeps them apart."""
    lm, twin = (LM(tiny_model("llama"), tiny_tokenizer()) for _ in range(2))
    assert lm.namespace("A", "salt") == twin.namespace("A", salt="salt")
    assert lm.namespace("A", "salt") != twin.namespace("A", "pepper")
    assert lm.namespace("A", "salt") != twin.namespace("B", "salt")
    assert lm.namespace(salt="salt") != twin.namespace()


def test_bits_read_as_another_dtype_are_other_weights() -> None:
    """A bf16 model and its exact copy in fp32 hold the same numbers, and other KV."""
    low = tiny_model("llama", torch.bfloat16)
    high = tiny_model("llama", torch.bfloat16).float()
    assert namespace(low) != namespace(high)


def test_asking_in_another_order_changes_nothing() -> None:
    lm = LM(tiny_model("llama"), tiny_tokenizer())
    tenant_first = lm.namespace("A")
    plain = lm.namespace()
    again = LM(tiny_model("llama"), tiny_tokenizer())
    assert (again.namespace(), again.namespace("A")) == (plain, tenant_first)
