"""A gate decides whether a similar chunk may stand in for another."""

from dataclasses import dataclass
from typing import Protocol

from kvsem.types import Span


@dataclass(frozen=True)
class Candidate:
    """A stored chunk put forward by the index, with its cosine to the chunk asked for."""

    text: str
    score: float


@dataclass(frozen=True)
class Decision:
    """``compute``: characters of the text whose tokens take no KV from the candidate; a token that
    shares one character with a span is computed whole."""

    accepted: bool
    reason: str = ""  # why not; short and stable, it is counted by its text
    compute: tuple[Span, ...] = ()


class Gate(Protocol):
    def accept(self, text: str, candidate: Candidate) -> Decision:
        """Whether ``candidate`` may be reused for the chunk ``text``."""
        ...
