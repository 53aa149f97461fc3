"""All or nothing: the same tokens, one to one."""

import numpy as np


class IdenticalAligner:
    """Every token from its own place where all ids are equal, else nothing."""

    def align(self, target_ids: np.ndarray, donor_ids: np.ndarray) -> np.ndarray:
        """int64 ``[target tokens]``: 0, 1, 2, ... or all -1."""
        n = len(target_ids)
        if np.array_equal(target_ids, donor_ids):
            return np.arange(n, dtype=np.int64)
        return np.full(n, -1, dtype=np.int64)
