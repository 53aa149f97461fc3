"""From a request to canonical tokens, and back to the pieces that a cache may cover.

The rendered prompt is tokenised once and whole, exactly as a plain engine would. Pieces come
from the text and map through the tokenizer's offsets, so that a boundary never cuts a token.
A separator belongs to the piece that follows it; the template ahead of the first user
segment belongs to the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError

from kvsem.errors import DataError, one_line
from kvsem.keys import content_key
from kvsem.types import CACHEABLE, SEPARATOR, Chunk, Kind, Request, Segment, Span

ANSWER = "Answer:"  # where there is no chat template


@dataclass(frozen=True)
class Piece:
    """One located segment: its text in the prompt, and its tokens with what leads up to it."""

    kind: Kind
    text: str
    chars: Span  # of the text itself
    start: int  # first token, separator included
    end: int


@dataclass(frozen=True)
class Prompt:
    """A rendered, tokenised request. ``ids`` int64 ``[n]``, ``offsets`` int64 ``[n, 2]``."""

    text: str
    ids: np.ndarray
    offsets: np.ndarray
    pieces: tuple[Piece, ...]

    @property
    def n_cacheable(self) -> int:
        """Tokens of system, passages, targets and earlier turns (not question, not tail)."""
        return sum(p.end - p.start for p in self.pieces if p.kind in CACHEABLE)


def render(tokenizer: Any, request: Request) -> Prompt:
    """Tokenise ``request`` as a plain engine would and locate its segments.

    Raises `DataError` where nothing is asked.
    """
    contents = [m.content for m in request.messages] if request.text is None else [request.text]
    if not any(content.strip() for content in contents):
        raise DataError(f"request {request.id!r}: the prompt is empty; give messages or a text")
    if request.text is not None:
        text, templated, located = request.text, False, [Segment("passage", request.text)]
        spans = [(located[0], Span(0, len(text)))]
    else:
        text, templated = _template(tokenizer, request)
        spans = _locate(tokenizer, text, request)
    encoded = tokenizer(text, add_special_tokens=not templated, return_offsets_mapping=True)
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id and not offsets[0].any():
        ids, offsets = ids[1:], offsets[1:]  # a text that was rendered elsewhere brings its own
    if not len(ids):
        raise DataError(f"request {request.id!r}: the tokenizer makes no token of its text")
    return Prompt(text, ids, offsets, _pieces(text, offsets, spans, request.text is None))


def _template(tokenizer: Any, request: Request) -> tuple[str, bool]:
    """The rendered text, and whether a chat template (which brings its own BOS) made it."""
    contents = [message.content for message in request.messages]
    if not getattr(tokenizer, "chat_template", None):
        replies = [message.role == "assistant" for message in request.messages]
        said = zip(replies, contents, strict=True)  # as the prompt of that turn went on
        plain = [f"{ANSWER} {content}" if is_reply else content for is_reply, content in said]
        return SEPARATOR.join([*plain, ANSWER]), False
    try:
        return _apply(tokenizer, request, contents), True
    except TemplateError as error:  # as for a system role that the template does not know
        raise DataError(
            f"request {request.id!r}: the chat template refuses it: {one_line(error)}"
        ) from error


def _apply(tokenizer: Any, request: Request, contents: Sequence[str]) -> str:
    pairs = zip(request.messages, contents, strict=True)
    messages = [{"role": message.role, "content": content} for message, content in pairs]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def _locate(tokenizer: Any, text: str, request: Request) -> list[tuple[Segment, Span]]:
    """Character spans of the segments (stripped) in the rendered text, in order.

    A segment that the template rewrote is left out: its tokens are computed.
    """
    spans: list[tuple[Segment, Span]] = []
    cursor = 0
    for message, start in zip(request.messages, _starts(tokenizer, text, request), strict=True):
        found = text.find(message.content.strip(), cursor) if start is None else start
        inside = cursor if found < 0 else found
        for segment in message.segments:
            core = segment.text.strip()
            at = text.find(core, inside)
            if not core or at < 0:
                continue
            inside = cursor = at + len(core)
            spans.append((segment, Span(at, inside)))
    return spans


def _starts(tokenizer: Any, text: str, request: Request) -> list[int | None]:
    """Where each message's content starts, read off a rendering with marks in their place.

    None where the template makes other text of the marks than of the contents.
    """
    marks = [f"\u27e6{i}\u27e7" for i in range(len(request.messages))]
    unknown: list[int | None] = [None] * len(marks)
    if not getattr(tokenizer, "chat_template", None):
        return unknown
    starts: list[int | None] = []
    rest, at = _apply(tokenizer, request, marks), 0
    for message, mark in zip(request.messages, marks, strict=True):
        ahead, found, rest = rest.partition(mark)
        content = message.content.strip()
        begin = text.find(content, at + len(ahead))
        if not found or not text.startswith(ahead, at) or text[at + len(ahead) : begin].strip():
            return unknown
        starts.append(begin)
        at = begin + len(content)
        at += len(text[at:]) - len(text[at:].lstrip()) if not rest[:1].isspace() else 0
    return starts


def _pieces(
    text: str, offsets: np.ndarray, spans: list[tuple[Segment, Span]], head: bool
) -> tuple[Piece, ...]:
    starts = np.maximum.accumulate(offsets[:, 0]) if len(offsets) else offsets[:, 0]

    def token(char: int) -> int:
        return int(np.searchsorted(starts, char))

    pieces: list[Piece] = []
    lead = 0
    if head and spans:
        user = next((span for segment, span in spans if segment.kind != "system"), None)
        lead = user.start if user else len(text)
        first = next((span for segment, span in spans if segment.kind == "system"), Span(0, lead))
        pieces.append(Piece("system", text[first.start : first.end], first, 0, token(lead)))
    for segment, span in spans:
        if segment.kind == "system":
            continue
        core = text[span.start : span.end]
        pieces.append(Piece(segment.kind, core, span, token(lead), token(span.end)))
        lead = span.end
    return tuple(p for p in pieces if p.end > p.start)


def chunks_of(prompt: Prompt, piece: Piece, spans: Sequence[Span], namespace: str) -> list[Chunk]:
    """The chunks of one piece, from the chunker's ``spans`` of its text.

    Spans that hold no token start (or only white space) go to the chunk before them.
    """
    starts = np.maximum.accumulate(prompt.offsets[:, 0])
    chunks: list[Chunk] = []
    first = piece.start
    for i, span in enumerate(spans):
        limit = piece.chars.start + span.end
        end = piece.end if i == len(spans) - 1 else int(np.searchsorted(starts, limit))
        text = piece.text[span.start : span.end].strip()
        if end <= first or not text:
            continue
        begin = piece.chars.start + span.start + piece.text[span.start : span.end].index(text)
        core = Span(begin, begin + len(text))
        chunks.append(_chunk(prompt, piece.kind, text, core, first, end, namespace))
        first = end
    return chunks


def _chunk(
    prompt: Prompt, kind: Kind, text: str, core: Span, start: int, end: int, namespace: str
) -> Chunk:
    ids = prompt.ids[start:end]
    inner = _inner(text, core, prompt.offsets[start:end])
    key = content_key(namespace, text, ids[inner[0] : inner[1]])
    chars = tuple((a, b) for a, b in (prompt.offsets[start:end] - core.start).tolist())
    return Chunk(kind, text, start, end, ids.copy(), inner, key, chars)


def _inner(text: str, core: Span, offsets: np.ndarray) -> tuple[int, int]:
    """The tokens whose ids nothing around the text can change, relative to its first token.

    Between its first and its last white space: a first word behind a space is often cut
    otherwise than one behind a line break. Without any, all but the outermost tokens.
    """
    low = core.start + len(text.split(None, 1)[0])
    high = core.start + len(text.rsplit(None, 1)[0])
    inside = np.flatnonzero((offsets[:, 0] >= low) & (offsets[:, 1] <= high))
    if not len(inside):
        inside = np.flatnonzero((offsets[:, 0] > core.start) & (offsets[:, 1] < core.end))
    return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
