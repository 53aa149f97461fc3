"""Oracle: recompute the tokens whose reused KV is really furthest off."""

import torch

from kvsem.errors import check_range
from kvsem.recompute.base import Needs, State


class OracleKV:
    """The round(ratio x matched) tokens with the largest true error of keys and values, Euclidean
    norm, mean over layers. No request can know it: the prompt is computed exactly beside it."""

    needs = Needs(exact=True)

    def __init__(self, ratio: float = 0.15) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        self.ratio = ratio

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if state.previous is not None:
            return state.previous
        assert state.kv_error is not None
        return state.best(state.kv_error.mean(0), state.budget(self.ratio))
