"""KVShare: recompute what the question looks at and what deviates."""

import torch

from kvsem.errors import check_count, check_range
from kvsem.recompute.base import Needs, State


class KVShareRecompute:
    """``kvshare_like``: attention times value deviation (KVShare, arXiv 2503.16525, known to us
    second-hand).

    Score of a token: the question's attention to it (mean over layers, heads and question tokens,
    over the assembled cache) times ``||V_fresh - V_reused||_1`` at ``probe_layer``, up to which all
    matched tokens are computed. The round(ratio x matched) highest go on. The paper sums attention
    over columns; the tokens that it recomputes at each decode step are not here.
    """

    def __init__(self, ratio: float = 0.15, probe_layer: int = 1) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        check_count("recompute.probe_layer", probe_layer, 0)
        self.ratio, self.probe_layer = ratio, probe_layer
        self.needs = Needs(fresh_layers=(probe_layer,), question_attention=True)

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if layer <= self.probe_layer:
            return state.matched
        if layer == self.probe_layer + 1 or state.previous is None:
            score = state.attention() * state.deviation(self.probe_layer, "value", power=1)
            return state.best(score, state.budget(self.ratio))
        return state.previous
