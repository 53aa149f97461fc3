"""Questions of our own about the Python language reference that every CPython carries.

The texts come from `pydoc_data.topics` (plain text, rendered from reStructuredText) and differ a
little between Python versions. `pydoc_questions.json` names each passage by its topic and a
phrase of its first paragraph; a question whose passage this Python lacks is left out.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.resources import files
from random import Random
from typing import Any

from kvsem.errors import DataError, SettingError
from kvsem.types import Message, Request, Segment

SYSTEM = (
    "Answer the question from the passages of the Python language reference. "
    "Give a short answer, without an explanation."
)
ENOUGH_WORDS, MOST_WORDS = 75, 115
N_DRAWS = 20  # orders to choose from; nearly always one of them moves every passage
KINDS: tuple[str | bool, ...] = ("questions", "conversations", "all", True, False)
# These differ from one Python version to the next, and read badly out of their place.
_NOTE = re.compile(r"(Changed|New|Added|Deprecated) (in|since) |See also|Availability|-\[|\[\d+\]")
_HEADING = re.compile(r"\n([*=~^-])\1\1+$")


def read_topics() -> dict[str, str]:
    """Topic → text of this Python; `DataError` where it was built without them."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        topics = {}
    if not topics:
        raise DataError("pydoc_data.topics: missing in this Python; use workload=jsonl instead")
    return dict(topics)


def paragraphs(topic: str) -> list[str]:
    """Prose of a topic, one line a paragraph: no headings, grammar, code, tables, version notes."""
    cleaned = ((block, _clean(block)) for block in re.split(r"\n\s*\n", topic.strip("\n")))
    return [text for block, text in cleaned if text and _is_prose(block, text)]


def _clean(block: str) -> str:
    text = re.sub(r"(\w)-\n\s*(?=\w)", r"\1-", block)  # the renderer wraps behind hyphens
    text = " ".join(text.split())
    text = re.sub(r"\s\[\d+\](?=[\s.,;)]|$)", "", text)  # footnote marks
    text = re.sub(r'(?<![\w"*])\*{1,2}(?=[^\s*])([^*"]+?)(?<=\S)\*{1,2}(?![\w"*])', r"\1", text)
    text = re.sub('\u2018"|"\u2019', '"', text)  # code inside quotes is quoted twice
    return re.sub(r"^\* ", "- ", text)


def _is_prose(block: str, text: str) -> bool:
    if _HEADING.search(block) or _NOTE.match(text) or "::=" in text or ">>>" in text:
        return False
    if text[0] in "+|" or text[0].islower():  # tables; code, signatures and what continues them
        return False
    return text[-1] in ".:;,)" or text.startswith("- ")


def cut_passage(topic: str, anchor: str) -> str | None:
    """Paragraphs from the one with ``anchor`` on, about 75 to 115 words; None without it."""
    prose = paragraphs(topic)
    start = next((i for i, text in enumerate(prose) if anchor in text), None)
    if start is None:
        return None
    taken: list[str] = []
    for text in prose[start:]:
        room = MOST_WORDS - _n_words("\n".join(taken))
        taken += [text] if _n_words(text) <= room else [_first_sentences(text, room)]
        if _n_words("\n".join(taken)) >= ENOUGH_WORDS or taken[-1] != text:
            break
    return "\n".join(text for text in taken if text)


def _first_sentences(text: str, n_words: int) -> str:
    kept = ""
    for sentence in re.split(r'(?<=[.;:]) (?=[A-Z"(])', text):
        if _n_words(f"{kept} {sentence}") > n_words:
            break
        kept = f"{kept} {sentence}".strip()
    return kept


def _n_words(text: str) -> int:
    return len(text.split())


def _terms(text: str) -> list[str]:
    return re.findall(r"[a-z_]+", text.lower())


def rank_bm25(query: str, passages: Mapping[str, str]) -> list[str]:
    """Names of ``passages``, best first, by BM25 (k1 = 1.5, b = 0.75); ties by name."""
    counts = {name: Counter(_terms(text)) for name, text in passages.items()}
    lengths = {name: sum(count.values()) for name, count in counts.items()}
    mean = sum(lengths.values()) / max(1, len(lengths))
    score = dict.fromkeys(counts, 0.0)
    for term in set(_terms(query)):
        n_with = sum(term in count for count in counts.values())
        idf = math.log(1 + (len(counts) - n_with + 0.5) / (n_with + 0.5))
        for name, count in counts.items():
            norm = 1.5 * (0.25 + 0.75 * lengths[name] / mean)
            score[name] += idf * count[term] * 2.5 / (count[term] + norm)
    return sorted(score, key=lambda name: (-score[name], name))


