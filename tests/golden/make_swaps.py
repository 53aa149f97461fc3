"""The pinned swaps: passages of ours with places that change, and edits of public-domain text.

python -m tests.golden.make_swaps ../shared/data/paraphrase/parallel_passages_pd.jsonl.gz

A place is written ``{{kind|one|other|question?}}``; each makes two records, one in either
direction, with every other place at its first value. The edits are of the World English Bible.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUT = HERE / "swaps.jsonl"
SYSTEM = "Answer the question from the text. Reply with a short phrase."
PLACE = re.compile(r"\{\{(\w+)\|([^|}]+)\|([^|}]+)\|([^|}]+)\}\}")
KINDS = ("negation", "antonym", "number", "unit", "date", "name", "order")
EDITS = (
    ("negation", "not", "always"),
    ("number", "two", "nine"),
    ("number", "three", "eleven"),
    ("number", "seven", "six"),
    ("number", "ten", "eighty"),
    ("number", "thousand", "hundred"),
    ("name", "David", "Joab"),
    ("name", "Jerusalem", "Samaria"),
    ("name", "Israel", "Edom"),
    ("name", "Moses", "Korah"),
    ("date", "morning", "evening"),
    ("date", "day", "night"),
    ("unit", "cubits", "spans"),
    ("unit", "days", "years"),
    ("antonym", "father", "mother"),
    ("antonym", "before", "after"),
    ("antonym", "son", "daughter"),
    ("antonym", "up", "down"),
)
EACH = 3  # passages an edit


def of_templates(path: Path, lang: str) -> Iterator[dict[str, Any]]:
    for i, template in enumerate(path.read_text(encoding="utf-8").strip().split("\n\n")):
        places = list(PLACE.finditer(template))
        for j, place in enumerate(places):
            texts = [_fill(template, places, j, side) for side in (2, 3)]
            for name, (target, start), (donor, _), said, other in (
                ("there", texts[0], texts[1], place[2], place[3]),
                ("back", texts[1], texts[0], place[3], place[2]),
            ):
                a, b = _differing(said, other, "" if lang == "zh" else " ")
                yield {
                    "id": f"{lang}-{i}-{j}-{name}",
                    "kind": place[1],
                    "lang": lang,
                    "group": f"{lang}-{i}",
                    "system": SYSTEM,
                    "donor": donor,
                    "target": target,
                    "changed": [[start + a, start + b]],
                    "question": place[4],
                }


def _differing(said: str, other: str, space: str) -> tuple[int, int]:
    """Characters of ``said`` between the words that both begin and end with; of a text that only
    lacks some, the first word."""
    here, there = (text.split(space) if space else list(text) for text in (said, other))
    head = _common(here, there)
    tail = _common(here[head:][::-1], there[head:][::-1])
    if head + tail >= len(here):
        return 0, len(here[0])
    start = len(space.join([*here[:head], ""])) if head else 0
    return start, start + len(space.join(here[head : len(here) - tail]))


def _common(here: list[str], there: list[str]) -> int:
    """Length of the common head."""
    same = (a == b for a, b in zip(here, there, strict=False))
    return sum(1 for _ in takewhile(bool, same))


def _fill(template: str, places: list[re.Match[str]], which: int, side: int) -> tuple[str, int]:
    """The text with one place at ``side`` (a group of `PLACE`), and where that place starts."""
    text, at, start = "", 0, 0
    for i, place in enumerate(places):
        text += template[at : place.start()]
        start = len(text) if i == which else start
        text += place[side if i == which else 2]
        at = place.end()
    return text + template[at:], start


def of_public(path: Path) -> Iterator[dict[str, Any]]:
    """Every edit in the first passages that hold its word, of 80 to 150 words; nothing is asked
    that bears on it."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        passages = [json.loads(line) for line in lines]
    texts = [(p["id"], _head(p["versions"]["WEB"])) for p in passages]
    for kind, old, new in EDITS:
        word = re.compile(rf"\b{old}\b")
        holding = [(name, text) for name, text in texts if len(word.findall(text)) == 1]
        for name, target in holding[:EACH]:
            found = next(word.finditer(target))
            yield {
                "id": f"web-{name}-{old}",
                "kind": kind,
                "lang": "en",
                "group": name,
                "system": SYSTEM,
                "donor": word.sub(new, target),
                "target": target,
                "changed": [list(found.span())],
                "question": None,
            }


def _head(text: str) -> str:
    """Whole sentences up to 150 words."""
    kept: list[str] = []
    for sentence in re.split(r"(?<=[.!?]) ", text):
        if sum(len(s.split()) for s in (*kept, sentence)) > 150:
            break
        kept.append(sentence)
    return " ".join(kept)


def write(records: Iterable[dict[str, Any]], path: Path) -> int:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def own() -> list[dict[str, Any]]:
    return [
        *of_templates(HERE / "swaps_en.txt", "en"),
        *of_templates(HERE / "swaps_zh.txt", "zh"),
    ]


if __name__ == "__main__":
    print(write([*own(), *of_public(Path(sys.argv[1]))], OUT), "swaps")
