"""Chunkers that know what a text is made of, and the one that does not."""

import ast
import gzip
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from kvsem.chunkers.base import Chunker, estimate_tokens
from kvsem.chunkers.code import CodeChunker
from kvsem.chunkers.dialogue import DialogueChunker
from kvsem.chunkers.fixed import FixedChunker
from kvsem.chunkers.markdown import MarkdownChunker
from kvsem.chunkers.sentence import SentenceChunker
from kvsem.chunkers.topic import TopicChunker, similarities, valleys
from kvsem.embedders.hashing import HashingEmbedder
from kvsem.errors import SettingError

DATA = Path(__file__).parents[3] / "shared" / "data"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # seven code points, one character


def pieces(chunker: Chunker, text: str) -> list[str]:
    return [text[s.start : s.end] for s in chunker.split(text)]


def texts(chunker: Chunker, text: str) -> list[str]:
    return [piece.strip() for piece in pieces(chunker, text)]


def public(name: str, limit: int) -> list[dict[str, Any]]:
    """The first records of a public file."""
    if not DATA.is_dir():
        pytest.skip("the public data is not beside the repository (../shared/data)")
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(limit), strict=False)]


# fixed ----------------------------------------------------------------------------------------


def test_fixed_cuts_ahead_of_the_last_white_space() -> None:
    assert pieces(FixedChunker(11), "one two three four") == ["one two", " three four"]
    assert pieces(FixedChunker(5), "one two three") == ["one", " two", " thre", "e"]


@pytest.mark.parametrize(
    ("unit", "size", "text", "want"),
    [
        ("characters", 3, "今天天气很好", ["今天天", "气很好"]),
        ("characters", 4, "abcdefghij", ["abcd", "efgh", "ij"]),
        ("characters", 3, FAMILY * 2 + "x", [FAMILY, FAMILY, "x"]),
        ("characters", 2, "ae\u0301\u0302b", ["a", "e\u0301\u0302", "b"]),
        ("characters", 1, "\r\n\r\n", ["\r\n", "\r\n"]),
        ("characters", 1, "\ud83d\ude00x", ["\ud83d\ude00", "x"]),
        ("characters", 3, "กำลัง", ["กำ", "ลัง"]),
        ("words", 2, "one two  three\n", ["one two", "  three\n"]),
        ("words", 2, "天气很好 ok 吗", ["天气", "很好", " ok 吗"]),
        ("words", 1, "x" * 900, ["x" * 900]),
        ("words", 1, "x天y", ["x", "天", "y"]),
    ],
)
def test_fixed_never_cuts_a_character(unit: Any, size: int, text: str, want: list[str]) -> None:
    assert pieces(FixedChunker(size, unit), text) == want


@given(
    st.text(
        st.sampled_from([*"ab \n1天é", "\u0301", "\u200d", "👩", "👧", "\U0001f1e9", "ก", "ำ"])
    ),
    st.integers(1, 9),
    st.sampled_from(["characters", "words"]),
)
def test_fixed_boundaries_are_between_characters(text: str, size: int, unit: Any) -> None:
    chunks = pieces(FixedChunker(size, unit), text)
    assert "".join(chunks) == text
    assert [c for chunk in chunks for c in regex.findall(r"\X", chunk)] == regex.findall(
        r"\X", text
    )
    if unit == "characters":
        assert all(len(c) <= size or len(regex.findall(r"\X", c)) == 1 for c in chunks)


# markdown -------------------------------------------------------------------------------------

PAGE = """# Title

A paragraph
of two lines.

## Section

- one
- two

  still two
  1. nested
- three

| a | b |
|---|---|
| 1 | 2 |

```python
# no heading

def f(): ...
```

Under
=====
> quoted
>
> twice
"""
BLOCKS = [
    "# Title\n\nA paragraph\nof two lines.",
    "## Section\n\n- one\n- two\n\n  still two\n  1. nested\n- three",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "```python\n# no heading\n\ndef f(): ...\n```",
    "Under\n=====\n> quoted\n>\n> twice",
]


@pytest.mark.parametrize("line", ["\n", "\r\n", "\r"])
def test_markdown_keeps_blocks_whole(line: str) -> None:
    want = [block.replace("\n", line) for block in BLOCKS]
    assert texts(MarkdownChunker(1), PAGE.replace("\n", line)) == want


def test_markdown_sections_open_chunks_and_short_ones_join() -> None:
    assert texts(MarkdownChunker(1000), PAGE) == [
        BLOCKS[0],
        "\n\n".join(BLOCKS[1:4]),
        BLOCKS[4],
    ]
    assert texts(MarkdownChunker(1000, min_tokens=1000), PAGE) == [PAGE.strip()]


