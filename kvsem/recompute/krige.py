"""Kriging: recompute a few tokens, and carry what they tell over to all the others."""

import torch

from kvsem.errors import check_range
from kvsem.recompute.base import Needs, Spread, State

# Covariance of the key deviations of two reused tokens, as a share of their variance: what two
# tokens of a prompt, of a chunk, and of a neighbourhood have in common. Measured on MuSiQue.
PROMPT, CHUNK = 0.1, 0.1
NEAR, FAR = (0.2, 8.0), (0.25, 100.0)  # share, tokens
OWN = 0.35  # what a token shares with no other


class KrigeRecompute:
    """Deviation of reused KV is a smooth field along the text: sample it and interpolate. Ours.

    Of round(ratio x matched) recomputed tokens, ``1 - attended`` stand evenly spaced; at each
    layer the difference between their fresh and their reused KV is carried over to every token
    that is not recomputed, before anything attends over it, so that the samples of the next layer
    are taken over corrected KV. Weights are those of simple kriging (the best linear predictor of
    a field with the covariance above; Matheron 1963), keys are compared as they would be at
    position 0. The share ``attended`` are the tokens that the question looks at most (mean over
    the first two thirds of the layers, heads and question tokens); they are no samples: what draws
    attention is not like its neighbours. With ``attended: 0`` no pass of the question is needed.
    """

    def __init__(self, ratio: float = 0.1, attended: float = 0.5) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        check_range("recompute.attended", attended, 0.0, 1.0)
        self.ratio, self.attended = ratio, attended
        self.needs = Needs(question_attention=attended > 0, question_layers=2 / 3)

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if state.previous is not None:
            return state.previous
        budget, samples = state.budget(self.ratio), self._samples(state)
        left = state.matched & ~samples
        rest = budget - int(samples.sum())
        return samples | state.best(state.attention(), rest, left) if rest else samples

    def _samples(self, state: State) -> torch.Tensor:
        """Evenly spaced among the matched tokens."""
        at = state.matched.nonzero()[:, 0]
        n = state.budget(self.ratio)
        n -= int(n * self.attended)
        chosen = state.nothing()
        chosen[at[(2 * torch.arange(n) + 1) * len(at) // (2 * max(1, n))]] = True
        return chosen

    def spread(self, state: State) -> Spread | None:
        assert state.previous is not None
        sources = self._samples(state).nonzero()[:, 0]
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
