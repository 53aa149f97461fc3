"""Tiny random-weight models and a tokenizer, made in the test: no download, the same every time."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvsem.aligners.edit import EditAligner
from kvsem.chunkers.segment import SegmentChunker
from kvsem.contexts.behind_system import BehindSystem
from kvsem.engine import Engine
from kvsem.eviction.lru import LRU
from kvsem.forward import KVBuffer, LayerShape
from kvsem.gates.threshold import ThresholdGate
from kvsem.lm import LM
from kvsem.memory.pages import Pages
from kvsem.memory.pool import BlockPool
from kvsem.memory.store import ChunkStore
from kvsem.recompute.none import NoRecompute
from kvsem.selfcheck import check

KINDS = ("llama", "llama3", "qwen3", "gemma3")
WINDOW = 8  # of gemma3's sliding layers
CONTEXT = 512  # tokens
SYSTEM = "You answer from the passages below, and briefly."
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VOCABULARY = (
    "the of and to in is was for on that with as by at from it an be river bridge stone market "
    "harbour engine valley winter summer paper copper signal garden letter station museum library "
    "mountain island teacher painter captain village kingdom treaty battle castle church railway "
    "company council century founded opened closed built moved carried returned wrote measured "
    "Question answer first second third seven twelve large small northern southern 1847 1912 30"
)
WORDS = _VOCABULARY.split()


def prose(seed: int, n_words: int = 24) -> str:
    """Sentences of random words, the same for a seed."""
    rng = np.random.default_rng(seed)
    words = [WORDS[i] for i in rng.integers(0, len(WORDS), n_words)]
    cut = [word + ("." if i % 8 == 7 else "") for i, word in enumerate(words)]
    return " ".join(cut).rstrip(".") + "."


def fast(
    backend: Tokenizer, template: str | None = TEMPLATE, **special: str
) -> PreTrainedTokenizerFast:
    """``backend`` as transformers' own, with a chat template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = template
    return tokenizer


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a chat template and a BOS that only `add_special_tokens` adds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [prose(seed, 200) for seed in range(20)] + ["\n\nQuestion: what?\n\n"] * 20
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return fast(tokenizer, bos_token="<|bos|>", eos_token="<|eos|>")


def tiny_config(kind: str, **more: Any) -> Any:
    """4 layers, 4 query heads on 2 KV heads; logits of size 1 to 10."""
    tokenizer = tiny_tokenizer()
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    if kind == "llama":
        return LlamaConfig(**common | more)
    if kind == "llama3":
        return LlamaConfig(**common | {"rope_parameters": llama3} | more)
    if kind == "qwen3":
        return Qwen3Config(**common | {"head_dim": 32} | more)
    assert kind == "gemma3"
    own = {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    }
    return Gemma3TextConfig(**common | own | more)


def tiny_model(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A plain transformers model with sdpa; two calls give the same weights."""
    classes: dict[str, Any] = {"qwen3": Qwen3ForCausalLM, "gemma3": Gemma3ForCausalLM}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = classes.get(kind, LlamaForCausalLM)(tiny_config(kind, **more))
        for name, weight in model.named_parameters():  # norms that do something
            if "norm" in name:
                weight.data += 0.3 * torch.randn(weight.shape)
    model.set_attn_implementation("sdpa")
    return model.to(dtype).eval()


def wrap(model: Any, name: str = "") -> LM:
    """`model` as an `LM` with its support checked."""
    lm = LM(model, tiny_tokenizer(), name)
    lm.support = check(lm)
    return lm


def tiny_lm(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> LM:
    return wrap(tiny_model(kind, dtype, **more), kind)


def tiny_engine(lm: LM, **parts: Any) -> Engine:
    """An engine that reuses identical content, behind the system prompt, and recomputes nothing."""
    default: dict[str, Any] = {
        "chunker": SegmentChunker(),
        "aligner": EditAligner(),
        "gate": ThresholdGate(),
        "recompute": NoRecompute(),
        "context": BehindSystem(),
    }
    return Engine(lm, **default | parts)


def tiny_store(
    n_layers: int = 2,
    kv_heads: int = 2,
    head_dim: int = 4,
    page_size: int = 4,
    n_pages: int | None = None,
    **more: Any,
) -> ChunkStore:
    """A store and its pool without a model."""
    shapes = [LayerShape(kv_heads, kv_heads, head_dim, head_dim, None)] * n_layers
    pages = Pages(shapes, page_size, n_pages or 0, torch.float32, torch.device("cpu"))
    pool = BlockPool(n_pages, LRU(), page_size * pages.token_nbytes)
    return ChunkStore(pool, pages, **more)


def tokens(n: int, seed: int = 0) -> np.ndarray:
    """``n`` random ids that are no special tokens, int64."""
    return np.random.default_rng(seed).integers(4, len(tiny_tokenizer()), n)


def every(n: int) -> torch.Tensor:
    return torch.ones(n, dtype=torch.bool)


def only(n: int, rows: Any) -> torch.Tensor:
    """bool ``[n]``, true at ``rows`` and at the last token."""
    mask = torch.zeros(n, dtype=torch.bool)
    mask[torch.as_tensor(list(rows), dtype=torch.long)] = True
    mask[-1] = True
    return mask


def exact(lm: LM, ids: np.ndarray, room: int = 0) -> tuple[KVBuffer, torch.Tensor]:
    """KV and first logits with every token computed."""
    kv = lm.buffer(len(ids) + room)
    logits, _ = lm.prefill(ids, kv, lambda _: every(len(ids)))
    return kv, logits


def copy_of(kv: KVBuffer) -> KVBuffer:
    return KVBuffer([k.clone() for k in kv.keys], [v.clone() for v in kv.values], kv.length)


@torch.no_grad()
def plain_logits(model: Any, ids: np.ndarray) -> torch.Tensor:
    """fp32 ``[n, vocab]`` of a plain transformers forward."""
    logits: torch.Tensor = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits
    return logits[0].float()


@torch.no_grad()
def plain_generate(model: Any, ids: np.ndarray, steps: int, **more: Any) -> list[int]:
    """Greedy tokens of `model.generate`, without the prompt."""
    given = torch.from_numpy(ids)[None]
    out = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=steps,
        do_sample=False,
        pad_token_id=tiny_tokenizer().eos_token_id,
        **more,
    )
    return [int(token) for token in out[0, len(ids) :]]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return float((got.float() - want.float()).norm() / want.float().norm())