class PydocWorkload:
    """Retrieval prompts and conversations over one small pool of passages that recur throughout.

    A question stands behind its gold passage and the ``n_passages - 1`` nearest others (BM25), in
    an order drawn from ``seed``; its ``group`` is the topic of its gold passage. A conversation's
    turn k holds turns 1 … k-1 as history, with the reference answers as replies.

    ``conversations``: False or "questions", True or "conversations", or "all" (questions first).
    Raises `SettingError` for a value out of range, `DataError` where Python has no reference.
    """

    def __init__(
        self,
        limit: int | None = None,
        ingest: bool = True,
        seed: int = 0,
        n_passages: int = 5,
        max_new_tokens: int = 16,
        conversations: bool | str = False,
    ) -> None:
        if conversations not in KINDS:
            raise SettingError("workload.conversations", conversations, f"one of {KINDS}")
        self.ingest = ingest
        self._seed, self._n_passages = seed, n_passages
        self._max_new_tokens = max_new_tokens
        self._place: dict[str, int] = {}  # where a passage stood last
        self._load()
        _check("n_passages", n_passages, len(self._passages))
        _check("max_new_tokens", max_new_tokens)
        _check("limit", 1 if limit is None else limit)
        self._requests = tuple(self._build(conversations))[:limit]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def _load(self) -> None:
        data = json.loads(files(__package__).joinpath("pydoc_questions.json").read_text("utf-8"))
        topics, named = read_topics(), data["passages"]
        cut = {n: cut_passage(topics.get(p["topic"], ""), p["anchor"]) for n, p in named.items()}
        self._passages = {name: text for name, text in cut.items() if text}
        self._topics = {name: passage["topic"] for name, passage in named.items()}
        self._questions = {q["id"]: q for q in data["questions"] if self._has_answer(q)}
        self._conversations: list[list[dict[str, Any]]] = data["conversations"]
        if not self._questions:
            raise DataError("pydoc_data.topics: knows none of our passages; use workload=jsonl")
        if lost := [q["id"] for q in data["questions"] if q["id"] not in self._questions]:
            warnings.warn(f"left out, not in this Python: {', '.join(lost)}", stacklevel=3)

    def _has_answer(self, question: Mapping[str, Any]) -> bool:
        text = self._passages.get(question["passage"], "")
        return any(answer in text for answer in question["answers"])

    def _build(self, conversations: bool | str) -> Iterator[Request]:
        if conversations in (False, "questions", "all"):
            yield from map(self._ask, self._questions.values())
        if conversations in (True, "conversations", "all"):
            for i, turns in enumerate(self._conversations, start=1):
                yield from self._converse(f"conv-{i:02d}", turns)

    def _shuffled(self, key: str, names: list[str]) -> list[str]:
        """Their texts in an order of ``seed`` and ``key`` that moves those used before."""
        texts = [self._passages[name] for name in names if name in self._passages]
        random = Random(f"{self._seed}/{key}")
        draws = [random.sample(texts, len(texts)) for _ in range(N_DRAWS)]
        best = min(draws, key=lambda d: sum(self._place.get(t) == i for i, t in enumerate(d)))
        self._place.update({text: i for i, text in enumerate(best)})
        return best

    def _ask(self, question: Mapping[str, Any]) -> Request:
        gold = question["passage"]
        near = [n for n in rank_bm25(question["question"], self._passages) if n != gold]
        return Request.rag(
            question["id"],
            self._shuffled(question["id"], [gold, *near[: self._n_passages - 1]]),
            question["question"],
            system=SYSTEM,
            answers=tuple(question["answers"]),
            max_new_tokens=self._max_new_tokens,
            group=self._topics[gold],
        )

    def _converse(self, group: str, turns: list[dict[str, Any]]) -> Iterator[Request]:
        history = [Message("system", (Segment("system", SYSTEM),))]
        known = [turn for turn in turns if turn["question"] in self._questions]
        for i, turn in enumerate(known, start=1):
            question = self._questions[turn["question"]]
            texts = self._shuffled(f"{group}/{i}", [question["passage"], *turn["passages"]])
            passages = tuple(Segment("passage", text) for text in texts)
            asked = f"Question: {question['question']}"
            yield Request(
                f"{group}/turn-{i}",
                (*history, Message("user", (*passages, Segment("question", asked)))),
                answers=tuple(question["answers"]),
                max_new_tokens=self._max_new_tokens,
                group=group,
            )
            reply = Segment("turn", question["answers"][0])
            history.append(Message("user", (*passages, Segment("turn", asked))))
            history.append(Message("assistant", (reply,)))


def _check(name: str, value: object, most: int | None = None) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if not is_count or not 1 <= value <= (most or value):  # type: ignore[operator]
        allowed = f"an integer from 1 to {most}" if most else "an integer of at least 1"
        raise SettingError(f"workload.{name}", value, allowed)