def test_markdown_a_heading_stands_with_what_it_heads() -> None:
    text = "# A\n\n## B\n\n### C\n\ntext\n\n# D\n\n# E\n"
    assert texts(MarkdownChunker(1), text) == ["# A\n\n## B\n\n### C\n\ntext", "# D\n\n# E"]


def test_markdown_an_open_fence_runs_to_the_end_and_html_is_a_block() -> None:
    text = "<rules>\n# one\n</rules>\n\nText.\n\n~~~\n# two\n\n# three"
    assert texts(MarkdownChunker(1), text) == [
        "<rules>\n# one\n</rules>",
        "Text.",
        "~~~\n# two\n\n# three",
    ]


def test_markdown_an_edit_leaves_other_sections() -> None:
    sections = [f"## S{i}\n\n" + f"Text {i} is here. " * 30 for i in range(6)]
    other = [*sections[:2], "## New\n\nInserted.", *sections[3:]]
    chunker = MarkdownChunker(64)
    old, new = (texts(chunker, "\n\n".join(s)) for s in (sections, other))
    assert len(set(old) & set(new)) == 5


def test_markdown_real_prompts_keep_tables_fences_and_lists() -> None:
    for record in public("system_prompts/agent_prompt_variants.jsonl.gz", 3):
        chunks = pieces(MarkdownChunker(), record["text"])
        assert "".join(chunks) == record["text"]
        assert len(chunks) > 20
        for chunk in chunks[1:]:
            assert chunk.lstrip("\r\n \t") != chunk  # a line break leads
        for chunk in chunks:
            fences = [line for line in chunk.splitlines() if line.startswith("```")]
            assert len(fences) % 2 == 0, chunk


# code -----------------------------------------------------------------------------------------

MODULE = '''"""Über 模块."""
import os
import sys  # für später

LIMIT = 3


# What f is for.

# 说明
@decorated(
    "é"
)
def f(x):
    """Docstring: 日本語 🎉.

def not_a_function(): ...
    """
    return x  # ends
    # still of f

# ahead of A
class A(
    Base,
):
    """A class."""

    size = 3

    # of m
    def m(self): return 1; y = 2

    async def n(self):

        return 2
x = 1; y = 2
z = (
    3
)
def last(): pass
'''
PARTS = [
    '"""Über 模块."""\nimport os\nimport sys  # für später\n\nLIMIT = 3',
    '# What f is for.\n\n# 说明\n@decorated(\n    "é"\n)\ndef f(x):\n'
    '    """Docstring: 日本語 🎉.\n\ndef not_a_function(): ...\n    """\n    return x  # ends\n'
    "    # still of f",
    '# ahead of A\nclass A(\n    Base,\n):\n    """A class."""\n\n    size = 3',
    "# of m\n    def m(self): return 1; y = 2",
    "async def n(self):\n\n        return 2",
    "x = 1; y = 2\nz = (\n    3\n)",
    "def last(): pass",
]


@pytest.mark.parametrize("line", ["\n", "\r\n", "\r"])
def test_code_functions_classes_and_what_belongs_to_them(line: str) -> None:
    whole = [*PARTS[:2], "\n\n    ".join(PARTS[2:5]), *PARTS[5:]]
    text = MODULE.replace("\n", line)
    assert texts(CodeChunker(1000, 0), text) == [p.replace("\n", line) for p in whole]
    assert texts(CodeChunker(36, 0), text) == [p.replace("\n", line) for p in PARTS]


def test_code_short_definitions_join() -> None:
    text = "\n\n".join(f"def f{i}():\n    return {i}" for i in range(6))
    assert len(pieces(CodeChunker(100, 0), text)) == 6
    joined = pieces(CodeChunker(100, 16), text)
    assert 1 < len(joined) < 6
    assert all(estimate_tokens(chunk) >= 16 for chunk in joined[:-1])


def test_code_invalid_escapes_warn_nobody() -> None:
    assert texts(CodeChunker(100, 0), 'a = "\\d"\ndef f(): pass\n') == [
        'a = "\\d"',
        "def f(): pass",
    ]


@pytest.mark.parametrize(
    "text", ["def f(:\n", "\x00", "(" * 5000, "\ufeffx = 1", "-" * 20000 + "1"]
)
def test_code_that_does_not_parse_is_one_block(text: str) -> None:
    assert pieces(CodeChunker(), text) == [text]


JAVA = """package a;

class Größe {
    int size;

    int first() {
        int x = 1;

        return x;
    }

    int second() {
        return 2;
    }

}

class B { }
"""


def test_code_other_languages_are_cut_at_blank_lines_of_the_least_indentation() -> None:
    outer = texts(CodeChunker(1000, 0), JAVA)
    assert outer == [
        "package a;",
        JAVA[JAVA.index("class G") : JAVA.index("class B")].strip(),
        "class B { }",
    ]
    inner = texts(CodeChunker(20, 0), JAVA)
    assert inner == [
        "package a;",
        "class Größe {\n    int size;",
        "int first() {\n        int x = 1;\n\n        return x;\n    }",
        "int second() {\n        return 2;\n    }\n\n}",
        "class B { }",
    ]


