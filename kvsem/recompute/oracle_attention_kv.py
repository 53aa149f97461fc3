"""Oracle: recompute where a true error meets the question's attention."""

import torch

from kvsem.errors import check_range
from kvsem.recompute.base import Needs, State


class OracleAttentionKV:
    """The round(ratio x matched) tokens with the largest sum over layers of the question's
    attention times the true error of keys and values. No request can know it."""

    needs = Needs(exact=True, question_attention=True)

    def __init__(self, ratio: float = 0.15) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        self.ratio = ratio

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if state.previous is not None:
            return state.previous
        assert state.kv_error is not None
        assert state.question_attention is not None
        score = (state.question_attention * state.kv_error).sum(0)
        return state.best(score, state.budget(self.ratio))
