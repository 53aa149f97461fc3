"""A recompute rule says which reused tokens are computed afresh, layer by layer."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Needs:
    """What a rule asks of the prefill beyond the token sets.

    ``fresh_layers``: layers whose reused K/V are kept beside the fresh ones (see `State`).
    ``question_attention``: the question is run once over the assembled cache beforehand.
    """

    fresh_layers: tuple[int, ...] = ()
    question_attention: bool = False


@dataclass
class State:
    """What a rule may look at. Token axes have the prompt's length ``n_tokens``.

    ``reused[l]`` and ``fresh[l]``: (keys, values), each ``[kv_heads, n_tokens, head_dim]``, for
    the layers in ``Needs.fresh_layers``; ``fresh`` is filled once layer l has run.
    """

    n_tokens: int
    matched: torch.Tensor  # bool [n_tokens], reused approximately (never exact prefix)
    new: torch.Tensor  # bool [n_tokens], computed in any case
    chunks: list[tuple[int, int]]  # token spans of the matched chunks, in order
    seed: int = 0
    previous: torch.Tensor | None = None  # what the rule chose at the layer before
    reused: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    question_attention: torch.Tensor | None = None  # fp32 [layers, n_tokens], mean over heads, rows

    def nothing(self) -> torch.Tensor:
        """bool ``[n_tokens]``, all False: the empty choice."""
        return torch.zeros(self.n_tokens, dtype=torch.bool)

    def budget(self, ratio: float) -> int:
        """How many matched tokens ``ratio`` of them is: rounded, at least 1 where ratio > 0."""
        n = int(self.matched.sum())
        return min(n, max(1, round(ratio * n))) if ratio > 0 and n else 0


class Recompute(Protocol):
    """``needs`` (`Needs`) is an optional attribute: absent, the rule needs nothing."""

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        """bool ``[n_tokens]`` on the CPU: matched tokens computed at ``layer``; a subset of the
        layer before. Asked once per layer, in order, just before the layer runs."""
        ...


@runtime_checkable
class Adjusts(Protocol):
    """Optional second verb of a rule: change the reused KV before the forward."""

    def adjust(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[kv_heads, matched tokens, head_dim]`` each, already moved → what is used instead."""
        ...
