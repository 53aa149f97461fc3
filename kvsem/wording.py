"""Two texts word by word: where they differ, and in what.

Made for gates: which words of a target stand otherwise in a donor, and whether that is a number,
a unit, a date, a negation, an opposite, a name, the order, or just another wording. English by
words, Chinese and Japanese by characters; the word lists are those of ``lexicon.json``.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from typing import Any

KINDS = ("negation", "antonym", "unit", "date", "number", "order", "name", "characters", "word")
MEANING = frozenset(KINDS[:-1])  # what a paraphrase leaves alone

_IDEOGRAPH = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_NUMERAL = "零〇一二三四五六七八九十百千万亿"  # of which a number is one word
_LETTER = rf"[^\W\d_{_IDEOGRAPH}]"
_WORD = re.compile(
    rf"(?P<number>\d+(?:[.,:/\-\u2013]\d+)*{_LETTER}*)|(?P<ideograph>[{_NUMERAL}]+|[{_IDEOGRAPH}])"
    rf"|(?P<word>{_LETTER}(?:{_LETTER}|\d|['\u2019\-.](?={_LETTER}))*)|(?P<mark>[^\w\s]|_|\w)"
)
_STOPS, _PAUSES = set(".!?\u2026\u3002\uff01\uff1f"), set(",;:()[]\u2014\u3001\uff0c\uff1b\uff1a")
_SIGNS = set("%\u2030$\u20ac\u00a3\u00a5\u00b0")  # marks that are units
_ORDINAL = re.compile(r"(\d+)(?:st|nd|rd|th)")
_NEGATING = ("un", "in", "im", "il", "ir", "dis", "non", "non-", "mis")


@dataclass(frozen=True)
class Word:
    """A word, number, ideograph or mark of a text at characters ``[start, end)``. ``key`` is
    equal where it says the same ("50" and "fifty"); ``sentence`` and ``clause`` count from 0."""

    start: int
    end: int
    key: str
    kind: str  # number, ideograph, word or mark
    is_name: bool
    sentence: int
    clause: int


@dataclass(frozen=True)
class Difference:
    """Target words ``[start, end)`` stand where the donor has others, ``said`` by their keys."""

    start: int
    end: int
    said: tuple[str, ...]
    kind: str  # one of KINDS, or mark


@cache
def _lexicon() -> dict[str, Any]:
    lists: dict[str, Any] = json.loads(
        files("kvsem").joinpath("lexicon.json").read_text(encoding="utf-8")
    )
    for name in ("antonyms", "antonyms_zh"):
        pairs = [tuple(pair.split()) for pair in lists[name]]
        lists[name] = {*pairs, *(pair[::-1] for pair in pairs)}
    for name in ("negations", "quantities", "units", "dates", "function_words"):
        lists[name] = frozenset(lists[name])
    return lists


def cut(text: str) -> list[Word]:
    """The words of ``text`` in order; white space belongs to none."""
    words: list[Word] = []
    sentence = clause = last = 0
    is_first = True
    for found in _WORD.finditer(text):
        if words and "\n" in text[last : found.start()]:
            sentence, clause, is_first = sentence + 1, clause + 1, True
        shape, kind = found[0], str(found.lastgroup)
        key, is_name = _key(shape, kind, is_first)
        words.append(Word(*found.span(), key, kind, is_name, sentence, clause))
        last, is_first = found.end(), is_first and kind == "mark"
        if kind == "mark" and _ends_sentence(text, words):
            sentence, clause, is_first = sentence + 1, clause + 1, True
        elif shape in _PAUSES:
            clause += 1
    return words


def _key(shape: str, kind: str, is_first: bool) -> tuple[str, bool]:
    """Its normal form, and whether it looks like a name."""
    plain = unicodedata.normalize("NFKC", shape).replace("\u2019", "'")
    lower, lists = plain.lower(), _lexicon()
    if kind == "number":
        ordinal = _ORDINAL.fullmatch(lower)
        return (f"{ordinal[1]}." if ordinal else lower.replace(",", "")), False
    if kind != "word":
        return plain, False
    if lower in lists["ordinals"]:
        return f"{lists['ordinals'][lower]}.", False
    tens, _, ones = lower.partition("-")
    parts = [lists["numbers"].get(part) for part in (tens, ones) if part]
    if None not in parts:
        return str(sum(parts)), False
    if lower == "percent":
        return "%", False
    is_known = lower in lists["function_words"] or lower in lists["dates"]
    is_name = plain != lower and not is_known
    return (lower if is_first or is_known else plain), is_name


def _ends_sentence(text: str, words: Sequence[Word]) -> bool:
    """Whether the mark that ``words`` end with does; not the stop of "Dr." or "J."."""
    mark = words[-1]
    if mark.key not in _STOPS and text[mark.start] not in _STOPS:
        return False
    if text[mark.start] != ".":
        return True
    before = text[words[-2].start : words[-2].end] if len(words) > 1 else ""
    is_short = len(before) <= 3 and before[:1].isupper() and words[-2].end == mark.start
    follows = text[mark.end : mark.end + 1]
    return not is_short and (not follows or not follows.isalnum())


# Differences ----------------------------------------------------------------------------------


def differences(target: Sequence[Word], donor: Sequence[Word]) -> list[Difference]:
    """What the target says otherwise than the donor, in order.

    Words that were moved within a sentence differ, and so does what stands between their old and
    their new place.
    """
    there, here = [word.key for word in donor], [word.key for word in target]
    blocks = list(_blocks(here, there))
    found = [
        Difference(a, b, tuple(there[c:d]), _kind(target, donor, a, b, c, d))
        for a, b, c, d in blocks
    ]
    return _reordered(found, target)


def _blocks(here: list[str], there: list[str]) -> Iterator[tuple[int, int, int, int]]:
    """``(start, end)`` in both of each stretch that is not common."""
    head = 0
    while head < min(len(here), len(there)) and here[head] == there[head]:
        head += 1
    tail = 0
    while tail < min(len(here), len(there)) - head and here[-1 - tail] == there[-1 - tail]:
        tail += 1
    middle = here[head : len(here) - tail], there[head : len(there) - tail]
    for tag, a, b, c, d in SequenceMatcher(None, *middle, autojunk=False).get_opcodes():
        if tag != "equal":
            yield a + head, b + head, c + head, d + head


def _kind(target: Sequence[Word], donor: Sequence[Word], a: int, b: int, c: int, d: int) -> str:
    """The first of `KINDS` that tells the words of a stretch apart."""
    new, old = target[a:b], donor[c:d]
    around = {word.key.lower() for word in (*target[max(a - 2, 0) : a], *target[b : b + 2])}
    kinds = _of_words(new, old, around) if not _is_ideographic(new, old) else _of_text(new, old)
    return next((kind for kind in KINDS if kind in kinds), "mark")


def _of_words(new: Sequence[Word], old: Sequence[Word], around: set[str]) -> set[str]:
    lists, kinds = _lexicon(), set()
    said, was = ([word.key.lower() for word in words] for words in (new, old))
    if Counter(filter(_negates, said)) != Counter(filter(_negates, was)):
        kinds.add("negation")
    if any((s, w) in lists["antonyms"] or _is_opposite(s, w) for s in said for w in was):
        kinds.add("antonym")
    for name in ("units", "dates"):
        if {*said} & lists[name] != {*was} & lists[name]:
            kinds.add(name.removesuffix("s"))
    if Counter(filter(_counts, said)) != Counter(filter(_counts, was)):
        dated = around & lists["dates"] or any(":" in key or "-" in key for key in said)
        kinds.add("date" if dated else "number")
    if any(word.is_name for word in (*new, *old)):
        kinds.add("name")
    if any(word.kind != "mark" for word in (*new, *old)):
        kinds.add("word")
    return kinds


def _of_text(new: Sequence[Word], old: Sequence[Word]) -> set[str]:
    """Of a stretch with ideographs in it, which no white space cuts into words."""
    lists, kinds = _lexicon(), {"characters"}
    said, was = ("".join(word.key for word in words) for words in (new, old))
    if any(said.count(no) != was.count(no) for no in lists["negations_zh"]):
        kinds.add("negation")
    if any(a in said and b in was for a, b in lists["antonyms_zh"]):
        kinds.add("antonym")
    for name, kind in (("units_zh", "unit"), ("dates_zh", "date")):
        if any((part in said) != (part in was) for part in lists[name]):
            kinds.add(kind)
    numerals = set(lists["numerals_zh"])
    if [c for c in said if c in numerals or c.isdigit()] != [
        c for c in was if c in numerals or c.isdigit()
    ]:
        kinds.add("number")
    return kinds


def _is_ideographic(*stretches: Iterable[Word]) -> bool:
    return any(word.kind == "ideograph" for words in stretches for word in words)


def _negates(key: str) -> bool:
    return key in _lexicon()["negations"] or key.endswith("n't")


def _counts(key: str) -> bool:
    return key[:1].isdigit() or key in _lexicon()["quantities"]


def _is_opposite(a: str, b: str) -> bool:
    """Whether one is the other with a negating syllable: "legal" and "illegal"."""
    short, long = sorted((a, b), key=len)
    if len(short) < 3 or short == long:
        return False
    stem = short.removesuffix("ful")
    return long in {f"{prefix}{short}" for prefix in _NEGATING} or (
        stem != short and long == f"{stem}less"
    )


def _reordered(found: Sequence[Difference], target: Sequence[Word]) -> list[Difference]:
    """Moved words are named so, and joined with their old place within a sentence."""
    joined: list[Difference] = []
    for difference in found:
        first = len(joined)  # of those in its sentence, the first that a word moved to or from
        for i in range(len(joined) - 1, -1, -1):
            if _sentence(joined[i], target) != _sentence(difference, target):
                break
            if _moved(joined[i], difference, target):
                first = i
        parts = [*joined[first:], difference]
        joined[first:] = [_join(parts) if len(parts) > 1 else difference]
    return joined


def _join(parts: Sequence[Difference]) -> Difference:
    said = tuple(key for part in parts for key in part.said)
    kinds = {part.kind for part in parts} | {"order"}
    kind = next(kind for kind in KINDS if kind in kinds)
    return Difference(parts[0].start, parts[-1].end, said, kind)


def _moved(a: Difference, b: Difference, target: Sequence[Word]) -> bool:
    """Whether a word that one says is among those that the other says no more."""
    here = [{w.key.lower() for w in target[d.start : d.end] if _is_content(w)} for d in (a, b)]
    gone = [{key.lower() for key in d.said} for d in (a, b)]
    return bool(here[0] & gone[1] or here[1] & gone[0])


def _sentence(difference: Difference, target: Sequence[Word]) -> int:
    return target[min(difference.start, len(target) - 1)].sentence if target else 0


def _is_content(word: Word) -> bool:
    return word.kind != "mark" and word.key.lower() not in _lexicon()["function_words"]


# How far a difference carries -------------------------------------------------------------------


def reached(words: Sequence[Word], difference: Difference, reach: int | str) -> int:
    """The first word behind ``difference`` that it does not carry to.

    ``reach``: so many words of the same sentence, to the end of its ``clause`` or ``sentence``, or
    of the ``text``. Where words were left out the next one is always reached: it follows others.
    """
    at, gone = difference.end, difference.start == difference.end
    if at >= len(words) or reach == "text":
        return len(words)
    own = words[max(at - 1, 0) if not gone else at]
    left = max(int(reach), int(gone)) if isinstance(reach, int) else len(words)
    while at < len(words) and left and words[at].sentence == own.sentence:
        if reach == "clause" and words[at].clause != own.clause:
            break
        left -= words[at].kind != "mark"
        at += 1
    return at
