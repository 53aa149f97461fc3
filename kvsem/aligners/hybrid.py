"""Equal tokens by one aligner, and inside what is left between them by another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsem.aligners.base import Aligner
from kvsem.model import Model, hand


class HybridAligner:
    """``first`` over the whole chunk (`edit`), then ``inside`` (`nearest`) over each changed run:
    target tokens that ``first`` left out, with the donor tokens between the same neighbours.

    So a replaced word can only take the KV of what stood in its place. A run on one side only
    (inserted or left out) has no counterpart. ``first`` must give ascending sources.
    """

    def __init__(self, first: Aligner, inside: Aligner) -> None:
        self.first, self.inside = first, inside

    def use(self, model: Model) -> None:
        """Hand ``model`` to those of the two that want it."""
        hand(self.first, model)
        hand(self.inside, model)

    def align(self, target_ids: np.ndarray, donor_ids: np.ndarray) -> np.ndarray:
        """int64 ``[target tokens]``; sources of two runs never cross, those inside one may."""
        source = self.first.align(target_ids, donor_ids)
        for target, donor in _changed(source, len(donor_ids)):
            found = self.inside.align(target_ids[target], donor_ids[donor])
            source[target] = np.where(found >= 0, found + donor.start, -1)
        return source


def _changed(source: np.ndarray, n_donor: int) -> Iterator[tuple[slice, slice]]:
    """Stretches without a source, with the donor's between the same neighbours; none empty."""
    kept = [-1, *np.flatnonzero(source >= 0).tolist(), len(source)]
    origin = [-1, *source[source >= 0].tolist(), n_donor]
    for i in range(len(kept) - 1):
        target = slice(kept[i] + 1, kept[i + 1])
        donor = slice(origin[i] + 1, origin[i + 1])
        if target.start < target.stop and donor.start < donor.stop:
            yield target, donor
