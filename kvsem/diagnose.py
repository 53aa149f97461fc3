"""Why a turn does not continue the one before it: where the tokens part, and what stands there.

A chat template may rewrite history: thoughts are stripped, replies trimmed, a date moves on. And
the ids that a model sampled need not be those that its text is cut into (QwenLM/Qwen3#1826,
ggml-org/llama.cpp PR 26398). Exact reuse ends at the first token that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsem.prompt import render
from kvsem.types import Request


@dataclass(frozen=True)
class Divergence:
    """``n_common``: leading tokens that agree, and so the position of the first that does not.

    ``before`` and ``now``: the text of that token in the earlier and in the later sequence; None
    where a sequence is over.
    """

    n_common: int
    n_earlier: int
    before_id: int | None
    now_id: int | None
    before: str | None
    now: str | None

    @property
    def is_prefix(self) -> bool:
        """Whether the later sequence continues the whole earlier one."""
        return self.n_common == self.n_earlier

    def __str__(self) -> str:
        if self.is_prefix:
            return f"continues all {self.n_earlier} tokens"
        now = "the end" if self.now is None else repr(self.now)
        return f"parts at token {self.n_common} of {self.n_earlier}: {self.before!r} became {now}"


def diagnose(
    tokenizer: Any, earlier: Sequence[int] | np.ndarray, later: Sequence[int] | np.ndarray
) -> Divergence:
    """Where the token ids ``later`` stop being those of ``earlier``."""
    before, now = np.asarray(earlier, dtype=np.int64), np.asarray(later, dtype=np.int64)
    n = min(len(before), len(now))
    differ = np.flatnonzero(before[:n] != now[:n])
    at = int(differ[0]) if len(differ) else n
    old, new = (int(x[at]) if at < len(x) else None for x in (before, now))
    texts = [None if token is None else token_text(tokenizer, token) for token in (old, new)]
    return Divergence(at, len(before), old, new, texts[0], texts[1])


def token_text(tokenizer: Any, token: int) -> str:
    """The text of one token; its name in the vocabulary where it is part of a character."""
    text: str = tokenizer.decode([token])
    return tokenizer.convert_ids_to_tokens(token) if not text or "\ufffd" in text else text


def turns(requests: Iterable[Request]) -> Iterator[tuple[Request, Request]]:
    """Every turn with the one before it: the longest earlier request that its messages begin
    with."""
    seen: dict[tuple[str, ...], Request] = {}
    for request in requests:
        key = (request.tenant, *(part for m in request.messages for part in (m.role, m.content)))
        for n in range(len(request.messages) - 1, 0, -1):
            if earlier := seen.get(key[: 1 + 2 * n]):
                yield earlier, request
                break
        if request.messages:
            seen[key] = request


def diagnose_turn(tokenizer: Any, earlier: Request, later: Request) -> Divergence:
    """How ``later`` continues ``earlier`` and the reply that it recorded, fed as it is written."""
    ids = render(tokenizer, earlier).ids.tolist()
    reply = later.messages[len(earlier.messages)]
    if reply.role == "assistant":
        lead = "" if getattr(tokenizer, "chat_template", None) else " "  # behind "Answer:"
        ids += tokenizer(lead + reply.content, add_special_tokens=False)["input_ids"]
    return diagnose(tokenizer, ids, render(tokenizer, later).ids)


def turn_notes(tokenizer: Any, requests: Iterable[Request]) -> list[str]:
    """One line where turns part from those before them: how many, and the first; else nothing."""
    pairs = list(turns(requests))
    found = ((pair, diagnose_turn(tokenizer, *pair)) for pair in pairs)
    parted = [(pair, how) for pair, how in found if not how.is_prefix]
    if not parted:
        return []
    (earlier, later), how = parted[0]
    return [
        f"{len(parted)} of {len(pairs)} later turns do not continue the turn before and its "
        f"reply; {later.id} from {earlier.id} {how}"
    ]
