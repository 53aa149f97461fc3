"""Code: Python's functions and classes by its own parser, other languages by blank lines."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvsem.chunkers.base import ahead_of_space, check_lengths, estimate_tokens, pack
from kvsem.types import Span

_LINE = re.compile(r"\r\n?|\n")  # as Python's parser counts lines
_DEEPEST = 6  # levels of indentation that a long block is cut at
_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Block = tuple[int, bool]  # first line, and whether it opens a chunk


class CodeChunker:
    """One function or class a chunk; statements between them up to ``max_tokens`` together.

    A class above the budget is cut at its methods; a function never is. Decorators, and comments
    ahead that are indented like it, belong to a definition. Where the text does not parse as
    Python it is cut at blank lines of the least indentation, and a block above the budget at those
    of the next. A chunk shorter than ``min_tokens`` takes in the next definition. Nothing is cut
    within a line; line breaks and indentation belong to the chunk that follows them.

    Locality: an edit leaves the chunks of other definitions as they were, if it still parses.
    """

    def __init__(self, max_tokens: int = 128, min_tokens: int = 16) -> None:
        check_lengths(max_tokens, min_tokens)
        self.max_tokens, self.min_tokens = max_tokens, min_tokens

    def split(self, text: str) -> list[Span]:
        lines = Lines.of(text)
        tree = _parsed(text)
        body = tree.body if tree else []
        places = lines.behind_blank()
        blocks = (
            self._statements(lines, body)
            if body
            else self._cut(lines, 0, len(lines.starts), places, _DEEPEST)
        )
        starts = {ahead_of_space(text, lines.starts[line]): opens for line, opens in blocks}
        return pack(text, starts.items(), self.max_tokens, self.min_tokens)

    def _statements(
        self, lines: Lines, body: Sequence[ast.stmt], ahead: ast.stmt | None = None
    ) -> Iterator[Block]:
        """Blocks of a body, or of what is left of one behind the statement ``ahead``."""
        for node in body:
            done = (ahead.end_lineno or 0) if ahead else 0
            first = lines.lead(done, _first_line(node))
            if first >= done:  # else behind a semicolon
                yield first, isinstance(node, _DEFINITION) or isinstance(ahead, _DEFINITION)
            end = node.end_lineno or node.lineno
            if isinstance(node, ast.ClassDef) and lines.cost(first, end) > self.max_tokens:
                # the first statement, often a docstring, stays with the head of its class
                yield from self._statements(lines, node.body[1:], node.body[0])
            ahead = node

    def _cut(
        self, lines: Lines, begin: int, end: int, places: Sequence[int], deepest: int
    ) -> Iterator[Block]:
        """Cuts of the lines from ``begin`` to ``end`` at the least indented of ``places``."""
        if not places or deepest == 0:
            return
        least = min(lines.indent(line) for line in places)
        cuts = [begin, *(line for line in places if lines.indent(line) == least), end]
        inside = iter(places)
        held = next(inside, end)
        for start, stop in pairwise(cuts):
            if start != begin:
                yield start, True
            own = []
            while held < stop:
                if held > start:
                    own.append(held)
                held = next(inside, end)
            if own and lines.cost(start, stop) > self.max_tokens:
                yield from self._cut(lines, start, stop, own, deepest - 1)


@dataclass(frozen=True)
class Lines:
    """A text's lines, counted from 0."""

    text: str
    starts: list[int]

    @classmethod
    def of(cls, text: str) -> Lines:
        return cls(text, [0, *(found.end() for found in _LINE.finditer(text))])

    def line(self, i: int) -> str:
        end = self.starts[i + 1] if i + 1 < len(self.starts) else len(self.text)
        return self.text[self.starts[i] : end]

    def indent(self, i: int) -> int:
        line = self.line(i).expandtabs()
        return len(line) - len(line.lstrip())

    def cost(self, begin: int, end: int) -> float:
        stop = self.starts[end] if end < len(self.starts) else len(self.text)
        return estimate_tokens(self.text[self.starts[begin] : stop])

    def lead(self, done: int, first: int) -> int:
        """Where what is ahead of line ``first`` begins to belong to it.

        Comments that are indented further belong to the block that ended at line ``done``.
        """
        for line in reversed(range(done, first)):
            if self.line(line).strip() and self.indent(line) > self.indent(first):
                return line + 1
        return min(done, first)

    def behind_blank(self) -> list[int]:
        """Lines behind a blank one, but for closing brackets."""
        found, was_blank = [], False
        for i in range(len(self.starts)):
            text = self.line(i).strip()
            if text and was_blank and text[0] not in ")]}":
                found.append(i)
            was_blank = not text
        return found


def _parsed(text: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "\d" in somebody's code is no concern of the user's
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _first_line(node: ast.stmt) -> int:
    """Of its decorators, where it has any."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)]) - 1
