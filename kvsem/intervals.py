"""Bootstrap intervals of means, with the records of one document drawn together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESAMPLES = 10_000
SEED = 0
INTERVAL = (2.5, 97.5)  # percentiles


def bootstrap(
    values: Floats, groups: Sequence[str], *, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[Floats, Floats]:
    """95 % percentile interval of the mean of each column, clusters resampled whole.

    ``values``: ``[records, columns]``, NaN where missing; ``groups``: one label per record. A
    resample draws as many clusters as hold a value of the column, with replacement, and takes the
    mean over all records drawn. Returns ``low`` and ``high`` ``[columns]``, NaN without a value.
    """
    sums, sizes = _by_cluster(values, groups)
    low, high = np.full((2, values.shape[1]), np.nan)
    # Columns with values in the same clusters share one set of draws.
    patterns, which = np.unique(sizes > 0, axis=1, return_inverse=True)
    for i, drawn in enumerate(patterns.T):
        if drawn.any():
            columns = np.flatnonzero(which.ravel() == i)
            pick = np.ix_(drawn, columns)
            means = _resampled_means(sums[pick], sizes[pick], resamples, seed)
            low[columns], high[columns] = np.percentile(means, INTERVAL, axis=1)
    return low, high


def ratio_of_means(
    values: Floats, groups: Sequence[str], *, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float, float] | None:
    """Mean of the first column ÷ mean of the second, and its 95 % percentile interval.

    ``values``: ``[records, 2]``, finite; each resample draws both columns' clusters together. A
    resample whose second mean is zero is left out. None where the second mean itself is zero.
    """
    above, below = values.mean(axis=0)
    if below == 0:
        return None
    means = _resampled_means(*_by_cluster(values, groups), resamples, seed)
    drawn = means[:, means[1] != 0]
    low, high = np.percentile(drawn[0] / drawn[1], INTERVAL)
    return float(above / below), float(low), float(high)


def _by_cluster(values: Floats, groups: Sequence[str]) -> tuple[Floats, Floats]:
    """Sums and numbers of the values ``[clusters, columns]``; NaN is no value."""
    present = np.isfinite(values)
    labels, cluster = np.unique(np.asarray(groups), return_inverse=True)
    sums, sizes = np.zeros((2, len(labels), values.shape[1]))
    np.add.at(sums, cluster, np.where(present, values, 0.0))
    np.add.at(sizes, cluster, present)
    return sums, sizes


def _resampled_means(sums: Floats, sizes: Floats, resamples: int, seed: int) -> Floats:
    """``[columns, resamples]`` from sums and sizes ``[clusters, columns]``."""
    n = len(sums)
    rng = np.random.default_rng(seed)
    blocks = []
    for start in range(0, resamples, 1000):
        size = min(1000, resamples - start)
        times = rng.multinomial(n, np.full(n, 1 / n), size=size).astype(np.float64)
        blocks.append((times @ sums) / (times @ sizes))
    return np.ascontiguousarray(np.concatenate(blocks).T)
