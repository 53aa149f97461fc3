"""Moving cached keys by a position delta.

A key stored as R(p) k is moved to p + d by R(d): rotations of one frequency add up
(RoFormer, arXiv 2104.09864, eq. 34). Keys are always moved from the stored original and in
fp32: fifty small moves in bf16 cost twenty times the error of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

PAIRS = ("half", "interleaved")  # which dims turn together: i and i + half, or 2i and 2i + 1
NO_TURN = "none"  # a layer whose keys do not depend on the position (NoPE)
ALWAYS = 1 << 30  # tokens


def parameters(config: object, layer_type: str | None) -> dict[str, object] | None:
    """The rope parameters of one layer type; None where the configuration has no rope."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return None
    nested = rope.get(layer_type) if layer_type else None
    return dict(nested) if isinstance(nested, dict) else dict(rope)


def refusal(config: object, layer_types: Sequence[str | None], rotary: object) -> str:
    """Why keys of this model cannot be moved; empty where the self-check may try."""
    if rotary is None:
        return "no rotary embedding: positions cannot be moved"
    if getattr(config, "kv_lora_rank", None):
        return "latent attention (MLA): what is rotated is not kept with the keys"
    for layer_type in dict.fromkeys(layer_types):
        rope = parameters(config, layer_type)
        if rope is None:
            return "the configuration names no rope parameters"
        if rope.get("rope_type") == "dynamic":
            return "rope type 'dynamic': its frequencies depend on the prompt's length"
    return ""


def steady_tokens(config: object, layer_types: Sequence[str | None]) -> int:
    """Up to how many tokens all prompts share their frequencies; `ALWAYS` where they always do.

    longrope turns with other factors past the original length (LongRoPE, arXiv 2402.13753),
    dynamic NTK with new ones at every length past it; what is cached would be wrong there.
    """
    steady = ALWAYS
    for layer_type in dict.fromkeys(layer_types):
        rope = parameters(config, layer_type) or {}
        whole: Any = getattr(config, "max_position_embeddings", None)
        original: Any = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope":
            steady = min(steady, int(original or whole or 0))
        elif rope.get("rope_type") == "dynamic":
            # at the original length itself the module keeps what a longer prompt left behind
            steady = min(steady, int(whole or 1) - 1)
    return steady


def angles(
    rotary: torch.nn.Module, deltas: torch.Tensor, layer_type: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 ``[deltas, pairs]``, from the architecture's own rotary module.

    One column for each pair of dims that turns; fewer than half the head where rotary is partial.
    Divided by cos at position 0, so that scaled cos and sin (yarn, longrope) do not stretch.
    """
    positions = torch.cat([deltas.new_tensor([0, 1]), deltas])[None]
    like = torch.empty(1, dtype=torch.float32, device=deltas.device)
    typed = "layer_type" in inspect.signature(rotary.forward).parameters
    cos, sin = rotary(like, positions, layer_type) if typed else rotary(like, positions)
    scale = cos[0, 0, 0]
    pairs = _once(cos[0, 1] / scale)
    return cos[0, 2:, pairs] / scale, sin[0, 2:, pairs] / scale


def _once(cos: torch.Tensor) -> slice:
    """Where each pair's frequency stands, by ``cos`` ``[width]`` at position 1: modules give all
    of them one half after the other, side by side (Cohere), or only once (GPT-OSS)."""
    width = len(cos)
    if torch.equal(cos[: width // 2], cos[width // 2 :]):
        return slice(0, width // 2)
    beside = width % 2 == 0 and torch.equal(cos[0::2], cos[1::2])
    return slice(0, width, 2 if beside else 1)


def shift(
    keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: str = "half"
) -> torch.Tensor:
    """Rotate ``keys`` ``[..., tokens, head_dim]`` by ``cos``/``sin`` ``[pairs]`` or
    ``[tokens, pairs]`` of `angles`, in fp32; the result has the dtype of ``keys``.

    ``pairs``: which dims make one, of `PAIRS`, or `NO_TURN`. Dims behind the rotary ones stay.
    """
    if pairs == NO_TURN:
        return keys.clone()
    half = cos.shape[-1]
    here, there = slice(0, half), slice(half, 2 * half)
    if pairs == "interleaved":
        here, there = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    source = keys.float()
    first, second = source[..., here], source[..., there]
    out = torch.empty_like(keys)
    if 2 * half < keys.shape[-1]:
        out[..., 2 * half :] = keys[..., 2 * half :]
    if out.dtype == torch.float32:
        torch.mul(first, cos, out=out[..., here]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., there]).addcmul_(first, sin)
    else:
        out[..., here] = first * cos - second * sin
        out[..., there] = second * cos + first * sin
    return out
