"""FusionRAG: recompute what the last layer's question queries look at."""

import torch

from kvsem.errors import check_count, check_range
from kvsem.recompute.base import Needs, State


class FusionRAGRecompute:
    """Last-layer attention of the question over the assembled cache (FusionRAG, its selection).

    The round(ratio x matched) tokens with the highest weight, summed over heads, are recomputed
    at all layers; with ``group`` above 1, runs of so many matched tokens by their highest one
    (16 in its code), as many as fit the budget and at least one token. Its other half, the most
    similar chunks baked into each chunk's KV at ingestion, is ``context=similar``. Its ratio is of
    all N tokens, ours of the matched ones.
    """

    needs = Needs(question_attention=True)

    def __init__(self, ratio: float = 0.15, group: int = 1) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        check_count("recompute.group", group, 1)
        self.ratio, self.group = ratio, group

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if state.previous is not None:
            return state.previous
        assert state.question_attention is not None
        score = state.question_attention[-1].clone()
        at = state.matched.nonzero()[:, 0]
        for run in torch.split(at, self.group) if len(at) else ():
            score[run] = score[run].max()  # a group's tokens tie, and keep their order
        return state.best(score, state.budget(self.ratio))
