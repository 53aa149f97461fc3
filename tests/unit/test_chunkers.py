"""Chunkers: where sentences end, what is grouped, and what an edit leaves alone."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvsem.chunkers.base import estimate_tokens
from kvsem.chunkers.segment import SegmentChunker
from kvsem.chunkers.sentence import SentenceChunker
from kvsem.errors import SettingError

WORDS = ["A cat sat.", "e.g.", "3.14", "Dr.", "好。", "吗？」", "word", "1.", "...", "?!", "Ünï!"]
GAPS = [" ", "\n", "\n\n", "\r\n", "\u2028", "\t", '."', "\x00"]
PIECES = st.sampled_from([*WORDS, *GAPS])
TEXTS = st.one_of(st.text(), st.lists(PIECES).map("".join))


def pieces(text: str, max_tokens: int = 1) -> list[str]:
    """Chunk texts; with the smallest budget every sentence is one."""
    return [text[s.start : s.end] for s in SentenceChunker(max_tokens).split(text)]


@given(TEXTS, st.integers(1, 60))
@example("", 1)
@example(" \n\n ", 1)
@example("好。\n", 1)
def test_spans_cover_the_text_in_order(text: str, max_tokens: int) -> None:
    spans = SentenceChunker(max_tokens).split(text)
    assert "".join(text[s.start : s.end] for s in spans) == text
    edges = [s.start for s in spans] + [len(text)] * bool(text)
    assert edges == sorted(set(edges))
    assert [s.end for s in spans] == edges[1:]
    assert spans == SentenceChunker(max_tokens).split(text)


@given(TEXTS, st.integers(1, 60))
def test_white_space_leads_a_chunk_and_never_ends_or_makes_one(text: str, max_tokens: int) -> None:
    chunks = pieces(text, max_tokens)
    assert all(c.strip() for c in chunks) or len(chunks) == 1
    assert all(not c[-1].isspace() for c in chunks[:-1])


@given(TEXTS, st.integers(1, 60))
def test_a_chunk_above_the_budget_is_one_sentence(text: str, max_tokens: int) -> None:
    for chunk in pieces(text, max_tokens):
        if sum(map(estimate_tokens, pieces(chunk))) > max_tokens:
            assert len(pieces(chunk.strip())) <= 1  # none: the text is white space alone


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", " Two!", " Three?"]),
        ("Pi is 3.14 or so. Next.", ["Pi is 3.14 or so.", " Next."]),
        ("Dr. Smith, e.g. J. R. Smith, left. He ran.", None),
        ("the u.s. army left. it ran.", ["the u.s. army left.", " it ran."]),
        ("See fig. 3 and no. 5. Done.", ["See fig. 3 and no. 5.", " Done."]),
        ("He said no. Then left.", ["He said no.", " Then left."]),
        ("It was 1999. Then 2000.", ["It was 1999.", " Then 2000."]),
        ("1. First item\n2. Second", ["1. First item", "\n2. Second"]),
        ('He said "stop." (Really!) Go.', ['He said "stop."', " (Really!)", " Go."]),
        ("Title\nline two", ["Title", "\nline two"]),
        ("A\r\n\r\nB", ["A", "\r\n\r\nB"]),
        ("你好。今天好吗？很好！", ["你好。", "今天好吗？", "很好！"]),
        ("「行くよ。」と言った。はい。", ["「行くよ。」", "と言った。", "はい。"]),
        ("好。 1. 项目", ["好。", " 1. 项目"]),
        ("Wait... what?! Yes.", ["Wait...", " what?!", " Yes."]),
        ("kvsem.types and a.b.c stay", ["kvsem.types and a.b.c stay"]),
        ("  lead. Tail.  \n", ["  lead.", " Tail.  \n"]),
    ],
)
def test_sentences(text: str, sentences: list[str] | None) -> None:
    assert pieces(text) == (sentences or [text[:34], text[34:]])


def test_sentences_are_grouped_up_to_the_budget() -> None:
    text = " ".join(["Five words are in here."] * 10)  # 1.3 * 5 = 6.5 tokens each
    assert [len(c.split()) for c in pieces(text, 20)] == [15, 15, 15, 5]


def test_a_blank_line_always_parts_and_a_line_break_does_not() -> None:
    assert pieces("One.\n\nTwo.\nThree.", 100) == ["One.", "\n\nTwo.\nThree."]
    assert pieces("一。\n\n二。三。", 100) == ["一。", "\n\n二。三。"]


def test_a_long_sentence_stands_alone_uncut() -> None:
    long = " ".join(["word"] * 300) + "."
    assert pieces(f"Short. {long} Short.", 20) == ["Short.", f" {long}", " Short."]


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=2, max_size=5))
def test_an_edit_leaves_the_other_paragraphs_alone(shape: list[list[int]]) -> None:
    paragraphs = [" ".join("w" + " w" * n + "." for n in lengths) for lengths in shape]
    chunker = SentenceChunker(20)
    for edited in range(len(paragraphs)):
        other = list(paragraphs)
        other[edited] = "An inserted sentence of some length. " + other[edited]
        n_after = sum(len(chunker.split(p)) for p in paragraphs[edited + 1 :])
        n_before = sum(len(chunker.split(p)) for p in paragraphs[:edited])
        old, new = (pieces("\n\n".join(p), 20) for p in (paragraphs, other))
        assert old[:n_before] == new[:n_before]
        assert old[len(old) - n_after :] == new[len(new) - n_after :]


def test_a_long_word_of_stops_is_cut_in_linear_time() -> None:
    # quadratic matching would need minutes here, and the test would hit its timeout
    text = "." * 400_000 + "x " + '"' * 400_000 + " y"
    assert pieces(text) == [text]


def test_estimate() -> None:
    assert estimate_tokens("one two three") == pytest.approx(3.9)
    assert estimate_tokens("a" * 40) == 10
    assert estimate_tokens("今天") == 3


def test_segment_is_one_span() -> None:
    assert SegmentChunker().split("") == []
    assert [(s.start, s.end) for s in SegmentChunker().split("a. b.\n\nc")] == [(0, 8)]


@pytest.mark.parametrize("max_tokens", [0, -3, 1.5, True, "abc", None])
def test_budget_is_checked(max_tokens: Any) -> None:
    with pytest.raises(SettingError, match=r"^max_tokens=.*: expected a whole number from 1"):
        SentenceChunker(max_tokens)
