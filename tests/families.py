"""Tiny random-weight models of every family that the support table names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from kvsem.lm import LM
from tests.tiny import CONTEXT, WINDOW, tiny_tokenizer, wrap

ORIGINAL = 256  # tokens up to which longrope turns by its short factors
THETA = {"rope_theta": 10000.0}
LINEAR = THETA | {"rope_type": "linear", "factor": 4.0}
DYNAMIC = THETA | {"rope_type": "dynamic", "factor": 4.0}
LLAMA3 = THETA | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = THETA | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [4.0 + 0.5 * i for i in range(8)]
LONGROPE = THETA | {
    "rope_type": "longrope",
    "factor": 8.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": SHORT,
    "long_factor": LONG,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}


def common(**more: Any) -> dict[str, Any]:
    """4 layers, 4 query heads on 2 KV heads, head_dim 16."""
    return {
        "vocab_size": len(tiny_tokenizer()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    } | more


def small(**more: Any) -> dict[str, Any]:
    """For configurations with names of their own."""
    return {
        "vocab_size": len(tiny_tokenizer()),
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    } | more


@dataclass(frozen=True)
class Family:
    """``config`` names a class of transformers; ``like`` are known models of the family."""

    config: str
    settings: dict[str, Any]
    like: str
    moved: str = ""  # in the reason why chunks are not moved; empty where they are
    prefix: str = ""  # in the reason why prefixes are not reused; empty where they are
    hooked: bool = True  # whether selective prefill works

    def make(self) -> Any:
        """A plain transformers model; two calls give the same weights."""
        config = getattr(transformers, self.config)(**self.settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            if getattr(config, "attn_logit_softcapping", None):
                model.set_attn_implementation("eager")  # transformers < 5.21 lets sdpa ignore it
            for name, weight in model.named_parameters():
                if "norm" in name:  # norms that do something
                    weight.data += 0.3 * torch.randn(weight.shape)
                if "sinks" in name:
                    weight.data.normal_(std=2.0)
        return model.eval()


def llama(rope: dict[str, Any], like: str, **more: Any) -> Family:
    return Family("LlamaConfig", common(rope_parameters=rope), like, **more)


LEARNED = "no rotary embedding"
FAMILIES: dict[str, Family] = {
    "Llama": llama(THETA | {"rope_type": "default"}, "Llama 2, SmolLM2, TinyLlama"),
    "Llama, linear": llama(LINEAR, "LongChat"),
    "Llama, llama3": llama(LLAMA3, "Llama 3.1, 3.2, 3.3"),
    "Llama, yarn": llama(YARN, "Yarn-Llama"),
    "Llama, longrope": llama(LONGROPE, "MiniCPM"),
    "Llama, dynamic": llama(DYNAMIC, "dynamic NTK", moved="rope type 'dynamic'"),
    "Qwen2": Family("Qwen2Config", common(), "Qwen2, Qwen2.5"),
    "Qwen3": Family("Qwen3Config", common(head_dim=32), "Qwen3"),
    "Mistral": Family("MistralConfig", common(sliding_window=WINDOW), "Mistral 7B"),
    "Gemma 2": Family(
        "Gemma2Config",
        common(
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=WINDOW,
            attn_logit_softcapping=2.0,
        ),
        "Gemma 2",
    ),
    "Gemma 3": Family(
        "Gemma3TextConfig",
        common(
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        ),
        "Gemma 3",
    ),
    "Phi": Family("PhiConfig", common(), "Phi-1, Phi-2"),
    "Phi-3": Family("Phi3Config", common(), "Phi-3, Phi-4"),
    "Phi-3, longrope": Family(
        "Phi3Config",
        common(
            original_max_position_embeddings=ORIGINAL,
            rope_parameters=THETA
            | {"rope_type": "longrope", "factor": 2.0, "short_factor": SHORT, "long_factor": LONG},
        ),
        "Phi-3 128k, Phi-4-mini",
    ),
    "StableLM": Family("StableLmConfig", common(), "StableLM 2"),
    "GLM": Family("GlmConfig", common(head_dim=16), "GLM-4"),
    "Cohere": Family("CohereConfig", common(), "Command R"),
    "Cohere 2": Family("Cohere2Config", common(sliding_window=WINDOW), "Command R7B, Command A"),
    "OLMo 2": Family("Olmo2Config", common(), "OLMo 2"),
    "GPT-NeoX": Family("GPTNeoXConfig", common(), "Pythia"),
    "Qwen3-MoE": Family(
        "Qwen3MoeConfig",
        common(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        "Qwen3-30B-A3B",
    ),
    "Mixtral": Family(
        "MixtralConfig", common(num_local_experts=4, num_experts_per_tok=2), "Mixtral 8x7B"
    ),
    "GPT-OSS": Family(
        "GptOssConfig",
        common(
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            rope_parameters=YARN,
        ),
        "gpt-oss",
    ),
    "GPT-2": Family(
        "GPT2Config",
        small(n_embd=64, n_layer=4, n_head=4, n_positions=CONTEXT),
        "GPT-2",
        moved=LEARNED,
    ),
    "OPT": Family(
        "OPTConfig",
        common(ffn_dim=96, word_embed_proj_dim=64),
        "OPT",
        moved=LEARNED,
    ),
    "GPT-Neo": Family(
        "GPTNeoConfig",
        small(
            hidden_size=64,
            num_layers=4,
            num_heads=4,
            attention_types=[[["global", "local"], 2]],
            window_size=WINDOW,
            max_position_embeddings=CONTEXT,
        ),
        "GPT-Neo",
        moved="another attention function",
        hooked=False,
    ),
    "Bloom": Family(
        "BloomConfig",
        small(hidden_size=64, n_layer=4, n_head=4),
        "BLOOM (ALiBi)",
        moved="another attention function",
        hooked=False,
    ),
    "MPT": Family(
        "MptConfig",
        small(d_model=64, n_layers=4, n_heads=4, max_seq_len=CONTEXT, expansion_ratio=2),
        "MPT (ALiBi)",
        moved="another attention function",
        hooked=False,
    ),
    "DeepSeek-V2": Family(
        "DeepseekV2Config", common(**LATENT), "DeepSeek-V2 (MLA)", moved="latent attention"
    ),
    "DeepSeek-V3": Family(
        "DeepseekV3Config", common(**LATENT), "DeepSeek-V3, R1 (MLA)", moved="latent attention"
    ),
    "Jamba": Family(
        "JambaConfig",
        common(
            num_experts=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=8,
        ),
        "Jamba (hybrid)",
        moved="recurrent state",
        prefix="recurrent state",
        hooked=False,
    ),
    "Qwen3-Next": Family(
        "Qwen3NextConfig",
        common(
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"] * 2,
        ),
        "Qwen3-Next (hybrid)",
        moved="recurrent state",
        prefix="recurrent state",
        hooked=False,
    ),
    "Falcon-H1": Family(
        "FalconH1Config",
        common(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1),
        "Falcon-H1 (hybrid)",
        moved="recurrent state",
        prefix="recurrent state",
        hooked=False,
    ),
}
MOVABLE = [name for name, family in FAMILIES.items() if not family.moved]
HOOKED = [name for name, family in FAMILIES.items() if family.hooked]


@cache
def family_lm(name: str) -> LM:
    """The family's model with its support checked; tests leave it as it is."""
    return wrap(FAMILIES[name].make(), name)


@cache
def family_plain(name: str) -> Any:
    """The same weights in a plain transformers model that kvsem never touched."""
    return FAMILIES[name].make()
