"""What moving keys is worth: perplexity behind a chunk whose keys were, or were not, moved.

python experiments/rope/run.py [--limit 20] [--model smollm2]

The first 128 tokens of a text are computed at position D, the next 64 are scored behind them at
position 0: with the chunk's keys moved by -D, and as they are. Perplexity ratio to exact, mean over
texts of the Python reference with its 95 % bootstrap interval (SemBlend's ablation: D of 0, 256 and
1,024). Writes results/rope.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from rich.progress import track

from kvsem import rope
from kvsem.intervals import bootstrap
from kvsem.lm import LM, load
from kvsem.results import write_atomic

HERE = Path(__file__).resolve().parent
CHUNK, SCORED = 128, 64
MOVES = (0, 256, 1024)


def nll(lm: LM, ids: np.ndarray, at: int, moved: bool) -> float:
    """Of the scored tokens behind a chunk from position ``at``: mean nats a token."""
    keys, values = lm.alone(ids[:CHUNK], at)
    kv = lm.buffer(CHUNK + SCORED)
    back = lm.angles([-at])
    for layer in range(lm.n_layers):
        cos, sin = (t[0] for t in back[lm.layer_types[layer]])
        key = rope.shift(keys[layer], cos, sin, lm.pairs[layer]) if moved else keys[layer]
        kv.write(layer, slice(0, CHUNK), key[None], values[layer][None])
    kv.length = CHUNK
    log_probs = lm.extend(ids[CHUNK:-1].tolist(), kv).double().log_softmax(-1)
    return -float(log_probs[range(SCORED - 1), ids[CHUNK + 1 :]].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=20, help="texts (default 20)")
    parser.add_argument("--model", default="smollm2", help="a packaged model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lm = load(given.model, packaged=True)
    encoded = (
        lm.tokenizer(text, add_special_tokens=False)["input_ids"] for text in topics.values()
    )
    long = (np.array(ids[: CHUNK + SCORED]) for ids in encoded if len(ids) >= CHUNK + SCORED)
    texts = [ids for ids, _ in zip(long, range(given.limit), strict=False)]
    rows = []
    for ids in track(texts, "texts"):
        exact = nll(lm, ids, 0, moved=False)
        cases = [(at, moved) for at in MOVES for moved in (True, False)]
        rows.append([np.exp(nll(lm, ids, at, moved) - exact) for at, moved in cases])
    values = np.array(rows)
    low, high = bootstrap(values, [str(i) for i in range(len(values))])
    found = {
        f"{at} {'moved' if moved else 'as they are'}": [float(x) for x in (mean, low[i], high[i])]
        for i, ((at, moved), mean) in enumerate(zip(cases, values.mean(0), strict=True))
    }
    kept = {"model": given.model, "n": len(values), "perplexity_ratio": found}
    write_atomic(HERE / "results" / "rope.json", json.dumps(kept, indent=1) + "\n")
    for name, (mean, a, b) in found.items():
        print(f"{name:18} x {mean:.4f} ({a:.4f} … {b:.4f}), n = {len(values)}")


if __name__ == "__main__":
    main()
