"""Kriging: recompute a few tokens, and carry what they tell over to all the others."""

import torch

from kvsem.errors import check_range
from kvsem.recompute.base import Needs, Spread, State

# Covariance of the key deviations of two reused tokens, as a share of their variance: what two
# tokens of a prompt, of a chunk, and of a neighbourhood have in common. Between what
# experiments/rules/field.py finds on MuSiQue behind the system prompt and in company.
PROMPT, CHUNK = 0.1, 0.1
NEAR, FAR = (0.2, 8.0), (0.25, 100.0)  # share, tokens
OWN = 0.35  # what a token shares with no other


class KrigeRecompute:
    """Deviation of reused KV is a smooth field along the text: sample it and interpolate. Ours.

    Of round(ratio x matched) recomputed tokens the share ``heads`` are the first ones of each
    chunk, evenly over chunks, as in EPIC; the others stand evenly spaced. At each layer the
    difference between fresh and reused KV of the spaced ones is carried over to every token that
    is not recomputed, before anything attends over it, so that the samples of the next layer are
    taken over corrected KV. Weights are those of simple kriging (the best linear predictor of a
    field with the covariance above; Matheron 1963), keys are compared as they would be at
    position 0. Heads are no samples: what a chunk's beginning is off by is not carried over. The
    choice needs neither a pass of the question nor layers in full.
    """

    needs = Needs()

    def __init__(self, ratio: float = 0.1, heads: float = 0.5) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        check_range("recompute.heads", heads, 0.0, 1.0)
        self.ratio, self.heads = ratio, heads

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if state.previous is not None:
            return state.previous
        heads = self._heads(state)
        return heads | self._samples(state, heads)

    def _heads(self, state: State) -> torch.Tensor:
        """The first tokens of each chunk, then the second ones, and so on."""
        rank = torch.zeros(state.n_tokens)
        for start, end in state.chunks:
            rank[start:end] = state.matched[start:end].cumsum(0).float()
        return state.best(-rank, int(self.heads * state.budget(self.ratio)))

    def _samples(self, state: State, heads: torch.Tensor) -> torch.Tensor:
        """Evenly spaced among the other matched tokens."""
        at = (state.matched & ~heads).nonzero()[:, 0]
        n = min(state.budget(self.ratio) - int(heads.sum()), len(at))
        chosen = state.nothing()
        chosen[at[(2 * torch.arange(n) + 1) * len(at) // (2 * max(1, n))]] = True
        return chosen

    def spread(self, state: State) -> Spread | None:
        assert state.previous is not None
        sources = self._samples(state, self._heads(state)).nonzero()[:, 0]
        targets = (state.matched & ~state.previous).nonzero()[:, 0]
        if not len(sources):
            return None
        chunk = torch.full((state.n_tokens,), -1)
        for i, (start, end) in enumerate(state.chunks):
            chunk[start:end] = i
        among = _covariance(sources, sources, chunk)
        among.diagonal().add_(OWN)
        weights = torch.linalg.solve(among, _covariance(sources, targets, chunk)).T
        return Spread(sources, targets, weights.float().contiguous())


def _covariance(a: torch.Tensor, b: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
    """fp64 ``[a, b]``, without what a token shares with no other."""
    distance = (a[:, None] - b[None]).abs().double()
    within = CHUNK + sum(share * torch.exp(-distance / reach) for share, reach in (NEAR, FAR))
    return PROMPT + within * (chunk[a][:, None] == chunk[b][None])
