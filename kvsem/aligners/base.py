"""An aligner says which donor token's KV each target token takes."""

from typing import Protocol

import numpy as np


class Aligner(Protocol):
    def align(self, target_ids: np.ndarray, donor_ids: np.ndarray) -> np.ndarray:
        """int64 ``[target tokens]``: index into the donor, -1 where the token must be computed."""
        ...
