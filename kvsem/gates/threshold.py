"""One number: accept what is similar enough."""

import math
from dataclasses import dataclass

from kvsem.errors import check_range
from kvsem.gates.base import Candidate, Decision

_DIGITS = 5  # of a cosine: float32 noise (identical texts: 0.9999999) never decides


@dataclass
class ThresholdGate:
    """Accept a candidate whose cosine is at least ``min_score``.

    The default was looked at with all-MiniLM-L6-v2 on public paraphrase pairs: it keeps rewritten
    documentation sentences (median 0.94, lowest 5 % 0.81) and two translations of one passage
    (median 0.92, lowest 5 % 0.84), and refuses other passages of the same book (highest 1 %:
    0.79) and bank questions of another intent (0.82). It does not see meaning: "turn on" and
    "turn off" are at 0.91, reviews rewritten to the opposite verdict at 0.97; no threshold
    parts those from paraphrases, and that takes a second gate (`kvsem.gates.lexical`). Another
    embedder needs another number.
    """

    min_score: float = 0.85

    def __post_init__(self) -> None:
        check_range("min_score", self.min_score, -1.0, 1.0)

    def accept(self, text: str, candidate: Candidate) -> Decision:
        """Refuses with ``below_threshold`` or ``score_not_finite``."""
        if not math.isfinite(candidate.score):
            return Decision(False, "score_not_finite")
        if round(candidate.score, _DIGITS) < round(self.min_score, _DIGITS):
            return Decision(False, "below_threshold")
        return Decision(True)
