"""Markdown: headings with what they head; lists, tables and code fences whole."""

from __future__ import annotations

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt

from kvsem.chunkers.base import ahead_of_space, check_lengths, pack
from kvsem.types import Span

_LINE = re.compile(r"\r\n?|\n")  # as CommonMark counts lines


class MarkdownChunker:
    """Blocks of CommonMark with tables, grouped up to ``max_tokens`` within one section.

    A block is a paragraph, a whole list, table, quotation, code fence or piece of HTML at the top
    level; a heading is one with the block that it heads, and opens a chunk unless the one ahead
    is shorter than ``min_tokens``. A block above the budget is a chunk of its own, uncut. White
    space belongs to the chunk that follows it. Plain text is cut at its blank lines.

    Locality: an edit leaves the chunks of the sections behind the next heading as they were.
    """

    def __init__(self, max_tokens: int = 128, min_tokens: int = 0) -> None:
        check_lengths(max_tokens, min_tokens)
        self.max_tokens, self.min_tokens = max_tokens, min_tokens
        # spans within a block are not asked for
        self._markdown = MarkdownIt("commonmark").enable("table").disable("inline")

    def split(self, text: str) -> list[Span]:
        lines = [0, *(found.end() for found in _LINE.finditer(text))]
        starts = {
            ahead_of_space(text, lines[line]): is_heading for line, is_heading in self._blocks(text)
        }
        return pack(text, starts.items(), self.max_tokens, self.min_tokens)

    def _blocks(self, text: str) -> Iterator[tuple[int, bool]]:
        """First line of each block, and whether a heading is on it."""
        is_headed = False
        for token in self._markdown.parse(text):
            if token.level or token.map is None or token.nesting < 0:
                continue
            is_heading = token.type == "heading_open"
            if not is_headed:
                yield token.map[0], is_heading
            is_headed = is_heading
