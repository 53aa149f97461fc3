"""Longest common subsequence of token ids: what an edit left is reused."""

from __future__ import annotations

import numpy as np

from kvsem.lcs import runs


class EditAligner:
    """As many tokens as possible from the donor, in order, each from an equal token.

    A longest common subsequence (`kvsem.lcs`).
    """

    def align(self, target_ids: np.ndarray, donor_ids: np.ndarray) -> np.ndarray:
        """int64 ``[target tokens]``: strictly increasing donor indices, and -1 between them."""
        target, donor = target_ids.tolist(), donor_ids.tolist()
        source = np.full(len(target), -1, dtype=np.int64)
        for start, origin, length in runs(target, donor):
            source[start : start + length] = np.arange(origin, origin + length)
        return source
