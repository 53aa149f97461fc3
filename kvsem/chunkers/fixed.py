"""Chunks of one length wherever that falls: the control that knows nothing of the text."""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal, get_args

import regex

from kvsem.chunkers.base import spans_from
from kvsem.errors import SettingError, check_count
from kvsem.types import Span

Unit = Literal["characters", "words"]
# A pair of surrogates, or what Unicode (UAX 29) holds for one character of the reader's.
_CHARACTER = regex.compile(r"[\ud800-\udbff][\udc00-\udfff]|\X")
_UNSPACED = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]"
)


class FixedChunker:
    """At most ``size`` characters a chunk, cut ahead of white space, or ``size`` words.

    Characters: the cut is ahead of the last white space in the second half of a chunk; where there
    is none, as in text without spaces or in a very long word, between two characters as a reader
    counts them (grapheme clusters). Words: what stands between white space, and every character
    of the scripts that write none. White space belongs to the chunk that follows it.

    Locality: none. A character more moves every boundary behind it.
    """

    def __init__(self, size: int = 500, unit: Unit = "characters") -> None:
        check_count("size", size, 1)
        if unit not in get_args(Unit):
            raise SettingError("unit", unit, f"one of {', '.join(get_args(Unit))}")
        self.size = size
        self.unit = unit

    def split(self, text: str) -> list[Span]:
        if not text:
            return []
        characters = [found.start() for found in _CHARACTER.finditer(text)]
        last = len(text.rstrip())  # white space at the very end has nothing to follow it
        gaps = [
            at for at in characters if 0 < at < last and text[at].isspace() > text[at - 1].isspace()
        ]
        if self.unit == "words":
            return spans_from(self._words(text, characters, gaps), text)
        return spans_from(self._lengths(text, characters, gaps), text)

    def _lengths(self, text: str, characters: list[int], gaps: list[int]) -> list[int]:
        starts = [0]
        while starts[-1] + self.size < len(text):
            low, limit = starts[-1], starts[-1] + self.size
            cut = _last(gaps, limit)
            if cut <= low + self.size // 2:
                cut = _last(characters, limit)
            if cut <= low:  # one character above the size
                cut = _next(characters, low)
            if cut == low:
                break
            starts.append(cut)
        return starts

    def _words(self, text: str, characters: list[int], gaps: list[int]) -> list[int]:
        begins = {0, *gaps} | {at for at in characters if at and _is_word(text, at)}
        return sorted(begins)[:: self.size]


def _last(places: list[int], limit: int) -> int:
    """The last of ``places`` up to ``limit``, or 0."""
    i = bisect_right(places, limit)
    return places[i - 1] if i else 0


def _next(places: list[int], at: int) -> int:
    """The first of ``places`` behind ``at``, or ``at``."""
    i = bisect_right(places, at)
    return places[i] if i < len(places) else at


def _is_word(text: str, at: int) -> bool:
    """Whether a word starts at a character that follows another without white space."""
    if text[at].isspace() or text[at - 1].isspace():
        return False
    return any(_UNSPACED.match(text, i) for i in (at - 1, at))