def test_code_one_changed_function_changes_one_chunk() -> None:
    for record in public("code/classeval.jsonl.gz", 20):
        text = record["solution"]
        chunker = CodeChunker(64, 0)
        old = pieces(chunker, text)
        assert "".join(old) == text
        if len(old) < 4:
            continue
        at = text.index(old[2]) + len(old[2])
        new = pieces(chunker, text[:at] + "\n        # changed, 改\n" + text[at:].lstrip("\n"))
        assert len(new) == len(old)
        assert sum(a.strip() != b.strip() for a, b in zip(old, new, strict=True)) == 1


def test_code_real_functions_are_whole() -> None:
    for record in public("code/classeval.jsonl.gz", 30):
        chunks = pieces(CodeChunker(1, 0), record["solution"])
        found = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(record["solution"]))
            if isinstance(node, ast.FunctionDef)
        ]
        defs = [sum(line.strip().startswith("def ") for line in c.splitlines()) for c in chunks]
        assert sum(defs) >= len(found)
        outer = [c for c, n in zip(chunks, defs, strict=True) if n and "class " not in c]
        for chunk in outer:
            ast.parse("class X:\n" + chunk if chunk.lstrip("\n").startswith(" ") else chunk)


# dialogue -------------------------------------------------------------------------------------

LONG = "This answer is long enough to stand alone, with more than sixteen tokens in its words."


@pytest.mark.parametrize(
    "heads",
    [
        ("User:", "Assistant:"),
        ("**Human:**", "**AI**:"),
        ("Ana Gómez:", "Dr. O’Neil:"),
        ("用户：", "助手："),
        ("[12:30] Bo:", "[12:31:05] Li:"),
        ("> Bo:", "> Li:"),
        ("### User:", "### Assistant:"),
        ("<|im_start|>user\n", "<|im_start|>assistant\n"),
    ],
)
@pytest.mark.parametrize("gap", ["\n", "\n\n", "\r\n", "\r"])
def test_dialogue_turns(heads: tuple[str, str], gap: str) -> None:
    turns = [f"{heads[i % 2]} {LONG} Note: {i}" for i in range(4)]
    assert texts(DialogueChunker(), gap.join(turns)) == turns


@pytest.mark.parametrize(
    "text",
    [
        f"Note: {LONG}\nMore.\nNote: {LONG}",
        f"See https://a.b/c\nhttp://x: {LONG}\nSummary: {LONG}",
        f"def f(x):\n    if x:\n        return {LONG}",
        "It rained. User: this is within a line.",
        f"12: {LONG}\n13: {LONG}",
    ],
)
def test_dialogue_what_is_no_turn(text: str) -> None:
    assert pieces(DialogueChunker(), text) == [text]


def test_dialogue_short_turns_join_and_long_ones_are_cut_at_blank_lines() -> None:
    text = f"User: Hi\nAssistant: {LONG}\nUser: Ok.\nAssistant: {LONG}"
    assert texts(DialogueChunker(256, 16), text) == [
        f"User: Hi\nAssistant: {LONG}",
        f"User: Ok.\nAssistant: {LONG}",
    ]
    long = f"User: {LONG}\n\n{LONG}\nmore\n\n{LONG}\nAssistant: {LONG}"
    assert texts(DialogueChunker(40, 0), long) == [
        f"User: {LONG}\n\n{LONG}\nmore"[: 6 + len(LONG)],
        f"{LONG}\nmore",
        LONG,
        f"Assistant: {LONG}",
    ]


def test_dialogue_a_line_break_of_two_characters_is_no_blank_line() -> None:
    text = f"User: {LONG}\r\n{LONG}\r\n\r\n{LONG}"
    assert texts(DialogueChunker(20, 0), text) == [f"User: {LONG}\r\n{LONG}", LONG]


def test_dialogue_an_edited_turn_leaves_the_others() -> None:
    for meeting in public("rag/qmsum_meetings.jsonl.gz", 4):
        turns = [
            f"{t['speaker']}: {' '.join(t['text'].split())}" for t in meeting["transcript"][:60]
        ]
        chunker = DialogueChunker()
        old = texts(chunker, "\n".join(turns))
        long = [t for t in turns if estimate_tokens(t) >= 16]
        assert len(long) > 10
        assert {turn.splitlines()[-1] for turn in old} >= set(long)
        speaker = turns[30].partition(":")[0]
        changed = [*turns[:30], f"{speaker}: {LONG}", *turns[31:]]
        assert len(set(old) - set(texts(chunker, "\n".join(changed)))) <= 2


