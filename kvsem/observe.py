"""Reading an arm's quality off the KV that was timed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from kvsem.engine import Prefilled
from kvsem.lm import LM
from kvsem.metrics.base import Observation
from kvsem.prompt import Prompt
from kvsem.types import CACHEABLE, Request

STEPS = 16  # tokens of exact's greedy continuation on which distributions are compared
SAMPLED = 256  # at most so many prompt positions on which KV is compared


class Observer:
    """Decodes and scores behind a prefilled prompt, and leaves the prompt's KV as it was."""

    def __init__(self, lm: LM, decodes: bool = True) -> None:
        self.lm, self.decodes = lm, decodes

    def room(self, request: Request) -> int:
        """Tokens that observing ``request`` appends to its KV at most."""
        answer = len(self._answer(request, request.answers[0])) if request.answers else 0
        return max(STEPS, answer)

    def observe(
        self, done: Prefilled, continuation: tuple[int, ...] | None
    ) -> tuple[Observation, float]:
        """What the arm says, and its decode time per token.

        ``continuation``: exact's greedy tokens, on which distributions are compared; None for
        exact itself, whose own tokens they are. Where the observer does not decode, there is no
        text of other arms, and no time (NaN).
        """
        n = done.plan.n_tokens
        if continuation is None:
            greedy, decode_ms = self._decode([done.first], done)
            logits = self._follow(greedy, done)
            done.kv.truncate_to(n)
        else:
            logits = self._follow(continuation, done)
            greedy, decode_ms = tuple(_agreed(logits, continuation)), float("nan")
            if self.decodes:
                greedy, decode_ms = self._decode(greedy, done)
            done.kv.truncate_to(n)
        nll = self._answer_nll(done)
        at = torch.from_numpy(sampled(done.prompt)).to(self.lm.device)
        read = [done.kv.read(layer, n) for layer in range(self.lm.n_layers)]
        keys = tuple(k[0].index_select(1, at).float().cpu() for k, _ in read)
        values = tuple(v[0].index_select(1, at).float().cpu() for _, v in read)
        text = self._text(greedy) if self.decodes or continuation is None else None
        seen = Observation(logits, greedy, text, done.request.answers, nll, keys, values)
        return seen, decode_ms

    def _follow(self, tokens: Sequence[int], done: Prefilled) -> torch.Tensor:
        """fp32 ``[len(tokens), vocab]``: the distribution ahead of each token, whose KV stays."""
        followed = self.lm.extend(tokens[:-1], done.kv)
        return torch.cat([done.logits[None], followed]).cpu()

    def _decode(self, known: Sequence[int], done: Prefilled) -> tuple[tuple[int, ...], float]:
        """The `STEPS` greedy tokens, of which the first are known and all but the last of these
        in the KV; and the time per token, of one step at least."""
        known = known[: STEPS - 1]  # something is left to be timed
        done.kv.truncate_to(done.plan.n_tokens + len(known) - 1)
        start = time.perf_counter()
        rest = self.lm.decode(known[-1], done.kv, STEPS + 1 - len(known))
        decode_ms = (time.perf_counter() - start) * 1e3 / (len(rest) - 1)
        done.kv.truncate_to(done.plan.n_tokens)
        return (*known[:-1], *rest), decode_ms

    def _text(self, tokens: Sequence[int]) -> str:
        """The answer up to the end token."""
        stop = next((i for i, t in enumerate(tokens) if t in self.lm.stop_tokens), len(tokens))
        text: str = self.lm.tokenizer.decode(list(tokens[:stop]), skip_special_tokens=True)
        return text.strip()

    def _answer(self, request: Request, answer: str) -> list[int]:
        lead = "" if request.messages and self.lm.tokenizer.chat_template else " "
        ids: list[int] = self.lm.tokenizer(lead + answer, add_special_tokens=False)["input_ids"]
        return ids

    def _answer_nll(self, done: Prefilled) -> float | None:
        """Mean negative log likelihood (nats per token) of the first reference answer."""
        ids = self._answer(done.request, done.request.answers[0]) if done.request.answers else []
        if not ids:
            return None
        rows = [done.logits[None]]
        if len(ids) > 1:
            rows.append(self.lm.extend(ids[:-1], done.kv))
            done.kv.truncate_to(done.plan.n_tokens)
        log_probs = torch.cat(rows).double().log_softmax(-1)
        picked = log_probs[torch.arange(len(ids)), torch.tensor(ids, device=log_probs.device)]
        return float(-picked.mean())


def _agreed(logits: torch.Tensor, continuation: Sequence[int]) -> list[int]:
    """The greedy tokens that ``logits`` along ``continuation`` tell: up to the first other one."""
    own: list[int] = logits.argmax(-1).tolist()
    same = [a == b for a, b in zip(own, continuation, strict=True)]
    return own[: same.index(False) + 1] if False in same else own


def sampled(prompt: Prompt) -> np.ndarray:
    """At most `SAMPLED` evenly spaced positions of the cacheable tokens, int64."""
    spans = [np.arange(p.start, p.end) for p in prompt.pieces if p.kind in CACHEABLE]
    positions = np.concatenate(spans) if spans else np.arange(len(prompt.ids))
    if len(positions) <= SAMPLED:
        return positions
    return positions[np.linspace(0, len(positions) - 1, SAMPLED).round().astype(np.int64)]
