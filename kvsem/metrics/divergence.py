"""How far the arm's next-token distributions are from exact's."""

from __future__ import annotations

import math

import torch

from kvsem.metrics.base import Observation


class DivergenceMetric:
    """KL divergence in nats, top-1 agreement and perplexity ratio over teacher-forced rows.

    ``quality/kl_first_nats``: KL(exact || arm) over the whole vocabulary at row 0, the last prompt
    position; ``quality/kl_nats`` its mean over all rows; ``quality/top1_agreement`` the share of
    rows with the same most likely token; ``quality/perplexity_ratio`` exp of the mean negative log
    likelihood of exact's greedy tokens under the arm, less that under exact. Summed in float64,
    so that equal logits give 0. NaN where a row that enters is not finite; -inf is allowed for a
    token that both rule out.
    """

    needs_text = False

    def __init__(self) -> None:
        self.higher_is_better = {
            "quality/kl_first_nats": False,
            "quality/kl_nats": False,
            "quality/top1_agreement": True,
            "quality/perplexity_ratio": False,
        }

    def compare(self, exact: Observation, arm: Observation) -> dict[str, float]:
        if not len(exact.logits):
            return {}
        log_exact, log_arm = (torch.log_softmax(o.logits.double(), -1) for o in (exact, arm))
        kl = _kl(log_exact, log_arm)
        agrees = (log_exact.argmax(-1) == log_arm.argmax(-1)).double()
        values = {
            "quality/kl_first_nats": kl[0],
            "quality/kl_nats": kl.mean(),
            # NaN in a row makes its argmax meaningless: it must not count as agreement
            "quality/top1_agreement": torch.where(kl.isnan(), kl, agrees).mean(),
        }
        if exact.greedy:
            rows = torch.arange(min(len(kl), len(exact.greedy)), device=kl.device)
            tokens = torch.tensor(exact.greedy, device=kl.device)[: len(rows)]
            more_nats = (log_exact[rows, tokens] - log_arm[rows, tokens]).mean()
            values["quality/perplexity_ratio"] = more_nats.exp()
        return {key: _finite(float(value)) for key, value in values.items()}


def _kl(log_exact: torch.Tensor, log_arm: torch.Tensor) -> torch.Tensor:
    """KL(exact || arm) a row, in nats; float64 ``[rows]``."""
    probability = log_exact.exp()
    terms = probability * (log_exact - log_arm)
    return torch.where(probability == 0, 0, terms).sum(-1).clamp(min=0)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan
