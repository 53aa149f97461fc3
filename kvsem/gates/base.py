"""A gate decides whether a similar chunk may stand in for another."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Candidate:
    """A stored chunk put forward by the index, with its cosine to the chunk asked for."""

    text: str
    score: float


@dataclass(frozen=True)
class Decision:
    accepted: bool
    reason: str = ""  # why not; short and stable, it is counted by its text


class Gate(Protocol):
    def accept(self, text: str, candidate: Candidate) -> Decision:
        """Whether ``candidate`` may be reused for the chunk ``text``."""
        ...
