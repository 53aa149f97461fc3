"""Pairs of donor and target, from nearly the same to unrelated, out of public files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from experiments.public import read
from kvsem.keys import digest

FILES = {
    "bible": "paraphrase/parallel_passages_pd.jsonl.gz",
    "docs": "paraphrase/gptcache_mock.jsonl.gz",
    "imdb": "paraphrase/counterfactual_imdb.jsonl.gz",
    "xquad": "rag/xquad_en_zh_es.jsonl.gz",
}
SENTENCES = 5  # of documentation, in one text
LEAST = 4  # sentences of a paragraph that is edited
Row = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """``group`` names the document that both come from: no document is on both sides of the
    split."""

    id: str
    kind: str
    group: str
    donor: str
    target: str
    question: str

    @property
    def is_held_out(self) -> bool:
        return int(digest("split", group=self.group)[:8], 16) % 2 == 1


def pairs(
    files: dict[str, Path], kinds: Sequence[str], n: int, max_words: int, seed: int
) -> list[Pair]:
    """``n`` of each kind, in a seeded order."""
    rows = {name: list(read(path)) for name, path in files.items()}
    found: list[Pair] = []
    for kind in kinds:
        source, make = KINDS[kind]
        rng = np.random.default_rng([seed, list(KINDS).index(kind)])
        made = (
            Pair(f"{kind}/{id}", kind, f"{source}/{group}", *_both(texts, max_words), question)
            for id, group, *texts, question in make(rows[source], rng)
        )
        found += islice((pair for pair in made if pair.donor != pair.target), n)
    return found


def _both(texts: Sequence[str], max_words: int) -> tuple[str, str]:
    donor, target = (_cut(text, max_words) for text in texts)
    return donor, target


def _cut(text: str, max_words: int) -> str:
    words = list(re.finditer(r"\S+", text))[:max_words]
    return text[words[0].start() : words[-1].end()] if words else ""


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text.strip())


Made = Iterator[tuple[str, str, str, str, str]]  # id, group, donor, target, question
Make = Callable[[list[Row], np.random.Generator], Made]


def _translations(version: str) -> Make:
    def make(rows: list[Row], rng: np.random.Generator) -> Made:
        for i in rng.permutation(len(rows)):
            row = rows[i]
            yield row["id"], row["book"], row["versions"][version], row["versions"]["WEB"], BIBLE

    return make


def _other_passage(rows: list[Row], rng: np.random.Generator) -> Made:
    """Another passage of the same book, in the same translation."""
    for i in rng.permutation(len(rows)):
        others = [r for r in rows if r["book"] == rows[i]["book"] and r["id"] != rows[i]["id"]]
        if others:
            other = others[int(rng.integers(len(others)))]["versions"]["WEB"]
            yield rows[i]["id"], rows[i]["book"], other, rows[i]["versions"]["WEB"], BIBLE


def _reworded(rows: list[Row], rng: np.random.Generator) -> Made:
    order = rng.permutation([i for i, row in enumerate(rows) if row["label"] == 1])
    for start in range(0, len(order) - SENTENCES, SENTENCES):
        some = [rows[i] for i in order[start : start + SENTENCES]]
        texts = (" ".join(row[side] for row in some) for side in ("a", "b"))
        yield some[0]["id"], some[0]["id"], *texts, "What is this about?"


def _flipped(rows: list[Row], rng: np.random.Generator) -> Made:
    short = [row for row in rows if len(row["original"].split()) <= 120]
    for i in rng.permutation(len(short)):
        row = short[i]
        question = "Is this review positive or negative?"
        yield row["id"], row["id"], row["original"], row["revised"], question


def _edited(change: Callable[[list[str], list[str], np.random.Generator], list[str]]) -> Make:
    """The donor is a paragraph, the target what ``change`` makes of its sentences and of another
    paragraph's."""

    def make(rows: list[Row], rng: np.random.Generator) -> Made:
        for i in rng.permutation(len(rows)):
            donor = rows[i]["context"]["en"]
            strangers = [r for r in rows if r["article"] != rows[i]["article"]]
            other = strangers[int(rng.integers(len(strangers)))]["context"]["en"]
            own = _sentences(donor)
            if len(own) < LEAST:
                continue
            target = " ".join(change(own, _sentences(other), rng))
            yield rows[i]["id"], rows[i]["article"], donor, target, _question(rows[i])

    return make


def _question(row: Row) -> str:
    question = row["qas"][0]["question"]
    return str(question["en"] if isinstance(question, dict) else question)


def _replaced(share: float) -> Callable[[list[str], list[str], np.random.Generator], list[str]]:
    def change(own: list[str], other: list[str], rng: np.random.Generator) -> list[str]:
        n = max(1, round(share * len(own)))
        gone = set(rng.choice(len(own), n, replace=False).tolist())
        return [other[i % len(other)] if i in gone else s for i, s in enumerate(own)]

    return change


def _reordered(own: list[str], other: list[str], rng: np.random.Generator) -> list[str]:
    return own[::-1]


def _neighbour(rows: list[Row], rng: np.random.Generator) -> Made:
    """Another paragraph of the same article."""
    for i in rng.permutation(len(rows)):
        row = rows[i]
        others = [r for r in rows if r["article"] == row["article"] and r["para"] != row["para"]]
        if others:
            other = others[int(rng.integers(len(others)))]["context"]["en"]
            yield row["id"], row["article"], other, row["context"]["en"], _question(row)


BIBLE = "What happens in this passage?"
KINDS: dict[str, tuple[str, Make]] = {
    "one sentence replaced": ("xquad", _edited(_replaced(0.1))),
    "half replaced": ("xquad", _edited(_replaced(0.5))),
    "sentences reversed": ("xquad", _edited(_reordered)),
    "same article": ("xquad", _neighbour),
    "sentiment flipped": ("imdb", _flipped),
    "documentation reworded": ("docs", _reworded),
    "ASV for WEB": ("bible", _translations("ASV")),
    "YLT for WEB": ("bible", _translations("YLT")),
    "same book": ("bible", _other_passage),
}
