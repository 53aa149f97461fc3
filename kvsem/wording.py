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
from functools import cache
from importlib.resources import files
from typing import Any

from kvsem.lcs import runs

KINDS = (
    *("negation", "antonym", "unit", "date", "number", "sign", "order", "name", "characters"),
    "word",
)
MEANING = frozenset(KINDS[:-1])  # what a paraphrase leaves alone

_IDEOGRAPH = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_NUMERAL = "零〇一二三四五六七八九十百千万亿"  # of which a number is one word
_LETTER = rf"[^\W\d_{_IDEOGRAPH}]"
_WORD = re.compile(
    rf"(?P<number>(?:(?<![\w.)\]])[-+\u2212]?\.?)?\d+(?:[.,:/\-\u2013]\d+)*{_LETTER}*)|(?P<ideograph>[{_NUMERAL}]+|[{_IDEOGRAPH}])"
    rf"|(?P<word>{_LETTER}(?:{_LETTER}|\d|['\u2019\-.](?={_LETTER}))*)|(?P<mark>[^\w\s]|_|\w)"
)
_STOPS, _PAUSES = set(".!?\u2026\u3002\uff01\uff1f"), set(",;:()[]\u2014\u3001\uff0c\uff1b\uff1a")
_SYMBOLS = {"Sm", "So", "No"}  # of Unicode: mathematical, other (as emoji), superscripts
_RAISED = re.compile("([\u00b2\u00b3\u00b9\u2070\u2074-\u2079\u00bc-\u00be])")  # 10² is not 102
_SPACED = " \t\r\n!?.,;:'\")]\u2026\u201d\u2019"  # behind an exclamation
_SIGNS = set("%\u2030$\u20ac\u00a3\u00a5\u00b0")  # marks that are units
_OPERATORS = set("+-*/%^&|")  # one for another is no punctuation
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_ORDINAL = re.compile(r"(\d+)(?:st|nd|rd|th)")
_NEGATING = ("un", "in", "im", "il", "ir", "dis", "non", "non-", "mis")


@dataclass(frozen=True)
class Word:
    """A word, number, ideograph or mark of a text at characters ``[start, end)``; what a line is
    indented by is a mark. ``key`` is equal where it says the same ("50" and "fifty");
    ``sentence`` and ``clause`` count from 0."""

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
    """The words of ``text`` in order; white space inside a line belongs to none."""
    words: list[Word] = []
    sentence = clause = last = 0
    is_first = True
    for found in _WORD.finditer(text):
        if words and "\n" in text[last : found.start()]:
            sentence, clause, is_first = sentence + 1, clause + 1, True
            if indent := text[last : found.start()].rpartition("\n")[2]:
                at = found.start() - len(indent), found.start()
                words.append(Word(*at, indent, "mark", False, sentence, clause))
        shape, kind = found[0], str(found.lastgroup)
        key, is_name = _key(shape, kind, is_first)
        if key == "!" and text[found.end() : found.end() + 1].strip(_SPACED):
            key = "\u00ac"  # "!ready" says "not ready"
        words.append(Word(*found.span(), key, kind, is_name, sentence, clause))
        last, is_first = found.end(), is_first and kind == "mark"
        if kind == "mark" and _ends_sentence(text, words):
            sentence, clause, is_first = sentence + 1, clause + 1, True
        elif shape in _PAUSES:
            clause += 1
    return words


def _key(shape: str, kind: str, is_first: bool) -> tuple[str, bool]:
    """Its normal form, and whether it looks like a name."""
    plain = shape if shape.isascii() else _composed(shape)
    plain = plain.replace("\u2019", "'").replace("\u2212", "-")
    lower, lists = plain.lower(), _lexicon()
    if kind == "number":
        ordinal = _ORDINAL.fullmatch(lower)
        return f"{ordinal[1]}." if ordinal else _number(lower), False
    if kind != "word":
        return plain, False
    if lower in lists["ordinals"]:
        return f"{lists['ordinals'][lower]}.", False
    tens, dash, ones = lower.partition("-")
    parts = [lists["numbers"].get(part) for part in (tens, ones) if part]
    if None not in parts and (not dash or (parts[0] in range(20, 100, 10) and 0 < parts[-1] < 10)):
        return str(sum(parts)), False
    if lower == "percent":
        return "%", False
    spells = lower in lists["function_words"] and not (len(plain) > 1 and plain.isupper())
    is_known = spells or lower in lists["dates"]
    is_name = plain != lower and not is_known
    return (lower if is_first or is_known else plain), is_name


def _composed(shape: str) -> str:
    """NFKC, but for what stands above the line."""
    parts = _RAISED.split(shape)
    return "".join(p if _RAISED.match(p) else unicodedata.normalize("NFKC", p) for p in parts)


def _number(lower: str) -> str:
    """Without the commas between thousands and the plus ahead; any other comma parts numbers."""
    signed = lower.removeprefix("+")
    grouped = _GROUPED.match(signed)
    if grouped and not signed[grouped.end() :].startswith((",", ".")):
        signed = grouped[0].replace(",", "") + signed[grouped.end() :]
    return signed.replace(".", "0.", 1) if signed.lstrip("-").startswith(".") else signed


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
    a = c = 0
    for i, j, n in [*runs(here, there), (len(here), len(there), 0)]:
        if a < i or c < j:
            yield a, i, c, j
        a, c = i + n, j + n


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
        dated = around & lists["dates"] or any(":" in key or "-" in key[1:] for key in said)
        kinds.add("date" if dated else "number")
    if Counter(filter(_means, said)) != Counter(filter(_means, was)) or (
        said and was and {*said, *was} <= _OPERATORS
    ):
        kinds.add("sign")
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
    return key.lstrip("-")[:1].isdigit() or key in _lexicon()["quantities"]


def _means(key: str) -> bool:
    """Whether a mark is more than punctuation: an operator, a symbol, a fraction, an indent."""
    return key.isspace() or (len(key) == 1 and unicodedata.category(key) in _SYMBOLS)


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
