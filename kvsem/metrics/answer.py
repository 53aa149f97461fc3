"""Quality against the reference answers, and token F1 against exact's own text."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter

from kvsem.metrics.base import Observation

# Han and kana are written without spaces: each character is a token of its own.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")
_HAS_CJK = re.compile(rf"[{_CJK}]")
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)


class AnswerMetric:
    """Token F1 of the arm's greedy text.

    ``quality/f1``: the best F1 against a reference answer; ``quality/f1_exact_arm``: F1 against
    exact's text, 1 where the texts are equal. F1 as in LongBench (arXiv 2308.14508): lower case,
    punctuation and articles removed, tokens by white space, overlap counted with multiplicity;
    Chinese and Japanese by character, where LongBench segments with jieba.
    """

    def __init__(self) -> None:
        self.higher_is_better = {"quality/f1": True, "quality/f1_exact_arm": True}

    def compare(self, exact: Observation, arm: Observation) -> dict[str, float]:
        values: dict[str, float] = {}
        if arm.text is not None and exact.text is not None:
            same = arm.text == exact.text  # also where nothing is left after normalisation
            values["quality/f1_exact_arm"] = 1.0 if same else token_f1(arm.text, exact.text)
        if arm.text is not None and arm.answers:
            values["quality/f1"] = max(token_f1(arm.text, answer) for answer in arm.answers)
        return values


def token_f1(text: str, reference: str) -> float:
    """F1 of the normalised tokens, from 0 to 1; 0 where they share none."""
    found, wanted = Counter(_tokens(text)), Counter(_tokens(reference))
    n_shared = (found & wanted).total()
    return 2 * n_shared / (found.total() + wanted.total()) if n_shared else 0.0


def _tokens(text: str) -> list[str]:
    plain = text.lower().translate(_ASCII_PUNCTUATION)
    if _HAS_CJK.search(plain):
        plain = "".join(c for c in plain if not unicodedata.category(c).startswith("P"))
    return _TOKEN.findall(_ARTICLE.sub(" ", plain))
