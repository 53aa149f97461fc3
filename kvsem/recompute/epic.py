"""EPIC / LegoLink: recompute the head of every chunk."""

import torch

from kvsem.errors import SettingError, check_range
from kvsem.recompute.base import Needs, State


class EpicRecompute:
    """The first tokens of every chunk, at all layers (EPIC, ICML 2025, arXiv 2410.15332, LegoLink).

    ``k`` tokens of each chunk where given (the paper's k, 1 to 64), otherwise the first
    round(ratio x length) of each, at least one where ratio > 0. Tokens that are exact prefix or
    were not matched do not count.
    """

    needs = Needs()

    def __init__(self, ratio: float = 0.15, k: int | None = None) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        if k is not None and (type(k) is not int or k < 0):
            raise SettingError("recompute.k", k, "a whole number of tokens from 0 up, or null")
        self.ratio, self.k = ratio, k

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if state.previous is not None:
            return state.previous
        chosen = state.nothing()
        for start, end in state.chunks:
            matched = start + state.matched[start:end].nonzero()[:, 0]
            chosen[matched[: self._head(len(matched))]] = True
        return chosen

    def _head(self, length: int) -> int:
        if self.k is not None:
            return self.k
        return max(1, round(self.ratio * length)) if self.ratio > 0 else 0
