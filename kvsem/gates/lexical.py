"""What two texts say otherwise is computed, whatever their vectors say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvsem.errors import SettingError, check_range
from kvsem.gates.base import Candidate, Decision
from kvsem.types import Span
from kvsem.wording import MEANING, Difference, Word, cut, differences, reached

LONG = 40  # words from which on a text is long
FAR, OTHER = 10, 5  # there: words behind a difference of meaning, and behind another
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of these, as much as leaves enough
_REACH = ("clause", "sentence", "text")


@dataclass
class LexicalGate:
    """Compares the two texts word by word (`kvsem.wording`).

    Words that the candidate does not have at their place are computed. Behind a number, unit,
    date, negation, opposite, name or order that differs (in Chinese: behind any other character)
    ``reach`` more words of the sentence are computed too, for their KV was made behind the other
    word; or all up to the end of its ``clause`` or ``sentence``, or of the ``text``. Behind any
    other word that was left out one word is.

    In a long text (40 words) a difference carries further: one of meaning over ten words of its
    sentence, any other word over five, and both to the mark that ends their sentence and the two
    words behind it, where what was said before is gathered (experiments/gates). Of the ten and five
    words as much is computed as leaves ``wide_from`` of the text's words; where even the ends of
    sentences do not, no more than in a short text (None: always).

    A candidate is refused where less than ``min_kept`` of the target's words would be left.
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
        computed = self._computed(words, found)
        if _kept(words, computed) < self.min_kept:
            kind = next((d.kind for d in found if d.kind in MEANING), "wording")
            return Decision(False, f"{kind}_differs")
        return Decision(True, compute=tuple(_spans(words, computed)))

    def _computed(self, words: Sequence[Word], found: Sequence[Difference]) -> np.ndarray:
        """bool ``[words]``"""
        n = sum(word.kind != "mark" for word in words)
        if self.wide_from is not None and n >= LONG:
            ends = _ends(words, found)
            enough = max(self.wide_from, self.min_kept)
            for share in SHARES:
                computed: np.ndarray = np.logical_or(self._carried(words, found, share), ends)
                if _kept(words, computed) >= enough:
                    return computed
        return self._carried(words, found, 0.0)

    def _carried(
        self, words: Sequence[Word], found: Sequence[Difference], share: float
    ) -> np.ndarray:
        """bool ``[words]``, with ``share`` of how far it is in a long text. What is left of a word
        or two between two differences of meaning is no context of its own."""
        computed = np.zeros(len(words), dtype=bool)
        last, meant = 0, False
        for difference in found:
            before, meant = meant, difference.kind in MEANING
            end = self._end(words, difference, share)
            if end <= difference.start:
                continue
            computed[difference.start : end] = True
            gap = _island(words, last) if before and meant else 0
            if last and difference.start <= last + gap:
                computed[last : difference.start] = True
            last = max(last, end)
        return computed

    def _end(self, words: Sequence[Word], difference: Difference, share: float) -> int:
        if difference.kind in MEANING:
            near, far = reached(words, difference, self.reach), int(share * FAR)
            return max(near, reached(words, difference, far)) if far else near
        was_left_out = difference.start == difference.end and bool(self.reach)
        far = max(int(share * OTHER), int(was_left_out)) if difference.kind == "word" else 0
        return reached(words, difference, far) if far else difference.end


def _ends(words: Sequence[Word], found: Sequence[Difference]) -> np.ndarray:
    """bool ``[words]``: what ends a sentence in which something differs, and two words behind."""
    last = {word.sentence: i for i, word in enumerate(words)}
    computed = np.zeros(len(words), dtype=bool)
    for difference in found:
        if difference.kind != "mark" and words:
            at = max(difference.start, difference.end - 1)
            start = end = last[words[min(at, len(words) - 1)].sentence]
            left = 2
            while end + 1 < len(words) and left:
                end += 1
                left -= words[end].kind != "mark"
            computed[start : end + 1] = True
    return computed


def _island(words: Sequence[Word], at: int) -> int:
    """How many words from ``at`` on count as nothing between differences: Chinese words are two
    ideographs long."""
    return 2 if at < len(words) and words[at].kind == "ideograph" else 1


def _kept(words: Sequence[Word], computed: np.ndarray) -> float:
    """Share of the words, marks aside, that are not computed; of a text without words 1 or 0."""
    counted = np.array([word.kind != "mark" for word in words], dtype=bool)
    return 1 - float(computed[counted].mean()) if counted.any() else float(not computed.any())


def _spans(words: Sequence[Word], computed: np.ndarray) -> Iterator[Span]:
    """Characters from the first to the last word of every stretch."""
    edges = np.flatnonzero(np.diff(computed, prepend=False, append=False))
    for start, end in edges.reshape(-1, 2).tolist():
        yield Span(words[start].start, words[end - 1].end)
