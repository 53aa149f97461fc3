"""Bringing stored KV to its place in a prompt: gather and shift, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvsem import rope
from kvsem.forward import KV
from kvsem.lm import LM
from kvsem.types import ChunkKV, Run


def gather(lm: LM, kv: KV, runs: Sequence[Run], entries: Mapping[str, ChunkKV]) -> None:
    """Write the runs' keys (moved) and values into ``kv``; other tokens stay as they are.

    Runs that have not moved are copied bit for bit. Per layer the keys of all others are brought
    together and rotated in one go, which uses every thread.
    """
    moves = sorted(((run, entries[run.entry]) for run in runs), key=lambda m: m[0].target)
    still = [(run, entry) for run, entry in moves if _delta(run, entry) == 0]
    moved = [(run, entry) for run, entry in moves if _delta(run, entry) != 0]
    for run, entry in still:
        for layer in range(lm.n_layers):
            keys, values = (t[layer][None, :, _there(run)] for t in (entry.keys, entry.values))
            kv.write(layer, _here(run), keys, values)
    if moved:
        _gather_moved(lm, kv, moved)


def _gather_moved(lm: LM, kv: KV, moves: Sequence[tuple[Run, ChunkKV]]) -> None:
    deltas = [_delta(run, entry) for run, entry in moves]
    different = sorted(set(deltas))
    slots = torch.tensor([different.index(delta) for delta in deltas], device=lm.device)
    lengths = torch.tensor([run.length for run, _ in moves], device=lm.device)
    per_token = slots.repeat_interleave(lengths)
    angles = {
        layer_type: (cos[per_token], sin[per_token])
        for layer_type, (cos, sin) in lm.angles(different).items()
    }
    stretches = _stretches([run for run, _ in moves])
    for layer in range(lm.n_layers):
        cos, sin = angles[lm.layer_types[layer]]
        keys = torch.cat([entry.keys[layer][:, _there(run)] for run, entry in moves], dim=1)
        values = torch.cat([entry.values[layer][:, _there(run)] for run, entry in moves], dim=1)
        keys = rope.shift(keys, cos, sin, lm.pairs[layer])
        for source, target in stretches:
            kv.write(layer, target, keys[None, :, source], values[None, :, source])


def _delta(run: Run, entry: ChunkKV) -> int:
    return run.target - run.source - entry.position


def _here(run: Run) -> slice:
    return slice(run.target, run.target + run.length)


def _there(run: Run) -> slice:
    return slice(run.source, run.source + run.length)


def _stretches(runs: Sequence[Run]) -> list[tuple[slice, slice]]:
    """Of runs in order of their targets: (place among the gathered tokens, place in the prompt)."""
    found: list[tuple[slice, slice]] = []
    at = 0
    for run in runs:
        if found and found[-1][1].stop == run.target:
            source, target = found.pop()
            found.append(
                (slice(source.start, at + run.length), slice(target.start, _here(run).stop))
            )
        else:
            found.append((slice(at, at + run.length), _here(run)))
        at += run.length
    return found
