"""How well a similarity ranks pairs by their divergence, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
PERCENTILES = (2.5, 97.5)


def spearman(similarity: Floats, divergence: Floats) -> float:
    """Rank correlation of *dis*similarity and divergence: 1 is a perfect order; 0 where either
    does not vary."""
    left, right = (_ranks(values) for values in (-similarity, divergence))
    left, right = left - left.mean(), right - right.mean()
    whole = float(np.sqrt((left @ left) * (right @ right)))
    return float(left @ right) / whole if whole > 0 else 0.0


def _ranks(values: Floats) -> Floats:
    """From 1; equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place])


def area(similarity: Floats, divergence: Floats) -> float:
    """Under the risk-coverage curve: mean divergence of the most similar share, mean over all
    shares, in nats; equal similarities stand in for each other."""
    _, place, counts = np.unique(-similarity, return_inverse=True, return_counts=True)
    risk = np.repeat(np.bincount(place, weights=divergence) / counts, counts)
    return float((np.cumsum(risk) / np.arange(1, len(risk) + 1)).mean())


def excess(similarity: Floats, divergence: Floats) -> float:
    """`area` on a scale from 0 (order by the divergence itself) to 1 (no order at all)."""
    best, none = area(-divergence, divergence), float(divergence.mean())
    return (area(similarity, divergence) - best) / (none - best) if none > best else 0.0


def estimate(
    measure: Callable[[Floats, Floats], float],
    similarity: Floats,
    divergence: Floats,
    groups: Sequence[str],
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    """``measure``, and its 95 % percentile interval where whole ``groups`` are drawn."""
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(np.asarray(groups) == g) for g in dict.fromkeys(groups)]
    drawn = []
    for _ in range(resamples):
        rows = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        drawn.append(measure(similarity[rows], divergence[rows]))
    low, high = np.percentile(drawn, PERCENTILES)
    found = measure(similarity, divergence)
    return {"value": found, "low": float(low), "high": float(high), "n": len(similarity)}


def fitted(features: Floats, divergence: Floats, is_known: npt.NDArray[np.bool_]) -> Floats:
    """Less the predicted log divergence of every row, by least squares on those that are known:
    a similarity made of several. ``features`` ``[rows, features]``."""
    mean, spread = features[is_known].mean(axis=0), features[is_known].std(axis=0) + 1e-9
    design = np.column_stack([np.ones(len(features)), (features - mean) / spread])
    target = np.log(np.maximum(divergence, 1e-6))
    ridge = np.diag([0.0] + [1.0] * features.shape[1])
    left = design[is_known].T @ design[is_known] + ridge
    weights = np.linalg.solve(left, design[is_known].T @ target[is_known])
    return np.asarray(-(design @ weights))
