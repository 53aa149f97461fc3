"""Bringing stored KV to its place in a prompt: gather and shift, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from kvsem import rope
from kvsem.forward import KVBuffer
from kvsem.lm import LM
from kvsem.types import ChunkKV, Run


def gather(lm: LM, kv: KVBuffer, runs: Sequence[Run], entries: dict[str, ChunkKV]) -> None:
    """Write the runs' keys (moved) and values into ``kv``; other tokens stay as they are.

    One copy of values and one rotation of keys per run and layer; a run that has not moved is
    copied bit for bit.
    """
    if not runs:
        return
    moves = [(run, entries[run.entry]) for run in runs]
    deltas = [run.target - run.source - entry.position for run, entry in moves]
    different = sorted(set(deltas) - {0})
    angles = lm.angles(different) if different else {}
    slot = {delta: i for i, delta in enumerate(different)}
    for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
        cos, sin = angles.get(lm.layer_types[layer], (None, None))
        for (run, entry), delta in zip(moves, deltas, strict=True):
            here = slice(run.target, run.target + run.length)
            there = slice(run.source, run.source + run.length)
            values[0, :, here] = entry.values[layer][:, there]
            source = entry.keys[layer][:, there]
            if delta == 0 or cos is None or sin is None:
                keys[0, :, here] = source
            else:
                i = slot[delta]
                rope.shift(source, cos[i], sin[i], out=keys[0, :, here])
