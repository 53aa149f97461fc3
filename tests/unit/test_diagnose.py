"""Where a turn parts from the one before it, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsem.diagnose import Divergence, diagnose, diagnose_turn, turn_notes, turns
from kvsem.prompt import render
from kvsem.records import to_requests
from kvsem.types import Request
from tests.tiny import TEMPLATE, fast, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
IDS = st.lists(st.integers(4, 40), max_size=12)
THINKS = fast(
    TOKENIZER.backend_tokenizer,
    TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1]"),
    bos_token="<|bos|>",
)


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return found


def chat(id: str, *contents: str, system: str | None = None) -> list[Request]:
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]
    record = {"id": id, "messages": messages, "system": system}
    return list(to_requests(record, 8, conversations=True))


@given(earlier=IDS, later=IDS)
def test_the_longest_common_prefix(earlier: list[int], later: list[int]) -> None:
    found = diagnose(TOKENIZER, earlier, later)
    n = found.n_common
    assert earlier[:n] == later[:n]
    assert earlier[n : n + 1] != later[n : n + 1] or n == len(earlier) == len(later)
    assert found.is_prefix == (later[: len(earlier)] == earlier)
    assert [found.before_id, found.now_id] == [
        x[n] if n < len(x) else None for x in (earlier, later)
    ]
    assert found.before == (None if n == len(earlier) else TOKENIZER.decode([earlier[n]]))


def test_it_says_where_and_what() -> None:
    the, of, to, end = (ids(text)[0] for text in ("the", " of", " to", "<|im_end|>"))
    assert str(diagnose(TOKENIZER, [the, of], [the, to])) == (
        "parts at token 1 of 2: ' of' became ' to'"
    )
    assert str(diagnose(TOKENIZER, [the, of], [the, of, end])) == "continues all 2 tokens"
    assert str(diagnose(TOKENIZER, [the, of, end], [the, of])) == (
        "parts at token 2 of 3: '<|im_end|>' became the end"
    )


def test_part_of_a_character_is_named() -> None:
    first, second = ids("桥")[:2]
    found = diagnose(TOKENIZER, [first], [second])
    assert found.before
    assert found.now
    assert "\ufffd" not in found.before + found.now


def test_turns_follow_the_longest_that_they_begin_with() -> None:
    long = chat("a", "one", "two", "three", "four", "five")
    other = chat("b", "one", "TWO", "three")
    alone = [Request.rag("r", ["one"], "three"), Request("p", text="one")]
    pairs = list(turns([long[0], other[0], *alone, *long[1:], *other[1:]]))
    assert [(a.id, b.id) for a, b in pairs] == [
        ("b/turn-1", "a/turn-2"),  # the same words: whichever was asked last
        ("a/turn-2", "a/turn-3"),
        ("b/turn-1", "b/turn-2"),
    ]
    tenants = [replace(long[0], tenant="A"), replace(long[1], tenant="B")]
    assert not list(turns(tenants))
    assert not list(turns(reversed(long)))


def test_recorded_replies_count() -> None:
    first, second = chat("c", "the river", "<think>hm</think>the bridge", "why")
    kept = diagnose_turn(TOKENIZER, first, second)
    assert kept.is_prefix
    stripped = diagnose_turn(THINKS, first, second)
    before, now = ids("<think>hm</think>the bridge"), ids("the bridge")
    n = kept.n_earlier
    assert stripped == Divergence(
        n - len(before), n, before[0], now[0], "<", str(TOKENIZER.decode(now[:1]))
    )


def test_without_a_chat_template_a_reply_stands_where_it_was_given() -> None:
    plain = fast(TOKENIZER.backend_tokenizer, None, bos_token="<|bos|>")
    requests = chat("c", "the river", "the bridge", "why", "of stone", "who", system="Be brief.")
    assert render(plain, requests[1]).text == (
        "Be brief.\n\nthe river\n\nAnswer: the bridge\n\nwhy\n\nAnswer:"
    )
    assert [p.text for p in render(plain, requests[1]).pieces[1:]] == [
        "the river",
        "the bridge",
        "why",
    ]
    assert turn_notes(plain, requests) == []


def test_notes_of_a_run() -> None:
    requests = chat("c", "the river", "<think>hm</think>the bridge", "why", "of stone", "who")
    assert turn_notes(TOKENIZER, requests) == []
    assert turn_notes(THINKS, requests[:1]) == []
    (note,) = turn_notes(THINKS, requests)
    how = diagnose_turn(THINKS, *requests[:2])
    assert note == (
        "1 of 2 later turns do not continue the turn before and its reply; "
        f"c/turn-2 from c/turn-1 parts at token {how.n_common} of {how.n_earlier}: "
        f"'<' became {how.now!r}"
    )


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_two_questions_in_a_row_have_no_reply(system: str | None) -> None:
    messages = [{"role": "user", "content": text} for text in ("one", "two")]
    first = {"id": "f", "messages": messages[:1], "system": system}
    both = {"id": "b", "messages": messages, "system": system}
    requests = [r for record in (first, both) for r in to_requests(record, 8, False)]
    ((earlier, later),) = turns(requests)
    found = diagnose_turn(TOKENIZER, earlier, later)
    assert (found.before_id, found.now_id) == (ids("assistant")[0], ids("user")[0])
