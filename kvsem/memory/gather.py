"""Bringing stored KV to its place in a prompt: gather and shift, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

import torch

from kvsem import rope
from kvsem.forward import KV, Rows
from kvsem.lm import LM
from kvsem.types import ChunkKV, Run

Turn = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [tokens, pairs]


def gather(lm: LM, kv: KV, runs: Sequence[Run], entries: Mapping[str, ChunkKV]) -> None:
    """Write the runs' keys (moved) and values into ``kv``; other tokens stay as they are.

    Runs that have not moved are copied bit for bit. Per layer all others are brought together,
    each token is turned by its own delta, and all take their places in one go.
    """
    moves = sorted(((run, entries[run.entry]) for run in runs), key=lambda m: m[0].target)
    still = [move for move in moves if _delta(*move) == 0]
    moved = [move for move in moves if _delta(*move) != 0]
    if still:
        _gather(lm, kv, still, None)
    if moved:
        _gather(lm, kv, moved, _turns(lm, moved))


def _gather(
    lm: LM, kv: KV, moves: Sequence[tuple[Run, ChunkKV]], turns: Mapping[str | None, Turn] | None
) -> None:
    sources = _sources(moves, lm.device)
    here = _joined([slice(run.target, run.target + run.length) for run, _ in moves])
    for layer in range(lm.n_layers):
        keys = torch.cat([_take(entry.keys[layer], rows) for entry, rows in sources], dim=1)
        values = torch.cat([_take(entry.values[layer], rows) for entry, rows in sources], dim=1)
        if turns is not None:
            keys = rope.shift(keys, *turns[lm.layer_types[layer]], lm.pairs[layer])
        kv.write(layer, here, keys[None], values[None])


def _turns(lm: LM, moves: Sequence[tuple[Run, ChunkKV]]) -> dict[str | None, Turn]:
    """cos and sin of every token, by layer type."""
    deltas = [_delta(run, entry) for run, entry in moves]
    slot = {delta: i for i, delta in enumerate(sorted(set(deltas)))}
    slots = torch.tensor([slot[delta] for delta in deltas], device=lm.device)
    lengths = torch.tensor([run.length for run, _ in moves], device=lm.device)
    per_token = slots.repeat_interleave(lengths)
    found = lm.angles(list(slot))
    return {kind: (cos[per_token], sin[per_token]) for kind, (cos, sin) in found.items()}


def _sources(
    moves: Sequence[tuple[Run, ChunkKV]], device: torch.device
) -> list[tuple[ChunkKV, Rows]]:
    """Of neighbouring runs of one entry, where their tokens stand in it: read once a layer."""
    found: list[tuple[ChunkKV, Rows]] = []
    for _, group in groupby(moves, key=lambda move: move[0].entry):
        own = list(group)
        rows = _joined([slice(run.source, run.source + run.length) for run, _ in own])
        found.append((own[0][1], rows if isinstance(rows, slice) else rows.to(device)))
    return found


def _joined(parts: Sequence[slice]) -> Rows:
    """One stretch where they stand side by side, otherwise each row."""
    if all(left.stop == right.start for left, right in pairwise(parts)):
        return slice(parts[0].start, parts[-1].stop)
    return torch.cat([torch.arange(part.start, part.stop) for part in parts])


def _take(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """``[heads, rows, dim]``"""
    return tensor[:, rows] if isinstance(rows, slice) else tensor.index_select(1, rows)


def _delta(run: Run, entry: ChunkKV) -> int:
    return run.target - run.source - entry.position
