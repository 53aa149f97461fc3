"""Control: reused KV replaced by noise of the same size."""

import torch

from kvsem.recompute.base import Needs, State


class RandomKV:
    """Gaussian keys and values: mean and spread of the reused ones, per head and channel."""

    needs = Needs()

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        return state.nothing()

    def adjust(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(state.seed + layer)
        return _noise(keys, generator), _noise(values, generator)


def _noise(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    mean, std = like.float().mean(1, keepdim=True), like.float().std(1, keepdim=True, correction=0)
    noise = torch.randn(like.shape, generator=generator).to(like.device)
    return (noise * std + mean).to(like.dtype)
