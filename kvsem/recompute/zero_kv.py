"""Control: reused KV replaced by zeros."""

import torch

from kvsem.recompute.base import Needs, State


class ZeroKV:
    """What the reused KV is worth at all: zero keys and values where there would be a chunk's."""

    needs = Needs()

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        return state.nothing()

    def adjust(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(keys), torch.zeros_like(values)
