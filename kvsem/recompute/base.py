"""A recompute rule says which reused tokens are computed afresh, layer by layer."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Needs:
    """What a rule asks of the prefill beyond the token sets; all of it is in the cost.

    ``fresh_layers``: layers whose reused K/V are kept beside the fresh ones (see `State`).
    ``question_attention``: the question is run once over the assembled cache beforehand.
    ``watch``: the question's attention in the forward itself, layer by layer (`State.watched`).
    ``sweeps``: forwards over the prompt, each of which finds the KV as the one before left it, and
    the attention that the question paid it.
    ``exact``: the prompt is computed exactly beside it: for oracles, which no request can afford.
    """

    fresh_layers: tuple[int, ...] = ()
    question_attention: bool = False
    watch: bool = False
    sweeps: int = 1
    exact: bool = False


@dataclass
class State:
    """What a rule may look at. Token axes have the prompt's length ``n_tokens``.

    ``reused[l]`` and ``fresh[l]``: (keys, values), each ``[kv_heads, n_tokens, head_dim]``, for
    the layers in ``Needs.fresh_layers``; ``fresh`` is filled once layer l has run. Attention is
    the question's (the tokens behind the last matched one), fp32, mean over heads and question
    tokens.
    """

    n_tokens: int
    matched: torch.Tensor  # bool [n_tokens], reused approximately (never exact prefix)
    new: torch.Tensor  # bool [n_tokens], computed in any case
    chunks: list[tuple[int, int]]  # token spans of the matched chunks, in order
    runs: list[tuple[int, int]] = field(default_factory=list)  # spans that also stood together in
    # their donor, in order: of an identical chunk one, of a similar one those between its edits
    similar: torch.Tensor | None = None  # bool [n_tokens], matched in a chunk that is not identical
    apart: torch.Tensor | None = None  # fp32 [n_tokens], in similar chunks: of what stands ahead of
    # the token, here and in its donor, the share that only one of the two has, 0 to 1; of passages
    # ahead that both have in other places nothing is known, they count as two
    seed: int = 0
    n_layers: int = 0
    previous: torch.Tensor | None = None  # what the rule chose at the layer before
    reused: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    question_attention: torch.Tensor | None = None  # [layers, n_tokens], of the pass before
    watched: list[torch.Tensor] = field(default_factory=list)  # [n_tokens] by layer, this forward
    sweep: int = 0
    repaired: torch.Tensor | None = None  # bool [n_tokens], recomputed in sweeps before
    kv_error: torch.Tensor | None = None  # fp32 [layers, n_tokens], ||reused - exact||, for oracles

    def nothing(self) -> torch.Tensor:
        """bool ``[n_tokens]``, all False: the empty choice."""
        return torch.zeros(self.n_tokens, dtype=torch.bool)

    def budget(self, ratio: float) -> int:
        """How many matched tokens ``ratio`` of them is: rounded, at least 1 where ratio > 0."""
        n = int(self.matched.sum())
        return min(n, max(1, round(ratio * n))) if ratio > 0 and n else 0

    def attention(self) -> torch.Tensor:
        """``question_attention``, mean over layers: fp32 ``[n_tokens]``."""
        assert self.question_attention is not None
        return self.question_attention.mean(0)

    def deviation(self, layer: int, which: str = "value", power: int = 2) -> torch.Tensor:
        """How far fresh K or V of each token is from what was reused at ``layer``: the sum over
        KV heads and head_dim of ``|fresh - reused| ** power``, fp32 ``[n_tokens]`` on the CPU."""
        at = 1 if which == "value" else 0
        difference = self.fresh[layer][at].float() - self.reused[layer][at].float()
        return difference.abs().pow(power).sum(dim=(0, 2)).cpu()

    def best(self, score: torch.Tensor, n: int, among: torch.Tensor | None = None) -> torch.Tensor:
        """bool ``[n_tokens]``: the ``n`` tokens of ``among`` (None: the matched ones) that score
        highest, by fp32 ``[n_tokens]``. Ties, and what is not a number, go to the earlier token."""
        at = (self.matched if among is None else among).nonzero()[:, 0]
        order = score.float().cpu()[at].nan_to_num(0.0).argsort(descending=True, stable=True)
        chosen = self.nothing()
        chosen[at[order[:n]]] = True
        return chosen


class Spread(Protocol):
    """Carries the deviation (fresh - reused) of recomputed tokens over to reused ones, at every
    layer, of keys as they would be at position 0.

    ``sources``: int64 ``[sources]``, ascending, tokens that are recomputed at every layer.
    ``span``: the tokens from the first to the last that may change.
    ``per_column``: multiplications of `carry` for each column of K and of V.
    """

    @property
    def sources(self) -> torch.Tensor: ...
    @property
    def span(self) -> slice: ...
    @property
    def per_column(self) -> int: ...

    def to(self, device: torch.device) -> "Spread":
        """Where `carry` is to be computed."""
        ...

    def carry(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Deviations of a layer's K and V, fp32 ``[sources, width]`` each (all KV heads) →
        ``[span, width]`` each, what is added; zero for tokens that are recomputed or new."""
        ...


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


@runtime_checkable
class Spreads(Protocol):
    """Optional third verb: correct reused KV by what recomputed tokens tell of it."""

    def spread(self, state: State) -> Spread | None:
        """Asked once, when the tokens of the first layer are chosen."""
        ...
