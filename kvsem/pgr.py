"""How much of what the passages are worth an arm keeps: the performance gap recovered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsem.intervals import Floats, bootstrap, ratio_of_means

FULL, BARE = "exact", "no_context"
KEYS = {"quality/answer_nll_nats": -1, "quality/f1": 1}  # 1: higher is better


def gap_recovered(
    values: Floats, arms: Sequence[str], keys: Sequence[str], groups: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """PGR as KVShareArena defines it (arXiv 2609.10266): (arm - no context) / (full - no context),
    a ratio of means over the requests that all three have, not clipped, and notes on it.

    ``values``: ``[requests, arms, keys]``, NaN where missing. {arm: {key: {mean, low, high, n}}};
    a key is left out where full and no context do not differ. 95 % percentiles of 10,000 paired
    resamples, clustered by ``groups``. Whether higher is better does not matter to a ratio of
    differences, only to whether the gap is one.
    """
    if FULL not in arms or BARE not in arms:
        return {}, []
    found: dict[str, dict[str, Any]] = {a: {} for a in arms if a not in (FULL, BARE)}
    notes = []
    for key in (key for key in KEYS if key in keys):
        column = values[:, :, keys.index(key)]
        bare = column[:, arms.index(BARE)]
        gap = column[:, arms.index(FULL)] - bare
        notes += _doubt(key, gap, groups)
        for arm in found:
            pair = np.stack([column[:, arms.index(arm)] - bare, gap], axis=1)
            if (estimate := _estimate(pair, groups)) is not None:
                found[arm][key] = estimate
    return {arm: own for arm, own in found.items() if own}, notes


def _estimate(pair: Floats, groups: Sequence[str]) -> dict[str, Any] | None:
    whole = np.isfinite(pair).all(axis=1)
    if not whole.any():
        return None
    found = ratio_of_means(pair[whole], np.asarray(groups)[whole].tolist())
    if found is None:
        return None
    mean, low, high = found
    return {"mean": mean, "low": min(low, mean), "high": max(high, mean), "n": int(whole.sum())}


def _doubt(key: str, gap: Floats, groups: Sequence[str]) -> list[str]:
    """A note where the passages are not shown to help: a ratio to nothing says nothing."""
    if not np.isfinite(gap).any():
        return []
    better = KEYS[key] * gap[:, None]
    low, high = (float(end[0]) for end in bootstrap(better, groups))
    if low > 0:
        return []
    return [
        f"PGR on {key} says little: exact is better than no_context by "
        f"{float(np.nanmean(better)):.3g} ({low:.3g} … {high:.3g}), which is not told from nothing"
    ]
