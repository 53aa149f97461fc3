"""Recompute nothing."""

import torch

from kvsem.recompute.base import Needs, State


class NoRecompute:
    """Moved KV as it is; only the tokens that nothing covers are computed."""

    needs = Needs()

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        return state.nothing() if state.previous is None else state.previous
