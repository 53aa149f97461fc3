"""Fit the calibrated gate on what reuse did cost, and see what it would have refused.

python experiments/gates/fit.py ROWS.jsonl [--data ../shared/data] [--out FOLDER]

ROWS is what experiments/embeddings/run.py wrote: its pairs are made again, and half of the
documents are held out as there. Fitted on the others: log10 of the divergence per share of
tokens reused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from omegaconf import OmegaConf
from rich.progress import track

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.embeddings.estimate import Floats, estimate, excess, spearman  # noqa: E402
from experiments.embeddings.pairs import FILES, KINDS, Pair, pairs  # noqa: E402
from experiments.embeddings.run import MIN_SHARE, SHARE  # noqa: E402
from kvsem.gates.base import Candidate  # noqa: E402
from kvsem.gates.calibrated import FEATURES, CalibratedGate  # noqa: E402
from kvsem.lm import load  # noqa: E402

SETS = (FEATURES[:1], FEATURES[:2], FEATURES[:3], FEATURES[3:], FEATURES)
LIMITS = (0.005, 0.01, 0.02, 0.05, 0.1)  # nats per share reused
RIDGE = 1.0
FLOOR = 1e-6  # nats
Row = dict[str, Any]


def asked(folder: Path, rows: Sequence[Row], data: Path) -> list[Pair]:
    """The pairs of ``rows``, made again from the study's settings."""
    cfg = OmegaConf.load(folder / "config.yaml")
    kinds = list(KINDS) if cfg.kinds is None else list(cfg.kinds)
    files = {name: data / path for name, path in FILES.items()}
    made = {p.id: p for p in pairs(files, kinds, cfg.n, cfg.max_words, cfg.seed)}
    return [made[row["id"]] for row in rows]


def fit(features: Floats, target: Floats) -> tuple[Floats, float]:
    """Weights and bias by ridge regression on standardised ``features`` ``[rows, features]``."""
    mean, spread = features.mean(axis=0), features.std(axis=0) + 1e-9
    scaled, centre = (features - mean) / spread, target.mean()
    left = scaled.T @ scaled + RIDGE * np.eye(features.shape[1])
    weights = np.linalg.solve(left, scaled.T @ (target - centre)) / spread
    return weights, float(centre - weights @ mean)


def refusals(
    predicted: Floats, divergence: Floats, known: npt.NDArray[np.bool_]
) -> dict[str, dict[str, float]]:
    """On held-out pairs, by limit: the share accepted, and the divergence of both sides."""
    found = {}
    own, cost = predicted[~known], divergence[~known]
    for limit in LIMITS:
        ok = own <= limit
        sides = {"accepted": cost[ok], "refused": cost[~ok]}
        found[str(limit)] = {"share accepted": float(ok.mean())} | {
            f"{side}, {name}": float(measure(values)) if len(values) else float("nan")
            for side, values in sides.items()
            for name, measure in (("mean", np.mean), ("max", np.max))
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="rows.jsonl of the study embeddings")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/calibrated")
    parser.add_argument("--probe-layers", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in given.rows.read_text(encoding="utf-8").splitlines()]
    gate = CalibratedGate(dict.fromkeys(FEATURES, 0.0), 0.0, probe_layers=given.probe_layers)
    gate.use(load("smollm2", packaged=True))
    told = [
        gate.features(pair.target, Candidate(pair.donor, row["similarity/minilm"]))
        for pair, row in zip(
            track(asked(given.rows.parent, rows, given.data), description="pairs"),
            rows,
            strict=True,
        )
    ]
    share = np.array([row[f"similarity/{SHARE} (edit)"] for row in rows])
    divergence = np.array([row["kl_first_nats/edit"] for row in rows])
    divergence = divergence / np.maximum(share, MIN_SHARE)
    known = np.array([not row["is_held_out"] for row in rows])
    groups = [row["group"] for row in rows if row["is_held_out"]]
    summary: Row = {"n": int(known.sum()), "n held out": int((~known).sum()), "models": {}}
    for names in SETS:
        features = np.array([[one[name] for name in names] for one in told])
        weights, bias = fit(features[known], np.log10(np.maximum(divergence[known], FLOOR)))
        predicted = 10.0 ** (features @ weights + bias)
        ranked = {
            key: estimate(measure, -predicted[~known], divergence[~known], groups, 1000, 0)
            for key, measure in (("spearman", spearman), ("excess", excess))
        }
        summary["models"][" + ".join(names)] = {
            "weights": dict(zip(names, weights.tolist(), strict=True)),
            "bias": bias,
            **ranked,
            "limits": refusals(predicted, divergence, known),
        }
        rho = ranked["spearman"]
        shown = ", ".join(f"{n} {w:.3g}" for n, w in zip(names, weights, strict=True))
        print(
            f"{' + '.join(names)}: Spearman {rho['value']:.2f} [{rho['low']:.2f}, "
            f"{rho['high']:.2f}] on {rho['n']} held-out pairs; {shown}, bias {bias:.3g}"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary, indent=1)
    (given.out / "calibrated.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
