"""Support is checked, not assumed: what a loaded model can do, tried on the model itself.

Each capability is (ok, reason). A capability that fails is off, and the engine computes what it
would have reused.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvsem import rope
from kvsem.errors import KvsemError, one_line
from kvsem.forward import KVBuffer
from kvsem.lm import LM

Support = dict[str, tuple[bool, str]]
MOVES = (-41, 7, 300)  # position deltas that are tried


def check(lm: LM, seed: int = 0) -> Support:
    """The support table of ``lm``: exact_prefix, moved_chunk, blend, heads."""
    support: Support = {"heads": (False, "sharing along heads is not built yet")}
    if not lm.hooked and (reason := _verdict(_plain, lm, seed)[1]):
        lm.switch_off(reason)
    if lm.hooked:
        names = ("exact_prefix", "moved_chunk", "blend")
        support |= dict.fromkeys(names, (False, lm.hooked))
        if lm.resumes:
            support["exact_prefix"] = _verdict(_prefix, lm, seed)
            lm.resumes = support["exact_prefix"][0]
        return support
    for name, test in (("exact_prefix", _prefix), ("moved_chunk", _moved), ("blend", _blend)):
        support[name] = _verdict(test, lm, seed)
    return support


def _verdict(test: Callable[[LM, np.ndarray], str], lm: LM, seed: int) -> tuple[bool, str]:
    try:
        reason = test(lm, _ids(lm, seed))
    except (KvsemError, RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        reason = one_line(error)
    return not reason, reason


def _ids(lm: LM, seed: int) -> np.ndarray:
    """Random tokens, longer than the smallest sliding window where that is affordable."""
    windows = [s.window for s in lm.shapes if s.window]
    n = 64 if not windows else min(max(64, min(windows) + 16), 1024)
    n = min(n, lm.steady_tokens)
    vocab = lm.model.get_input_embeddings().weight.shape[0]
    return np.random.default_rng(seed).integers(0, vocab, min(n, lm.max_tokens))


def tolerance(lm: LM) -> float:
    """Largest accepted difference, relative to the largest logit: 1e-4 in fp32, 5e-2 in 16 bit."""
    return 1e-4 if lm.dtype == torch.float32 else 5e-2


def _exact(lm: LM, ids: np.ndarray) -> tuple[KVBuffer, torch.Tensor]:
    kv = lm.buffer(len(ids))
    logits, _ = lm.prefill(ids, kv, lambda _: torch.ones(len(ids), dtype=torch.bool))
    return kv, logits


def _differs(lm: LM, what: str, got: torch.Tensor, want: torch.Tensor) -> str:
    if not bool(torch.isfinite(got).all()):
        return f"{what}: logits are not finite"
    error = float((got - want).abs().max() / want.abs().max().clamp_min(1e-6))
    return "" if error <= tolerance(lm) else f"{what} differs by {error:.1e} of the largest logit"


def _plain(lm: LM, ids: np.ndarray) -> str:
    """Without this there is no exact run either."""
    want = lm.plain(ids)
    return _differs(lm, "computing every token from a plain forward", _exact(lm, ids)[1], want)


def _prefix(lm: LM, ids: np.ndarray) -> str:
    kv, logits = _exact(lm, ids)
    n = len(ids)
    for tensor in (*kv.keys, *kv.values):
        tensor[:, :, n // 2 :] = 0
    resumed, _ = lm.prefill(ids, kv, lambda _: torch.arange(n) >= n // 2)
    return _differs(lm, "resuming behind a prefix", resumed, logits)


def _blend(lm: LM, ids: np.ndarray) -> str:
    """Shrinking sets over exact KV, every recomputed row destroyed beforehand."""
    kv, logits = _exact(lm, ids)
    n = len(ids)
    first = (torch.arange(n) % 3 == 0) | (torch.arange(n) >= n - 4)
    later = (torch.arange(n) % 6 == 0) | (torch.arange(n) >= n - 2)
    for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
        gone = (first if layer == 0 else later).nonzero()[:, 0].to(keys.device)
        keys[:, :, gone], values[:, :, gone] = 0, 0
    got, computed = lm.prefill(ids, kv, lambda layer: first if layer == 0 else later)
    if computed[0].sum() != int(first.sum()) or computed[-1].sum() != int(later.sum()):
        return "the layers did not compute the tokens asked for"
    return _differs(lm, "recomputing a subset", got, logits)


def _moved(lm: LM, ids: np.ndarray) -> str:
    reason = rope.refusal(lm.config, lm.layer_types, lm.rotary)
    if reason:
        return reason
    ids = ids[:32]
    # Values do not move: what they differ by is the noise of two forwards, which in 16 bit grows
    # with depth; keys may differ by twice that. A wrong rotation differs by about 1.
    least, most = (1e-4, 1e-4) if lm.dtype == torch.float32 else (3e-2, 0.2)
    base, moves = _moves(lm, len(ids))
    keys, values = lm.alone(ids, base)
    for delta in moves:
        there, same = lm.alone(ids, base + delta)
        angles = lm.angles([delta])
        for layer in range(lm.n_layers):
            noise = _relative(values[layer], same[layer])
            if noise > most:
                return (
                    f"layer {layer}: values at {delta} more differ by {noise:.1e}, not {most:.0e}"
                )
            cos, sin = (t[0] for t in angles[lm.layer_types[layer]])
            if delta == moves[0]:
                lm.pairs[layer] = _pairs(keys[layer], there[layer], cos, sin)
            moved = _relative(rope.shift(keys[layer], cos, sin, lm.pairs[layer]), there[layer])
            allowed = max(least, min(2 * noise, most))
            if moved > allowed:
                return (
                    f"layer {layer}: keys moved by {delta} differ by {moved:.1e}, not {allowed:.0e}"
                )
    return ""


def _moves(lm: LM, n: int) -> tuple[int, list[int]]:
    """Where ``n`` tokens stand first, and by how much they are moved: all within the positions
    that share their frequencies."""
    last = min(lm.steady_tokens, lm.max_tokens) - n
    base = max(0, min(3 - min(MOVES), last // 2))
    return base, [min(max(delta, -base), last - base) for delta in MOVES]


def _pairs(keys: torch.Tensor, there: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str:
    """Which dims of a layer turn together: what fits its own keys at another place best.

    Architectures pair i with i + half or 2i with 2i + 1, and leave some layers unturned, and no
    configuration says so."""
    names = (*rope.PAIRS, rope.NO_TURN)
    errors = [_relative(rope.shift(keys, cos, sin, name), there) for name in names]
    return names[int(np.argmin(errors))]


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-12))
