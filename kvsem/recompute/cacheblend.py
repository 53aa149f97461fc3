"""CacheBlend: recompute the tokens whose values deviate most in an early layer."""

import torch

from kvsem.errors import SettingError, check_range
from kvsem.recompute.base import Needs, State


class CacheBlendRecompute:
    """High-KV-deviation tokens (CacheBlend, EuroSys 2025, arXiv 2405.16444, section 4.3).

    Layers 0 … ``probe_layer`` (1) run over all matched tokens; there the deviation of token i is
    sum over KV heads and head_dim of (V_new - V_reused)^2, in fp32; the round(ratio x matched)
    tokens that deviate most go on through the layers above. ``deviation: key`` compares keys
    instead (LMCache). Ties go to the earlier token. The paper's gradual narrowing over several
    layers is not in its code and not here.
    """

    def __init__(self, ratio: float = 0.15, probe_layer: int = 1, deviation: str = "value") -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        if probe_layer < 0:
            raise SettingError("recompute.probe_layer", probe_layer, "a layer from 0 up")
        if deviation not in ("value", "key"):
            raise SettingError("recompute.deviation", deviation, "value or key")
        self.ratio, self.probe_layer, self.deviation = ratio, probe_layer, deviation
        self.needs = Needs(fresh_layers=(probe_layer,))

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if layer <= self.probe_layer:
            return state.matched
        if layer == self.probe_layer + 1 or state.previous is None:
            return self._select(state)
        return state.previous

    def _select(self, state: State) -> torch.Tensor:
        which = 1 if self.deviation == "value" else 0
        fresh = state.fresh[self.probe_layer][which].float()
        reused = state.reused[self.probe_layer][which].float()
        deviation = (fresh - reused).square().sum(dim=(0, 2)).cpu()
        deviation[~state.matched] = -1.0
        order = deviation.argsort(descending=True, stable=True)
        chosen = state.nothing()
        chosen[order[: state.budget(self.ratio)]] = True
        return chosen
