"""Refine: the reused KV as an initial value that sweeps correct."""

import torch

from kvsem.errors import SettingError, check_range
from kvsem.recompute.base import Needs, State


class RefineRecompute:
    """Block Gauss-Seidel on the reused KV: each sweep recomputes other tokens over what the sweeps
    before it corrected.

    Of the round(ratio x matched) tokens each of the ``sweeps`` (1 to 3) takes an equal share: those
    that the question looked at most in the pass before, not counting the ones already recomputed.
    A second sweep over the same tokens would change nothing: within a sweep, every layer already
    sees the corrected KV of the layer below. Ours; no paper.
    """

    def __init__(self, ratio: float = 0.15, sweeps: int = 2) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        if type(sweeps) is not int or sweeps not in (1, 2, 3):
            raise SettingError("recompute.sweeps", sweeps, "1, 2 or 3")
        self.ratio, self.sweeps = ratio, sweeps
        self.needs = Needs(question_attention=True, sweeps=sweeps)

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if state.previous is not None:
            return state.previous
        budget = state.budget(self.ratio)
        if self.ratio == 1:  # nothing is left to choose
            return state.matched
        edges = [budget * sweep // self.sweeps for sweep in range(self.sweeps + 1)]
        left = state.matched if state.repaired is None else state.matched & ~state.repaired
        return state.best(state.attention(), edges[state.sweep + 1] - edges[state.sweep], left)
