"""What two texts say otherwise is computed, whatever their vectors say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvsem.errors import SettingError, check_range
from kvsem.gates.base import Candidate, Decision
from kvsem.types import Span
from kvsem.wording import MEANING, Difference, Word, cut, differences, reached

WIDE, WIDE_OTHER, MOST_OTHER = 16, 40, 3  # one word in so many, and at most so many words
_REACH = ("clause", "sentence", "text")


@dataclass
class LexicalGate:
    """Compares the two texts word by word (`kvsem.wording`).

    Words that the candidate does not have at their place are computed. Behind a number, unit,
    date, negation, opposite, name or order that differs (in Chinese: behind any other character)
    ``reach`` more words of the sentence are computed too, for their KV was made behind the other
    word; or all up to the end of its ``clause`` or ``sentence``, or of the ``text``. Behind any
    other word that was left out one word is.

    In a long text of which ``wide_from`` of the words or more are left to reuse all the same, a
    difference of meaning carries to the end of its clause, at most one word in 16 of the text, and
    another word one in 40, at most three (None: never; experiments/gates). A candidate is refused
    where less than ``min_kept`` of the target's words would be left.
    """

    reach: int | str = 2
    min_kept: float = 0.25
    wide_from: float | None = 0.5

    def __post_init__(self) -> None:
        is_count = isinstance(self.reach, int) and not isinstance(self.reach, bool)
        if not (is_count and int(self.reach) >= 0) and self.reach not in _REACH:
            raise SettingError(
                "reach", self.reach, f"a number of words from 0, or one of {', '.join(_REACH)}"
            )
        check_range("min_kept", self.min_kept, 0.0, 1.0)
        if self.wide_from is not None:
            check_range("wide_from", self.wide_from, 0.0, 1.0)

    def accept(self, text: str, candidate: Candidate) -> Decision:
        """Refuses with ``number_differs``, ``negation_differs``, … or ``wording_differs``."""
        words = cut(text)
        found = differences(words, cut(candidate.text))
        spans = list(self._computed(words, found, self.wide_from is not None))
        if self.wide_from is not None and _kept(words, spans) < self.wide_from:
            spans = list(self._computed(words, found, False))
        if _kept(words, spans) < self.min_kept:
            kind = next((d.kind for d in found if d.kind in MEANING), "wording")
            return Decision(False, f"{kind}_differs")
        return Decision(True, compute=tuple(Span(*_chars(words, span)) for span in spans))

    def _computed(
        self, words: Sequence[Word], found: Sequence[Difference], wide: bool
    ) -> Iterator[tuple[int, int]]:
        """Stretches of words, ascending and apart; what is left of a word or two between two
        differences of meaning is no context of its own, and is computed with them."""
        open_: tuple[int, int] | None = None
        meant = False
        n = sum(word.kind != "mark" for word in words) if wide else 0
        for difference in found:
            before, meant = meant, difference.kind in MEANING
            end = max(self._end(words, difference), _wide_end(words, difference, n))
            if end <= difference.start:
                continue
            gap = _island(words, open_[1]) if open_ and before and meant else 0
            if open_ and difference.start <= open_[1] + gap:
                open_ = open_[0], max(open_[1], end)
                continue
            if open_:
                yield open_
            open_ = difference.start, end
        if open_:
            yield open_

    def _end(self, words: Sequence[Word], difference: Difference) -> int:
        if difference.kind in MEANING:
            return reached(words, difference, self.reach)
        was_left_out = difference.start == difference.end and difference.kind == "word"
        return reached(words, difference, 1) if was_left_out and self.reach else difference.end


def _wide_end(words: Sequence[Word], difference: Difference, n: int) -> int:
    """In a text of ``n`` words; 0: no further than to itself."""
    if difference.kind in MEANING:
        within = reached(words, difference, "clause")
        return min(within, reached(words, difference, n // WIDE)) if n >= WIDE else difference.end
    far = min(n // WIDE_OTHER, MOST_OTHER)
    return reached(words, difference, far) if far and difference.kind == "word" else difference.end


def _island(words: Sequence[Word], at: int) -> int:
    """How many words from ``at`` on count as nothing between differences: Chinese words are two
    ideographs long."""
    return 2 if at < len(words) and words[at].kind == "ideograph" else 1


def _kept(words: Sequence[Word], spans: Sequence[tuple[int, int]]) -> float:
    """Share of the words, marks aside, that no span holds; of a text without words 1 or 0."""
    counted = [word.kind != "mark" for word in words]
    gone = sum(sum(counted[start:end]) for start, end in spans)
    return 1 - gone / sum(counted) if any(counted) else float(not spans)


def _chars(words: Sequence[Word], span: tuple[int, int]) -> tuple[int, int]:
    return words[span[0]].start, words[span[1] - 1].end
