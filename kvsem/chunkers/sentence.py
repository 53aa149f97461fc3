"""Sentences, grouped up to a budget of tokens within one paragraph."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvsem.chunkers.base import check_lengths, pack
from kvsem.types import Span

# Written as escapes: ideographic full stop, full-width ! and ?, half-width full stop.
_CJK_STOP = "\u3002\uff01\uff1f\uff61"
# Latin stops, ellipsis, Arabic question mark and full stop, danda: white space must follow.
_STOP = ".!?\u2026\u061f\u06d4\u0964"
_CLOSE = "\"')]}\u201d\u2019\u00bb\u300d\u300f\uff09\u3011\u300b"
_OPEN = "\"'([{\u201c\u2018\u00ab"
_LINE = re.compile("\r\n|[\n\r\x0b\x0c\x85\u2028\u2029]")
_BREAK = re.compile(rf"(?P<gap>\s+)|[{_CJK_STOP}]+[{re.escape(_CLOSE)}]*")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")  # "J", "e.g", "U.S"
_ABBREVIATION = re.compile(
    "al|apr|approx|aug|capt|cf|co|col|corp|dec|dept|dr|eqs?|est|etc|feb|figs?|gen|gov|hon|inc|jan"
    "|jr|jul|jun|lt|ltd|mar|mr|mrs|ms|mt|nov|oct|pres|prof|ref|rep|rev|sec|sen|sept?|sgt|sr|st"
    "|vol|vs"
)
_BEFORE_NUMBER = re.compile("art|ch|nos?|pp?")  # an abbreviation only ahead of a number


class SentenceChunker:
    """Whole sentences, at most ``max_tokens`` estimated tokens a chunk, never over a blank line.

    A sentence ends at a stop followed by white space (but not after an abbreviation, an initial
    or a list number), at a CJK stop, and at every line break. White space belongs to the chunk
    that follows it. A sentence above the budget is a chunk of its own; nothing is cut inside a
    word.

    Locality: paragraphs are cut independently, so an edit leaves every chunk of the other
    paragraphs as it was. Within the edited paragraph the chunks ahead of the edited one stay (or,
    if its first sentence changes length, all but the one just ahead); those behind it may be
    grouped anew up to the paragraph's end, because groups are filled from its start.
    """

    def __init__(self, max_tokens: int = 128) -> None:
        check_lengths(max_tokens)
        self.max_tokens = max_tokens

    def split(self, text: str) -> list[Span]:
        return pack(text, ((start, opens) for start, _, opens in _sentences(text)), self.max_tokens)


def _sentences(text: str) -> Iterator[tuple[int, int, bool]]:
    """``(start, end, whether it opens a paragraph)`` of each sentence; they cover ``text``."""
    start, opens = 0, False
    for end, is_paragraph in _ends(text):
        if end > start:
            yield start, end, opens
            start, opens = end, False
        opens = opens or is_paragraph
    yield start, len(text), opens


def _ends(text: str) -> Iterator[tuple[int, bool]]:
    """Where sentences end, and whether a blank line follows; a place may come twice."""
    last = len(text.rstrip())  # white space at the very end has nothing to follow it
    word, is_first = len(text) - len(text.lstrip()), True
    for found in _BREAK.finditer(text, word, last):
        gap = found["gap"]
        if gap is None:
            is_end, end, n_lines = found.end() < last, found.end(), 0
        else:
            end, n_lines = found.start(), len(_LINE.findall(gap))
            follows = text[found.end()]
            is_end = n_lines > 0 or _is_stopped(text[word:end], follows, is_first)
        if is_end:
            yield end, n_lines > 1 or "\u2029" in (gap or "")
        word, is_first = found.end(), is_end or (is_first and word == end)


def _is_stopped(word: str, follows: str, is_first: bool) -> bool:
    """Whether ``word``, with ``follows`` behind the white space, ends its sentence."""
    body = word.rstrip(_CLOSE)
    stem = body.rstrip(_STOP)
    stop, stem = body[len(stem) :], stem.lstrip(_OPEN).lower()
    if stop != "." or not stem:
        return bool(stop)
    if _ABBREVIATION.fullmatch(stem) or _INITIALS.fullmatch(stem):
        return False
    if _BEFORE_NUMBER.fullmatch(stem) and follows.isdigit():
        return False
    return not (is_first and stem.isdigit())  # "1." at the start of a line counts a list
