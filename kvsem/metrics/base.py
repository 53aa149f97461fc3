"""A metric compares an arm's answer with exact's."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Observation:
    """What the harness keeps of one arm on one request.

    ``logits``: fp32 ``[steps, vocab]``, row 0 at the last prompt position, row i after exact's
    i-th greedy token (teacher-forced). ``keys``/``values``: per layer fp32 ``[kv_heads, sampled
    tokens, head_dim]`` at the same prompt positions for every arm (None where the arm's prompt
    has other positions).
    """

    logits: torch.Tensor
    # the arm's own greedy tokens, as many as exact's; up to the first other one without a text
    greedy: tuple[int, ...]
    text: str | None  # the greedy text up to the end token; None: no metric needs it
    answers: tuple[str, ...]
    answer_nll_nats: float | None  # mean over the tokens of the first reference answer
    keys: tuple[torch.Tensor, ...] | None = None
    values: tuple[torch.Tensor, ...] | None = None


class Metric(Protocol):
    """``needs_text`` is an optional attribute: False, where neither an arm's text nor its greedy
    tokens behind the first that differs are looked at. Absent, it is True."""

    higher_is_better: dict[str, bool]  # by key

    def compare(self, exact: Observation, arm: Observation) -> dict[str, float]:
        """Values by stable key (``quality/…``); a key that cannot be computed is left out."""
        ...
