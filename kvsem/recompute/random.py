"""Control: recompute a random subset."""

import torch

from kvsem.errors import check_range
from kvsem.recompute.base import Needs, State


class RandomRecompute:
    """round(ratio x matched) tokens drawn without replacement, the same at every layer."""

    needs = Needs()

    def __init__(self, ratio: float = 0.15) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        self.ratio = ratio

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if state.previous is not None:
            return state.previous
        candidates = state.matched.nonzero()[:, 0]
        generator = torch.Generator().manual_seed(state.seed)
        order = torch.randperm(len(candidates), generator=generator)
        chosen = state.nothing()
        chosen[candidates[order[: state.budget(self.ratio)]]] = True
        return chosen
