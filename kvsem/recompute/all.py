"""Recompute everything that is not exact."""

import torch

from kvsem.recompute.base import Needs, State


class AllRecompute:
    """Every matched token at every layer: must equal exact computation."""

    needs = Needs()

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        return state.matched
