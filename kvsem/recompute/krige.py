"""Kriging: recompute a few tokens, and carry what they tell over to all the others."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from kvsem.errors import check_range
from kvsem.recompute.base import Needs, State

# Covariance of the deviations of two reused tokens of a chunk, as a share of a token's variance:
# what a chunk and what a neighbourhood have in common. Between what experiments/rules/field.py
# finds on MuSiQue behind the system prompt and in company.
CHUNK = 0.1
NEAR, FAR = (0.2, 8.0), (0.25, 100.0)  # share, tokens
OWN = 0.35  # what a token shares with no other
OWN_HEAD = 4.0  # the same of a chunk's first tokens, whose deviations are larger and their own
LONG, APART = 32, 0.3  # tokens of a run, and share of what is ahead of them that only one of prompt
# and donor has: from there on they stand behind another text, and not behind the same one edited
BLOCK = 256  # tokens that are interpolated at a time

Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, which sources, weights


class KrigeRecompute:
    """Deviation of reused KV is a smooth field along the text: sample it and interpolate. Ours.

    Of round(ratio x matched) recomputed tokens the share ``heads`` are the first ones of each
    chunk, evenly over chunks, as in EPIC; the others stand evenly spaced. At each layer the
    difference between fresh and reused KV of all of them is carried over to every token that is
    not recomputed, before anything attends over it, so that the next layer's differences are
    taken over corrected KV; keys are compared as they would be at position 0. The weights are
    those of kriging (the best linear predictor of a field with the covariance above; Matheron
    1963) within each chunk, around a mean of the whole prompt. How much the prompt has in common
    depends on where the donors were computed and on the layer, so it is estimated anew for K and
    for V of each layer, from the samples. Heads count for little, but they count. The choice
    needs neither a pass of the question nor layers in full.

    Behind an edit the deviation starts large and fades, it is no field with one mean: where a
    similar chunk stands behind nearly what its donor stood behind, the first tokens behind each
    edit are recomputed and nothing is interpolated. A long run behind much that one of the two
    has not (a section left out or put in, other passages) is treated as a chunk of its own.
    """

    needs = Needs()

    def __init__(self, ratio: float = 0.06, heads: float = 0.6) -> None:
        check_range("recompute.ratio", ratio, 0.0, 1.0)
        check_range("recompute.heads", heads, 0.0, 1.0)
        self.ratio, self.heads = ratio, heads

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        if state.previous is not None:
            return state.previous
        _, behind, heads, samples = self._choose(state)
        return behind | heads | samples

    def spread(self, state: State) -> Kriging | None:
        edited, _, heads, samples = self._choose(state)
        reused = state.matched & ~edited & ~heads & ~samples
        at = reused.nonzero()[:, 0]
        if not len(at) or not bool(samples.any()):
            return None
        span = slice(int(at[0]), int(at[-1]) + 1)
        return Kriging.of(heads, samples, reused, span, state.runs or state.chunks)

    def _choose(
        self, state: State
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens of an edited text and which of them are recomputed; heads and samples of others.

        Each gets as much of the budget as it has of the matched tokens.
        """
        edited, budget = _edited(state), state.budget(self.ratio)
        n_edited = round(int(edited.sum()) / max(1, int(state.matched.sum())) * budget)
        n, same = budget - n_edited, state.matched & ~edited
        heads = state.best(-_rank(same, state), int(self.heads * n), same)
        at = (same & ~heads).nonzero()[:, 0]
        n = min(n - int(heads.sum()), len(at))
        samples = state.nothing()
        samples[at[(2 * torch.arange(n) + 1) * len(at) // (2 * max(1, n))]] = True
        return edited, _behind_edits(edited, n_edited, state), heads, samples


def _edited(state: State) -> torch.Tensor:
    """bool ``[n_tokens]``: of similar chunks, and behind nearly what their donors stood behind."""
    if state.similar is None or state.apart is None:
        return state.nothing()
    edited = state.matched & state.similar
    for start, end in state.runs:
        if end - start >= LONG and float(state.apart[start:end].mean()) >= APART:
            edited[start:end] = False
    return edited


def _rank(among: torch.Tensor, state: State) -> torch.Tensor:
    """1 for the first token of each run, 2 for the second, and so on; int64 ``[n_tokens]``."""
    rank = torch.zeros(state.n_tokens, dtype=torch.long)
    for start, end in state.runs or state.chunks:
        rank[start:end] = among[start:end].cumsum(0)
    return rank


def _behind_edits(edited: torch.Tensor, n: int, state: State) -> torch.Tensor:
    """The first tokens of each run, then the second ones, and so on, ``n`` in all; where not every
    run has its turn any more, evenly over them."""
    rank = _rank(edited, state)
    last = int((rank[edited].bincount().cumsum(0) <= n).sum())  # where not every run has its turn
    chosen = edited & (rank < last)
    at = (edited & (rank == last)).nonzero()[:, 0]
    left = n - int(chosen.sum())
    chosen[at[torch.arange(left) * len(at) // max(1, left)]] = True
    return chosen


@dataclass(frozen=True)
class Kriging:
    """Recomputed tokens tell reused ones what they are off by (`kvsem.recompute.base.Spread`).

    Block by block, of at most `BLOCK` tokens of one chunk, those of about one size together:
    ``weights`` fp32 ``[blocks, tokens, sources of the chunk + 1]``, padded with zeros, the last for
    the prompt's mean; ``pick`` says which deviation each stands for, ``place`` where each token of
    ``span`` is found. ``mean``: fp32 ``[sources]``, the mean's weights, up to a factor.
    ``samples``: fp32 ``[chunks, sources]``, 1 where the source is a sample of the chunk.
    """

    sources: torch.Tensor
    span: slice
    weights: tuple[torch.Tensor, ...]
    pick: tuple[torch.Tensor, ...]
    place: torch.Tensor
    mean: torch.Tensor
    samples: torch.Tensor

    @classmethod
    def of(
        cls,
        heads: torch.Tensor,
        samples: torch.Tensor,
        reused: torch.Tensor,
        span: slice,
        chunks: list[tuple[int, int]],
    ) -> Kriging:
        sources = (heads | samples).nonzero()[:, 0]
        mean, sampled = torch.zeros(len(sources)), torch.zeros(len(chunks), len(sources))
        blocks: list[Block] = []
        for row, (start, end) in zip(sampled, chunks, strict=True):
            own = ((sources >= start) & (sources < end)).nonzero()[:, 0]
            at = sources[own]
            among = _covariance(at, at)
            among.diagonal().add_(torch.where(heads[at], OWN_HEAD, OWN))
            for tokens in torch.split(torch.arange(start, end)[reused[start:end]], BLOCK):
                towards = _covariance(at, tokens)
                weights = torch.linalg.solve(among, towards)
                left = 1 - weights.sum(0, keepdim=True)
                blocks.append((tokens, own, torch.cat([weights, left]).T.float()))
            mean[own] = torch.linalg.solve(among, torch.ones_like(at, dtype=torch.float64)).float()
            row[own] = samples[at].float()
        return cls(sources, span, *_padded(blocks, span, len(sources)), mean, sampled)

    def to(self, device: torch.device) -> Kriging:
        weights, pick = (
            tuple(tensor.to(device) for tensor in own) for own in (self.weights, self.pick)
        )
        rest = (tensor.to(device) for tensor in (self.place, self.mean, self.samples))
        return Kriging(self.sources.to(device), self.span, weights, pick, *rest)

    @property
    def per_column(self) -> int:
        weights = sum(own.numel() for own in self.weights)
        return weights + self.samples.numel() + len(self.mean)

    def carry(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        known = torch.cat([keys, values], dim=1)
        mean = torch.cat([self._mean(keys), self._mean(values)])
        told = torch.cat([known, mean[None]])
        parts = [
            torch.bmm(weights, told[pick].view(len(weights), -1, len(mean))).flatten(0, 1)
            for weights, pick in zip(self.weights, self.pick, strict=True)
        ]
        carried = torch.cat(parts)[self.place]
        return carried[:, : keys.shape[1]], carried[:, keys.shape[1] :]

    def _mean(self, deviations: torch.Tensor) -> torch.Tensor:
        """The prompt's, nearer to zero the less its chunks agree: ``common`` is the mean product
        of samples of two chunks as a share of their mean square."""
        sums, sizes = self.samples @ deviations, self.samples.sum(1)
        pairs = sizes.sum() ** 2 - sizes.square().sum()
        across = (sums.sum(0).square().sum() - sums.square().sum()) / pairs.clamp_min(1)
        square = (self.samples.sum(0) @ deviations.square()).sum() / sizes.sum()
        common = (across / square.clamp_min(torch.finfo(square.dtype).tiny)).clamp(0, 1)
        return common / (1 + common * self.mean.sum()) * (self.mean @ deviations)


def _padded(
    blocks: list[Block], span: slice, n_sources: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor]:
    """`Kriging`'s weights, pick and place. The row behind a block's last token is all zero."""
    alike: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for tokens, own, of_block in blocks:
        size = len(tokens).bit_length(), len(own).bit_length()
        alike[size].append((tokens, own, of_block))
    place = torch.full((span.stop - span.start,), -1)
    all_weights, all_pick, first = [], [], 0
    for group in alike.values():
        height = max(len(tokens) for tokens, *_ in group) + 1
        width = max(len(own) for _, own, _ in group) + 1
        weights = torch.zeros(len(group), height, width)
        pick = torch.full((len(group), width), n_sources)
        for i, (tokens, own, of_block) in enumerate(group):
            weights[i, : len(tokens), : len(own)] = of_block[:, :-1]
            weights[i, : len(tokens), -1] = of_block[:, -1]
            pick[i, : len(own)] = own
            place[tokens - span.start] = first + i * height + torch.arange(len(tokens))
        all_weights.append(weights)
        all_pick.append(pick.flatten())
        first += len(group) * height
    place[place < 0] = first - 1
    return tuple(all_weights), tuple(all_pick), place


def _covariance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fp64 ``[a, b]``, of tokens of one chunk, without what a token shares with no other."""
    distance = (a[:, None] - b[None]).abs().double()
    within = torch.full_like(distance, CHUNK)
    for share, reach in (NEAR, FAR):
        within += share * torch.exp(-distance / reach)
    return within
