"""Pairs of donor and target by what was changed between them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path

import numpy as np

from experiments.embeddings.pairs import FILES, Pair, pairs
from experiments.gates.measure import SWAPS, chosen
from experiments.public import Record, read, sentences
from experiments.reuse_map.prepare import prompts

REWORDED = ("ASV for WEB", "YLT for WEB", "documentation reworded")
REORDERED = "sentences reversed"
SWAPPED = ("number", "date", "name", "negation", "antonym", "unit", "order")
LEFT_OUT, PUT_IN = "paragraph left out", "paragraph put in"
KINDS = (REORDERED, *REWORDED, "one parameter", "inserted sentence", LEFT_OUT, PUT_IN, *SWAPPED)
PROMPTS = "system_prompts/agent_prompt_variants.jsonl.gz"
AHEAD, BEHIND = 100, 150  # words around a difference of system prompts
LEAST = 4  # sentences of a paragraph that gets another one
WHOLE = 1_000_000  # words: nothing is cut


def made(folder: Path, kinds: Sequence[str], n: int, max_words: int, seed: int) -> list[Pair]:
    """``n`` pairs of each kind, in a seeded order; ``folder`` holds the public files.

    Where sentences are moved or inserted, only paragraphs of at most ``max_words`` count, so that
    nothing else is changed; translations are cut to as many words. Swaps are English.
    """
    files = {name: folder / path for name, path in FILES.items()}
    found: list[Pair] = []
    for kind in kinds:
        own: Iterator[Pair]
        if kind in REWORDED:
            own = iter(pairs(files, [kind], n, max_words, seed))
        elif kind == REORDERED:
            all_ = pairs(files, [kind], WHOLE, WHOLE, seed)
            own = (pair for pair in all_ if len(pair.target.split()) <= max_words)
        elif kind == "one parameter":
            own = map(around, prompts(folder))
        elif kind == "inserted sentence":
            own = inserted(list(read(files["xquad"])), max_words, seed)
        elif kind in (LEFT_OUT, PUT_IN):
            own = parted(list(read(files["xquad"])), kind, max_words)
        else:
            own = swapped(kind, n)
        found += islice(own, n)
    return found


def around(record: Record) -> Pair:
    """Of two system prompts the first difference, with `AHEAD` words ahead and `BEHIND` behind."""
    whole = record["donor"], record["target"]
    donor, target = ([found.span() for found in re.finditer(r"\S+", text)] for text in whole)
    agree = SequenceMatcher(None, whole[0].split(), whole[1].split(), autojunk=False)
    _, a, b, c, d = next(step for step in agree.get_opcodes() if step[0] != "equal")
    kind = "one parameter"
    return Pair(
        f"{kind}/{record['id']}",
        kind,
        record["id"],
        _stretch(whole[0], donor, a, b),
        _stretch(whole[1], target, c, d),
        record["question"],
    )


def _stretch(text: str, words: Sequence[tuple[int, int]], start: int, end: int) -> str:
    first, last = max(0, start - AHEAD), min(len(words), end + BEHIND) - 1
    return text[words[first][0] : words[last][1]]


def inserted(rows: Sequence[Record], max_words: int, seed: int) -> Iterator[Pair]:
    """A sentence of another article somewhere inside a paragraph."""
    kind, rng = "inserted sentence", np.random.default_rng([seed, len(rows)])
    for i in rng.permutation(len(rows)):
        row, donor = rows[i], rows[i]["context"]["en"]
        strangers = [r for r in rows if r["article"] != row["article"]]
        other = sentences(strangers[int(rng.integers(len(strangers)))]["context"]["en"])
        own = sentences(donor)
        if len(own) < LEAST or len(donor.split()) > max_words:
            continue
        at = int(rng.integers(1, len(own)))
        strange = other[int(rng.integers(len(other)))]
        target = " ".join([*own[:at], strange, *own[at:]])
        question = row["qas"][0]["question"]["en"]
        yield Pair(f"{kind}/{row['id']}", kind, row["article"], " ".join(own), target, question)


def parted(rows: Sequence[Record], kind: str, max_words: int) -> Iterator[Pair]:
    """Of every article a paragraph, with and without another one in its middle."""
    articles = defaultdict(list)
    for row in rows:
        if len(row["context"]["en"].split()) <= max_words:
            articles[row["article"]].append(row)
    for article, (row, other, *_) in ((a, r) for a, r in articles.items() if len(r) > 1):
        own = sentences(row["context"]["en"])
        half = len(own) // 2
        texts = [
            " ".join([*own[:half], *more, *own[half:]]) for more in ([], [other["context"]["en"]])
        ]
        donor, target = texts if kind == PUT_IN else reversed(texts)
        question = row["qas"][0]["question"]["en"]
        yield Pair(f"{kind}/{row['id']}", kind, article, donor, target, question)


def swapped(kind: str, n: int) -> Iterator[Pair]:
    """English swaps of one kind that bear the answer, spread over the passages."""
    for record in chosen(SWAPS, n):
        if (record["lang"], record["kind"]) == ("en", kind):
            texts = (record[name] for name in ("donor", "target", "question"))
            yield Pair(f"{kind}/{record['id']}", kind, record["group"], *texts)
