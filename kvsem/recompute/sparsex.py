"""SparseX: the first layers in full, then what the question looked at there."""

import torch

from kvsem.errors import check_range
from kvsem.recompute.base import Needs, State


class SparseXRecompute:
    """``sparsex_like``: fresh tokens' queries choose (SparseX, arXiv 2606.01751, known to us
    second-hand).

    The first ``full_layers`` (a share of all, at least one) run over all matched tokens. Of them
    the round(ratio x matched) tokens go on that the question looked at most in these layers, the
    first and last matched token of each chunk before all others.
    """

    needs = Needs(watch=True)

    def __init__(self, ratio: float = 0.15, full_layers: float = 0.15) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        check_range("recompute.full_layers", full_layers, 0.0, 1.0)
        self.ratio, self.full_layers = ratio, full_layers

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        full = max(1, round(self.full_layers * state.n_layers))
        if layer < full:
            return state.matched
        if layer == full or state.previous is None:
            return self._select(state)
        return state.previous

    def _select(self, state: State) -> torch.Tensor:
        score = torch.stack(state.watched).mean(0).cpu()
        for start, end in state.chunks:
            at = start + state.matched[start:end].nonzero()[:, 0]
            score[at[[0, -1]]] += 1.0  # attention is at most 1
        return state.best(score, state.budget(self.ratio))
