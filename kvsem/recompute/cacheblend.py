"""CacheBlend: recompute the tokens whose values deviate most in an early layer."""

import torch

from kvsem.errors import SettingError, check_count, check_range
from kvsem.recompute.base import Needs, State


class CacheBlendRecompute:
    """High-KV-deviation tokens (CacheBlend, EuroSys 2025, arXiv 2405.16444, section 4.3).

    Layers 0 … ``probe_layer`` (1) run over all matched tokens; there the deviation of token i is
    sum over KV heads and head_dim of (V_new - V_reused)^2, in fp32; the round(ratio x matched)
    tokens that deviate most go on through the layers above. ``deviation: key`` compares keys
    instead (LMCache). Ties go to the earlier token. ``gradual``: over so many layers more the
    choice narrows from twice the ratio to the ratio, by the deviation at each of them: the
    paper's gradual filtering, which is not in its code.
    """

    def __init__(
        self,
        ratio: float = 0.15,
        probe_layer: int = 1,
        deviation: str = "value",
        gradual: int = 0,
    ) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        check_count("recompute.probe_layer", probe_layer, 0)
        check_count("recompute.gradual", gradual, 0)
        if deviation not in ("value", "key"):
            raise SettingError("recompute.deviation", deviation, "value or key")
        self.ratio, self.probe_layer, self.deviation = ratio, probe_layer, deviation
        self.gradual = gradual
        probed = range(probe_layer, probe_layer + gradual + 1)
        self.needs = Needs(fresh_layers=tuple(probed))

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        step = layer - 1 - self.probe_layer  # 0 at the first layer that narrows
        if step < 0:
            return state.matched
        if state.previous is not None and step > self.gradual:
            return state.previous
        share = self.ratio * (2 - step / self.gradual) if self.gradual else self.ratio
        deviation = state.deviation(layer - 1, self.deviation)
        return state.best(deviation, state.budget(min(1.0, share)), state.previous)