# topic ----------------------------------------------------------------------------------------

SUBJECTS = (
    ["The bridge of stone crosses the river.", "Its stone arches carry the river road."],
    ["Copper melts at a high temperature.", "Molten copper metal conducts heat."],
    ["The singer released a third album.", "Her album topped the charts as a singer."],
)


class ByWord:
    """Unit vectors that name a sentence's subject, so that the boundaries are known."""

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        keys = ("river", "opper", "singer")
        rows = [[float(key in text) for key in keys] for text in texts]
        return np.array(rows, dtype=np.float32)


def topic(**more: Any) -> TopicChunker:
    parts: dict[str, Any] = {"sentences": SentenceChunker(1), "embedder": ByWord(), "min_tokens": 0}
    return TopicChunker(**parts | more)


@pytest.mark.parametrize("window", [1, 2])
def test_topic_boundaries_are_where_the_subject_changes(window: int) -> None:
    said = [sentence for subject in SUBJECTS for sentence in subject * 3]
    chunks = pieces(topic(window=window), " ".join(said))
    assert [chunk.strip() for chunk in chunks] == [" ".join(subject * 3) for subject in SUBJECTS]


def test_topic_lengths() -> None:
    same = " ".join(SUBJECTS[0] * 20)
    assert max(map(estimate_tokens, pieces(topic(max_tokens=40), same))) <= 40
    said = " ".join(sentence for subject in SUBJECTS for sentence in subject)
    assert len(pieces(topic(window=1), said)) == 3
    assert len(pieces(topic(window=1, min_tokens=30), said)) == 2


def test_topic_text_without_spaces() -> None:
    text = "桥在河上river。石桥river很老。铜opper是金属。铜opper导热。"
    assert [len(chunk) for chunk in pieces(topic(window=1), text)] == [20, 19]


def test_topic_far_boundaries_stay_where_a_sentence_changes() -> None:
    chunker = TopicChunker(SentenceChunker(1), HashingEmbedder(), min_tokens=0)
    rng = random.Random(0)
    said = [s for _ in range(8) for s in rng.sample([s for both in SUBJECTS for s in both], 6)]
    old = pieces(chunker, " ".join(said))
    said[2] = "Nothing of this was said before."
    new = pieces(chunker, " ".join(said))
    assert old != new
    assert old[-3:] == new[-3:]


def test_similarities_and_valleys() -> None:
    vectors = np.eye(2, dtype=np.float32)[[0, 0, 1, 1, 1]]
    assert similarities(vectors, 1).tolist() == [1, 0, 1, 1]
    assert similarities(vectors, 2).tolist() == pytest.approx([0.7071, 0, 0.7071, 1])
    assert similarities(np.zeros((2, 3), np.float32), 1).tolist() == [0]
    assert valleys(np.array([1.0, 0.2, 0.9]), 0.5) == [False, True, False]
    assert valleys(np.array([1.0, 0.8, 0.9]), 0.5) == [False] * 3
    assert valleys(np.array([0.3, 0.3, 0.9]), 0.5) == [False, True, False]
    assert valleys(np.array([0.5]), 0.0) == [True]
    assert valleys(np.array([]), 0.0) == []


# all ------------------------------------------------------------------------------------------

WRONG: tuple[Any, ...] = (2.5, math.nan, "abc", None, True)  # no whole number


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: FixedChunker(0), "size"),
        (lambda: FixedChunker(5, "lines"), "unit"),  # type: ignore[arg-type]
        (lambda: MarkdownChunker(0), "max_tokens"),
        (lambda: CodeChunker(8, 9), "min_tokens"),
        (lambda: DialogueChunker(8, -1), "min_tokens"),
        (lambda: topic(window=0), "window"),
        (lambda: topic(depth=-0.1), "depth"),
        (lambda: topic(max_tokens=1, min_tokens=2), "min_tokens"),
        *((lambda bad=bad: FixedChunker(bad), "size") for bad in WRONG),
        *((lambda bad=bad: MarkdownChunker(bad), "max_tokens") for bad in WRONG),
        *((lambda bad=bad: CodeChunker(8, bad), "min_tokens") for bad in WRONG),
        *((lambda bad=bad: DialogueChunker(bad), "max_tokens") for bad in WRONG),
        *((lambda bad=bad: topic(window=bad), "window") for bad in WRONG),
        *((lambda bad=bad: topic(depth=bad), "depth") for bad in ("abc", None, True, math.nan)),
        *((lambda bad=bad: topic(sentences=bad), "sentences") for bad in (None, "abc", 3)),
        *((lambda bad=bad: topic(embedder=bad), "embedder") for bad in (None, "abc", 3)),
    ],
)
def test_settings_are_checked(make: Any, field: str) -> None:
    with pytest.raises(SettingError) as raised:
        make()
    assert raised.value.field == field
