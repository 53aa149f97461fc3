"""Moving cached keys by a position delta.

A key stored as R(p) k is moved to p + d by R(d): rotations of one frequency add up
(RoFormer, arXiv 2104.09864, eq. 34). Keys are always moved from the stored original and in
fp32: fifty small moves in bf16 cost twenty times the error of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

MOVABLE = ("default", "llama3")


def parameters(config: object, layer_type: str | None) -> dict[str, object] | None:
    """The rope parameters of one layer type; None where the configuration has no rope."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return None
    nested = rope.get(layer_type) if layer_type else None
    return dict(nested) if isinstance(nested, dict) else dict(rope)


def refusal(config: object, layer_types: Sequence[str | None], rotary: object) -> str:
    """Why keys of this model cannot be moved; empty where they can."""
    if rotary is None:
        return "no rotary embedding: positions cannot be moved"
    for layer_type in dict.fromkeys(layer_types):
        rope = parameters(config, layer_type)
        if rope is None:
            return "the configuration names no rope parameters"
        if rope.get("rope_type", "default") not in MOVABLE:
            return f"rope type {rope['rope_type']!r}; movable here: {', '.join(MOVABLE)}"
        if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            return f"partial rotary factor {rope['partial_rotary_factor']}; movable here: 1.0"
    return ""


def unsteady(config: object, layer_types: Sequence[str | None]) -> str:
    """Why KV of one prompt is not exact in a longer one that begins alike; empty where it is."""
    for layer_type in dict.fromkeys(layer_types):
        kind = (parameters(config, layer_type) or {}).get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            return f"rope type {kind!r}: its frequencies depend on the prompt's length"
    return ""


def angles(
    rotary: torch.nn.Module, deltas: torch.Tensor, layer_type: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 ``[deltas, head_dim]``, from the architecture's own rotary module.

    Divided by its cos at position 0, so that scaled cos and sin rotate without stretching.
    """
    positions = torch.cat([deltas.new_zeros(1), deltas])[None]
    like = torch.empty(1, dtype=torch.float32, device=deltas.device)
    typed = "layer_type" in inspect.signature(rotary.forward).parameters
    cos, sin = rotary(like, positions, layer_type) if typed else rotary(like, positions)
    scale = cos[0, 0, 0]
    return cos[0, 1:] / scale, sin[0, 1:] / scale


def shift(
    keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotate ``keys`` ``[..., tokens, head_dim]`` (half layout) by ``cos``/``sin``
    ``[head_dim]`` or ``[tokens, head_dim]``; the rotation is fp32, the
    result has the dtype of ``keys`` or ``out``.
    """
    half = keys.shape[-1] // 2
    source = keys.float()
    first, second = source[..., :half], source[..., half:]
    cos, sin = cos[..., :half], sin[..., :half]
    if out is None:
        out = torch.empty_like(keys)
    if out.dtype == torch.float32:
        torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    else:
        out[..., :half] = first * cos - second * sin
        out[..., half:] = second * cos + first * sin
    return out
