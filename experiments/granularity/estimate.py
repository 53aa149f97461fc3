"""From counts and clocks to means with intervals, and to paired differences to 16-token pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.granularity.measure import COUNTS, PARTS, Floats, Measured
from experiments.granularity.workloads import Served
from kvsem.summary import bootstrap

REFERENCE = "page_16"
TIMES = (*PARTS, "bookkeeping")  # the last one is their sum
PER_1000 = "bookkeeping_us_per_1000_tokens"  # of the prompt
SHARES = ("hit_rate", *COUNTS[1:])
DIFFERENCES = ("hit_rate", "pages", "empty_slots")  # of times, ratios
Estimate = dict[str, float]


def estimates(measured: Measured, requests: Sequence[Served]) -> dict[str, Any]:
    """Means per request of each arm, and per pair of the differences, request by request.

    Times are in microseconds; their pairs are geometric means of ratios.
    """
    groups = [request.group for request in requests]
    counts, times = _counts(measured, requests), _times(measured)
    n = np.array([request.n_prompt for request in requests], dtype=float)[:, None, None]
    tables = (
        (counts, SHARES),
        (times[:, :, -1:], ["bookkeeping_us"]),
        ((times / n * 1000)[:, :, -1:], [PER_1000]),
    )
    arms: dict[str, dict[str, Estimate]] = {arm: {} for arm in measured.arms}
    for values, names in tables:
        for a, arm in enumerate(measured.arms):
            arms[arm] |= _means(values[:, a], names, groups)
    pairs: dict[str, dict[str, Estimate]] = {}
    columns = [SHARES.index(name) for name in DIFFERENCES]
    for arm, other in _compared(measured.arms):
        a, b = measured.arms.index(arm), measured.arms.index(other)
        ratios = _means(np.log(times[:, a] / times[:, b]), [f"{p}_ratio" for p in TIMES], groups)
        pairs[f"{arm}-{other}"] = {
            **_means((counts[:, a] - counts[:, b])[:, columns], DIFFERENCES, groups),
            **{name: _exponential(estimate) for name, estimate in ratios.items()},
        }
    return {"arms": arms, "pairs": pairs}


def _counts(measured: Measured, requests: Sequence[Served]) -> Floats:
    """Counts ``[requests, arms, SHARES]``, tokens found as a share of the prompt."""
    values = measured.counts.astype(float)
    values[:, :, 0] /= np.array([request.n_prompt for request in requests], dtype=float)[:, None]
    return values


def _times(measured: Measured) -> Floats:
    """Microseconds ``[requests, arms, TIMES]``."""
    whole = measured.seconds.sum(axis=2, keepdims=True)
    times: Floats = np.concatenate([measured.seconds, whole], axis=2) * 1e6
    return times


def _compared(arms: Sequence[str]) -> list[tuple[str, str]]:
    """Each arm with 16-token whole pages in the same pool; one that may match inside its pages
    also with its own size that may not."""
    pairs = []
    for arm in arms:
        name, _, pool = arm.partition("/")
        others = [REFERENCE]
        if name.endswith("_partial"):
            others.append(name.removesuffix("_partial"))
        found = (f"{other}/{pool}" for other in dict.fromkeys(others) if other != name)
        pairs += [(arm, other) for other in found if other in arms]
    return pairs


def _means(values: Floats, names: Sequence[str], groups: Sequence[str]) -> dict[str, Estimate]:
    low, high = bootstrap(values, groups)
    means = values.mean(axis=0)
    return {
        name: {
            "mean": _short(means[i]),
            "low": _short(min(low[i], means[i])),
            "high": _short(max(high[i], means[i])),
            "n": len(values),
        }
        for i, name in enumerate(names)
    }


def _exponential(estimate: Estimate) -> Estimate:
    return {k: v if k == "n" else _short(float(np.exp(v))) for k, v in estimate.items()}


def _short(value: float) -> float:
    return float(f"{value:.5g}")
