"""ProphetKV: recompute what the question looks at."""

import torch

from kvsem.errors import check_range
from kvsem.recompute.base import Needs, State


class ProphetKVRecompute:
    """The question's attention over the assembled cache (ProphetKV, arXiv 2602.02579, abstract).

    The question runs once over the reused KV; the round(ratio x matched) tokens that it looks at
    most (mean over layers, heads and question tokens) are recomputed at all layers. The paper
    fuses attention over layers in two stages; ours is their plain mean.
    """

    needs = Needs(question_attention=True)

    def __init__(self, ratio: float = 0.2) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        self.ratio = ratio

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if state.previous is not None:
            return state.previous
        return state.best(state.attention(), state.budget(self.ratio))
