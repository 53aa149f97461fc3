"""How alike the deviations of reused tokens are: the field that `krige` samples.

python experiments/rules/field.py REQUESTS.jsonl NAME [--context behind_system] [--limit 20]

REQUESTS as experiments/rules/prepare.py writes them. Reused keys (as they would be at position 0)
and values are compared with exact ones; printed and drawn is the correlation of two tokens'
deviations over their distance within a chunk, and across chunks: mean inner product over mean
square. Writes results/field_NAME.json and results/field_NAME.svg beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from hydra.utils import instantiate
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from rich.progress import track

from kvsem import rope
from kvsem.engine import Engine
from kvsem.lm import LM, load
from kvsem.plots import svg
from kvsem.results import write_atomic
from kvsem.types import Request
from kvsem.workloads.jsonl import JsonlWorkload

HERE = Path(__file__).resolve().parent
CONTEXTS = HERE.parents[1] / "conf" / "context"
DISTANCES = (1, 2, 4, 8, 16, 32, 64)
Deviations = list[tuple[torch.Tensor, torch.Tensor]]  # by layer: keys and values, [tokens, width]


def deviations(lm: LM, engine: Engine, request: Request) -> tuple[torch.Tensor, Deviations]:
    """Which chunk each matched token belongs to, and how far its reused KV is from exact."""
    done = engine.prefill(request, room=0)
    n, plan = done.plan.n_tokens, done.plan
    exact = lm.buffer(n)
    lm.prefill(done.prompt.ids, exact, lambda _: torch.ones(n, dtype=torch.bool))
    at = torch.from_numpy(plan.matched).nonzero()[:, 0]
    chunk = torch.full((n,), -1)
    for i, span in enumerate(plan.chunks):
        chunk[span.start : span.end] = i
    back = lm.angles((-at).tolist())
    found = []
    for layer in range(lm.n_layers):
        pairs = zip(exact.read(layer, n), done.kv.read(layer, n), strict=True)
        keys, values = ((a[0] - b[0])[:, at] for a, b in pairs)
        keys = rope.shift(keys, *back[lm.layer_types[layer]], lm.pairs[layer])
        found.append((keys.transpose(0, 1).flatten(1), values.transpose(0, 1).flatten(1)))
    engine.drop(done)
    return chunk[at], found


def correlations(lm: LM, engine: Engine, requests: list[Request]) -> dict[str, list[list[float]]]:
    """``keys`` and ``values`` by layer: at each of `DISTANCES`, and last across chunks."""
    sums: dict[tuple[str, int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for request in track(requests, "requests"):
        chunk, found = deviations(lm, engine, request)
        place = torch.arange(len(chunk))
        distance = (place[:, None] - place[None]).abs()
        same = chunk[:, None] == chunk[None]
        masks = {d: (distance == d) & same for d in DISTANCES} | {-1: ~same, 0: distance == 0}
        for layer, both in enumerate(found):
            for name, deviation in zip(("keys", "values"), both, strict=True):
                products = deviation @ deviation.T
                for d, mask in masks.items():
                    total = sums[name, layer, d]
                    total[0] += float(products[mask].sum())
                    total[1] += int(mask.sum())

    def mean(name: str, layer: int, d: int) -> float:
        total, n = sums[name, layer, d]
        return total / n if n else float("nan")

    return {
        name: [
            [mean(name, i, d) / max(mean(name, i, 0), 1e-12) for d in (*DISTANCES, -1)]
            for i in range(1, lm.n_layers)  # values of layer 0 deviate nowhere
        ]
        for name in ("keys", "values")
    }


def figure(found: dict[str, list[list[float]]]) -> Figure:
    drawn = Figure(figsize=(9, 3.8), layout="constrained")
    for ax, (name, rows) in zip(drawn.subplots(1, 2, sharey=True), found.items(), strict=True):
        for layer, row in enumerate(rows, start=1):
            if layer % 4 == 0:
                (line,) = ax.plot(DISTANCES, row[:-1], marker="o", label=f"layer {layer}")
                ax.axhline(row[-1], color=line.get_color(), linewidth=0.6, linestyle=":")
        ax.set_xscale("log", base=2)
        ax.set_title(name, fontsize="medium")
        ax.set_xlabel("distance in a chunk [tokens]; dotted: across chunks")
        ax.grid(alpha=0.3)
        ax.set_ylim(-0.1, 1)
    drawn.axes[0].set_ylabel("correlation of their deviations")
    drawn.axes[1].legend(fontsize="small")
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requests", type=Path, help="a .jsonl of this study")
    parser.add_argument("name", help="of the results")
    parser.add_argument("--context", default="behind_system", help="of conf/context")
    parser.add_argument("--limit", type=int, default=20, help="requests (default 20)")
    given = parser.parse_args()
    lm = load("smollm2", packaged=True)
    context = instantiate(OmegaConf.load(CONTEXTS / f"{given.context}.yaml"))
    engine = Engine(lm, context=context, admit="none")
    requests = list(JsonlWorkload(given.requests, limit=given.limit))
    engine.ingest(requests, track=lambda donors: track(donors, "ingest"))
    found = correlations(lm, engine, requests)
    settings = {"context": given.context, "n": len(requests), "distances": [*DISTANCES, "across"]}
    target = HERE / "results" / f"field_{given.name}"
    target.parent.mkdir(exist_ok=True)
    rounded = {k: [[round(x, 3) for x in row] for row in rows] for k, rows in found.items()}
    write_atomic(target.with_suffix(".json"), json.dumps(settings | rounded, indent=1) + "\n")
    write_atomic(target.with_suffix(".svg"), svg(figure(found), target.name))
    for name, rows in found.items():
        for layer in range(4, len(rows), 8):
            shown = "  ".join(f"{x:5.2f}" for x in rows[layer - 1])
            print(f"{name:6} layer {layer:2}: {shown}")


if __name__ == "__main__":
    main()
