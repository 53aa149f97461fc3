"""One prompt against a cache: which class every token falls into, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from rich.table import Table
from rich.text import Text

from kvsem.diagnose import Divergence, diagnose_turn, token_text
from kvsem.engine import Engine, final_provenance
from kvsem.prompt import Prompt
from kvsem.types import CACHEABLE, Chunk, Match, Message, Provenance, Request, Segment

ASKED = {("user", "assistant"), ("tool", "assistant")}
CLASSES = ("prefix", "chunk", "semantic", "recomputed", "new")
REASONS = {
    "": "all of it that may be reused comes from prefix pages; the last token is always computed",
    "unknown": "no cached prompt begins like this one",
    "diverged": "the cached prompt ends there, or goes on otherwise",
    "evicted": "the next page was there, and was evicted",
    "old_version": "what is there belongs to another version of the model",
    "below_page_size": "what is left does not fill a page",
    "collision": "a page of this hash holds other tokens",
    "pool_full": "the pool has no room for more",
}


@dataclass(frozen=True)
class Part:
    """Neighbouring tokens of one kind: a chunk, or what no cache may cover. ``counts`` by class."""

    kind: str
    text: str
    start: int
    tokens: int
    match: str
    counts: Mapping[str, int]
    score: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Explanation:
    """``counts`` add up to ``n_tokens``.

    ``served``: the rule has run, so that ``recomputed`` is what was really computed afresh.
    ``turn_before``: how a conversation goes on from the turn before and its reply, if there is one.
    """

    request: str
    n_tokens: int
    counts: Mapping[str, int]
    parts: tuple[Part, ...]
    n_paged: int
    prefix_ends: str
    next_token: str
    served: bool
    turn_before: Divergence | None = None


def explain(engine: Engine, request: Request, serve: bool = False) -> Explanation:
    """What ``engine`` would reuse of ``request``; with ``serve`` it is prefilled, and left out of
    the cache again."""
    prompt = engine.render(request)
    serve = serve and _can_serve(engine)
    if serve:
        done = engine.prefill(request)
        plan, provenance = done.plan, final_provenance(done.plan, done.computed)
        engine.drop(done)
    else:
        plan = engine.plan(request)
        provenance = plan.provenance
    parts = tuple(_parts(prompt, list(zip(plan.chunks, plan.matches, strict=True)), provenance))
    before = turn_before(request)
    return Explanation(
        request.id,
        plan.n_tokens,
        _counts(provenance),
        parts,
        plan.n_paged,
        REASONS.get(plan.miss, plan.miss),
        token_text(engine.lm.tokenizer, int(prompt.ids[plan.n_paged])),
        serve,
        diagnose_turn(engine.lm.tokenizer, before, request) if before else None,
    )


def turn_before(request: Request) -> Request | None:
    """The same conversation when its last turn but one was asked; None where there is none."""
    roles = [message.role for message in request.messages]
    asked = [i for i, pair in enumerate(pairwise(roles)) if pair in ASKED]
    if not asked:
        return None
    last = request.messages[asked[-1]]
    question = Message(last.role, (Segment("question", last.content),))
    return replace(request, messages=(*request.messages[: asked[-1]], question))


def warm(engine: Engine, request: Request, ingest: list[str | Request]) -> None:
    """Fill the cache: ``ingest``, the request's own donors, and the turn before it, served."""
    texts = [text for text in ingest if isinstance(text, str)]
    if texts:
        engine.ingest(texts, system=request.system)
    records = [record for record in ingest if isinstance(record, Request)]
    records += [request] if request.donors else []
    if records:
        engine.ingest([replace(record, tenant=request.tenant) for record in records])
    before = turn_before(request)
    if before and _can_serve(engine):
        engine.leave(engine.prefill(before))


def _can_serve(engine: Engine) -> bool:
    """Not where plain transformers answers, with nothing reused."""
    return not engine.lm.hooked or engine.lm.resumes


# Parts of a prompt ----------------------------------------------------------------------------


def _parts(
    prompt: Prompt, matched: list[tuple[Chunk, Match]], provenance: np.ndarray
) -> Iterator[Part]:
    """Chunks and what lies between them: every token of the prompt in exactly one part."""
    at = 0
    for chunk, match in sorted(matched, key=lambda pair: pair[0].start):
        yield from _between(prompt, at, chunk.start, provenance)
        counts = _counts(provenance[chunk.start : chunk.end])
        yield Part(
            chunk.kind,
            chunk.text,
            chunk.start,
            chunk.end - chunk.start,
            match.kind,
            counts,
            match.score,
            match.reason,
        )
        at = chunk.end
    yield from _between(prompt, at, len(prompt.ids), provenance)


def _between(prompt: Prompt, start: int, end: int, provenance: np.ndarray) -> Iterator[Part]:
    """The question, and what the chat template adds."""
    kinds = ["template"] * len(prompt.ids)
    for piece in prompt.pieces:
        kind = "other" if piece.kind in CACHEABLE else piece.kind
        kinds[piece.start : piece.end] = [kind] * (piece.end - piece.start)
    while start < end:
        stop = next((i for i in range(start, end) if kinds[i] != kinds[start]), end)
        first, last = prompt.offsets[start][0], prompt.offsets[stop - 1][1]
        text = prompt.text[first:last]
        counts = _counts(provenance[start:stop])
        match = "prefix" if counts["prefix"] == stop - start else "none"
        yield Part(kinds[start], text, start, stop - start, match, counts)
        start = stop


def _counts(provenance: np.ndarray) -> dict[str, int]:
    return {name: int((provenance == Provenance[name.upper()]).sum()) for name in CLASSES}


# Table ----------------------------------------------------------------------------------------


def table(found: Explanation) -> Table:
    """A row per part, and the sums, which are the prompt's tokens."""
    names = [name for name in CLASSES if name != "recomputed" or found.served]
    grid = Table(box=None, pad_edge=False, show_footer=True, footer_style="bold")
    grid.add_column("part", "all", no_wrap=True)
    grid.add_column("class", no_wrap=True)
    grid.add_column("tokens", str(found.n_tokens), justify="right")
    for name in names:
        grid.add_column(name, str(found.counts[name]), justify="right")
    grid.add_column("score", justify="right")
    grid.add_column("reason", overflow="fold")
    grid.add_column("text", no_wrap=True, max_width=36)
    for part in found.parts:
        cells = [str(part.counts[name] or "·") for name in names]
        score = "" if part.score is None else f"{part.score:.3f}"
        text = Text(" ".join(part.text.split()), overflow="ellipsis")
        cells = [part.match, str(part.tokens), *cells, score]
        grid.add_row(part.kind, *cells, Text(part.reason), text)
    return grid


def sentences(found: Explanation) -> Iterator[str]:
    """Where the exact prefix ends and why, and how the turn before goes on."""
    where = f"token {found.n_paged}, ahead of {found.next_token!r}"
    yield f"prefix pages end at {where}: {found.prefix_ends}"
    behind = found.counts["prefix"] - found.n_paged
    if behind > 0:
        yield f"{behind} tokens behind them are exact too: passages computed in just this context"
    if found.turn_before is not None:
        yield f"from the turn before and its reply, this prompt {found.turn_before}"
