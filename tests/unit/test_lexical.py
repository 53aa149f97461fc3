"""The lexical gate: what differs is computed or refused, what says the same is not touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsem.errors import DataError, SettingError
from kvsem.gates.all_of import AllOf
from kvsem.gates.base import Candidate, Decision, Gate
from kvsem.gates.deny import DenyGate
from kvsem.gates.lexical import LexicalGate
from kvsem.gates.threshold import ThresholdGate
from kvsem.types import Span
from kvsem.wording import cut, differences


def computed(target: str, donor: str, reach: int | str = 0) -> list[str]:
    decision = LexicalGate(reach, min_kept=0).accept(target, Candidate(donor, 0.9))
    assert decision.accepted
    return [target[span.start : span.end] for span in decision.compute]


def kinds(target: str, donor: str) -> list[str]:
    return [found.kind for found in differences(cut(target), cut(donor))]


@pytest.mark.parametrize(
    ("target", "donor", "kind", "spans"),
    [
        ("The lamp is on at noon.", "The lamp is off at noon.", "antonym", ["on"]),
        ("It was legal to park here.", "It was illegal to park here.", "antonym", ["legal"]),
        ("He is careful with it.", "He is careless with it.", "antonym", ["careful"]),
        ("It isn't safe to drink.", "It is safe to drink.", "negation", ["isn't"]),
        ("It is safe to drink.", "It is not safe to drink.", "negation", ["safe"]),
        ("They came without her.", "They came with her.", "negation", ["without"]),
        ("Take 50 mg of it.", "Take 55 mg of it.", "number", ["50"]),
        ("Take fifty of them.", "Take 15 of them.", "number", ["fifty"]),
        ("It cost 1,250 here.", "It cost 1,350 here.", "number", ["1,250"]),
        ("The third door there.", "The 2nd door there.", "number", ["third"]),
        ("Take 50 mg of it.", "Take 50 g of it.", "unit", ["mg"]),
        ("A loss of 5% there.", "A loss of 5$ there.", "unit", ["%"]),
        ("We meet on Monday here.", "We meet on Friday here.", "date", ["Monday"]),
        ("On 3 May it rained.", "On 4 May it rained.", "date", ["3"]),
        ("The train of 12:30 left.", "The train of 12:50 left.", "date", ["12:30"]),
        ("I met Anna there.", "I met Boris there.", "name", ["Anna"]),
        ("Anna was there.", "Boris was there.", "name", ["Anna"]),
        ("A red house there.", "A blue house there.", "word", ["red"]),
        ("会议在三月开始。", "会议在四月开始。", "number", ["三"]),
        ("他今天去公司。", "他今天不去公司。", "negation", ["去"]),
        ("水位上升了。", "水位下降了。", "antonym", ["上升"]),
        ("药量是五十毫克。", "药量是五十毫升。", "unit", ["克"]),
        ("他住在上海。", "他住在广州。", "characters", ["上海"]),
    ],
)
def test_what_differs_is_computed_whole(
    target: str, donor: str, kind: str, spans: list[str]
) -> None:
    assert kinds(target, donor) == [kind]
    assert computed(target, donor) == spans


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Take fifty of them.", "Take 50 of them."),
        ("It grew by 5 percent.", "It grew by 5%."),
        ("The 1st of them.", "The first of them."),
        ("It cost 1,250.", "It cost 1250."),
        ("It isn\u2019t his.", "It isn't his."),
        ("twenty-five cats", "25 cats"),
    ],
)
def test_the_same_written_otherwise_is_no_difference(one: str, other: str) -> None:
    assert kinds(one, other) == []
    assert computed(one, other) == []


def test_moved_words_are_computed_with_all_that_they_moved_over() -> None:
    assert computed("So Bob paid Alice in the end.", "So Alice paid Bob in the end.") == [
        "Bob paid Alice"
    ]
    assert kinds("The hut is behind the barn.", "The barn is behind the hut.") == ["order"]
    assert computed("听说馆长感谢市长。", "听说市长感谢馆长。") == ["馆长感谢市"]


def test_a_sentence_that_moved_is_not_computed_with_all_the_text_between() -> None:
    a, b, c = "The river froze.", "Nobody crossed the long bridge.", "A market was held."
    assert computed(f"{b} {c} {a}", f"{a} {b} {c}") == ["The river froze."]


REACHED = "Turn the lamp on at noon, then leave the room. Lock it."


@pytest.mark.parametrize(
    ("reach", "span"),
    [
        (0, "on"),
        (2, "on at noon"),
        (3, "on at noon, then"),
        ("clause", "on at noon,"),
        ("sentence", "on at noon, then leave the room."),
        ("text", "on at noon, then leave the room. Lock it."),
        (99, "on at noon, then leave the room."),
    ],
)
def test_how_far_a_difference_reaches(reach: int | str, span: str) -> None:
    assert computed(REACHED, REACHED.replace("on at", "off at"), reach) == [span]


SENTENCE = (
    "The {}th lamp stood on the long table by the green door of the house, and nobody saw it."
)
LONG = " ".join(map(SENTENCE.format, range(5)))  # 95 words


def spans(target: str, wide_from: float | None) -> list[str]:
    decision = LexicalGate(2, wide_from=wide_from).accept(target, Candidate(LONG, 0.9))
    return [target[s.start : s.end] for s in decision.compute]


@pytest.mark.parametrize(
    ("other", "near", "wide"),
    [
        (
            SENTENCE.format(9),
            "9th lamp stood",
            "9th lamp stood on the long table by the green door",
        ),
        (SENTENCE.format(3).replace("long", "big"), "big", "big table by the green door"),
        (SENTENCE.format(3).replace(" long", ""), "table", "table by the green door"),
    ],
)
def test_in_a_long_text_a_difference_carries_further(other: str, near: str, wide: str) -> None:
    """Ten words behind a difference of meaning, five behind another, and to what ends the sentence
    and begins the next."""
    target = LONG.replace(SENTENCE.format(3), other)
    assert spans(target, None) == [near]
    assert spans(target, 0.5) == [wide, ". The 4th"]
    short = " ".join([other, SENTENCE.format(4)[:80]])
    assert spans(short, 0.5)[0] == spans(short, None)[0]


def test_a_clause_ends_where_it_does() -> None:
    """A word left out behind a mark: the next clause is not begun."""
    assert computed("he came , but slowly", "he came not , but slowly", "clause") == [","]


def test_what_begins_the_next_sentence_is_two_words_whatever_ends_this_one() -> None:
    for end in ('."', "?!", "."):
        other = SENTENCE.format(3).replace("it.", f"it{end}")
        target = LONG.replace(SENTENCE.format(3), other.replace("long", "big"))
        donor = Candidate(LONG.replace(SENTENCE.format(3), other), 0.9)
        last = LexicalGate().accept(target, donor).compute[-1]
        assert target[last.start : last.end].endswith(" The 4th")


def test_where_little_would_be_left_it_carries_less_far() -> None:
    """A word in every sentence: five words behind it, three, two, one, none but those at the
    sentence's end, and no more than in a short text."""
    target = LONG.replace("long", "slow")
    left = (0.5, 0.65, 0.73, 0.8, 0.85, 0.95, None)
    assert [" ".join(spans(target, wide_from)[:2]) for wide_from in left] == [
        "slow table by the green door . The 1th",
        "slow table by the . The 1th",
        "slow table by . The 1th",
        "slow table . The 1th",
        "slow . The 1th",
        "slow slow",
        "slow slow",
    ]
    at_least = LexicalGate(wide_from=0.0, min_kept=0.8).accept(target, Candidate(LONG, 0.9))
    assert len(at_least.compute) == 10  # carried as far as the candidate need not be refused


def test_another_wording_does_not_reach() -> None:
    assert computed("A red house stood there.", "A blue house stood there.", "text") == ["red"]


def test_refusals_say_what_differs() -> None:
    gate = LexicalGate(2, min_kept=0.5)
    for target, donor, reason in (
        ("turn on light", "turn off light", "antonym_differs"),
        ("30 mg pills", "50 mg pills", "number_differs"),
        ("never do that", "always do that", "negation_differs"),
        ("a green valley", "one small town", "number_differs"),
        ("green valley wide", "sunny old town", "wording_differs"),
    ):
        assert gate.accept(target, Candidate(donor, 0.99)) == Decision(False, reason)


TEXT = st.text(alphabet="ab不上 .,5\nIs\u0301", max_size=30) | st.text(max_size=20)


@given(target=TEXT, donor=TEXT, reach=st.sampled_from([0, 1, "clause", "sentence", "text"]))
def test_spans_lie_in_the_text_and_apart(target: str, donor: str, reach: int | str) -> None:
    decision = LexicalGate(reach, min_kept=0).accept(target, Candidate(donor, 0.9))
    at = -1
    for span in decision.compute:
        assert at < span.start < span.end <= len(target)
        at = span.end
    assert LexicalGate(reach).accept(target, Candidate(target, 0.9)) == Decision(True)


@given(
    words=st.lists(
        st.sampled_from(
            ["red", "not", "5", "mg", "Anna", "Monday", "off", "on", ",", ".", "不", "上"]
        )
    )
)
def test_every_word_that_is_not_in_the_donor_is_computed(words: list[str]) -> None:
    donor = "the lamp was on in Rome"
    target = " ".join(words)
    inside = " ".join(computed(target, donor))
    for word in words:
        assert word in inside or word == "on"


@pytest.mark.parametrize("reach", [-1, 1.5, "word", True, None])
def test_reach_has_a_range(reach: Any) -> None:
    with pytest.raises(SettingError, match="reach"):
        LexicalGate(reach)


@pytest.mark.parametrize("min_kept", [None, "abc", True, 1.5])
def test_the_share_to_keep_has_a_range(min_kept: Any) -> None:
    with pytest.raises(SettingError, match=r"min_kept=.*: expected a number from 0.0 to 1.0"):
        LexicalGate(min_kept=min_kept)


# Several gates --------------------------------------------------------------------------------


class Wanting:
    def __init__(self, *spans: Span) -> None:
        self.spans = spans

    def accept(self, text: str, candidate: Candidate) -> Decision:
        return Decision(True, compute=self.spans)


@pytest.mark.parametrize("share", [-0.1, 1.5, "half", True])
def test_wide_from_has_a_range(share: Any) -> None:
    with pytest.raises(SettingError, match="wide_from"):
        LexicalGate(wide_from=share)


def test_all_must_accept_and_what_any_wants_is_computed() -> None:
    one, two = Span(0, 3), Span(2, 5)
    both = AllOf([Wanting(one), Wanting(two, one), ThresholdGate(0.5)])
    assert both.accept("abcdef", Candidate("b", 0.6)) == Decision(True, compute=(one, two))
    assert both.accept("abcdef", Candidate("b", 0.4)) == Decision(False, "below_threshold")


def test_the_first_refusal_counts() -> None:
    gates: list[Gate] = [ThresholdGate(0.5), LexicalGate()]
    unlike = Candidate("bond yields fell", 0.4)
    assert AllOf(gates).accept("it rains", unlike).reason == "below_threshold"
    assert AllOf(gates[::-1]).accept("it rains", unlike).reason == "wording_differs"


def test_no_gate_is_a_mistake() -> None:
    with pytest.raises(SettingError, match="gates"):
        AllOf([])


# Denied pairs ---------------------------------------------------------------------------------

PAIR = ("Turn the lamp on.", "Turn the lamp off.")


def denied(gate: DenyGate, text: str, other: str) -> bool:
    return gate.accept(text, Candidate(other, 0.99)).reason == "denied"


def test_a_denied_pair_holds_in_both_directions_and_after_a_restart(tmp_path: Path) -> None:
    """F2: no way to remove a false hit."""
    path = tmp_path / "new" / "denied.json"
    reader = DenyGate(path)
    assert not denied(reader, *PAIR)
    DenyGate(path).deny(*PAIR)
    for gate in (DenyGate(path), reader):
        assert denied(gate, *PAIR)
        assert denied(gate, *PAIR[::-1])
        assert not denied(gate, PAIR[0], "Turn the lamp up.")
    assert "lamp" not in path.read_text()


def test_white_space_around_a_denied_text_says_nothing() -> None:
    """Chunks are stripped before a gate sees them; what a user denies may not be."""
    gate = DenyGate()
    gate.deny(f"{PAIR[0]}\n", f" {PAIR[1]}")
    assert denied(gate, *PAIR)


@pytest.mark.parametrize("name", [".", "file/denied.json"])
def test_what_can_be_no_file_of_pairs_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="path="):
        DenyGate(tmp_path / name)


def test_pairs_that_cannot_be_written_are_one_line() -> None:
    gate = DenyGate("/proc/nowhere/denied.json")
    with pytest.raises(DataError, match=r"denied\.json: denied pairs cannot be written"):
        gate.deny(*PAIR)


@pytest.mark.parametrize("path", [5, True, ["a"]])
def test_the_path_of_denied_pairs_is_a_path(path: Any) -> None:
    with pytest.raises(SettingError, match=r"path=.*: expected the path of a file"):
        DenyGate(path)


def test_writers_do_not_lose_each_others_pairs(tmp_path: Path) -> None:
    one, two = (DenyGate(tmp_path / "denied.json") for _ in range(2))
    one.deny("a", "b")
    two.deny("c", "d")
    one.deny("e", "f")
    again = DenyGate(tmp_path / "denied.json")
    assert all(denied(again, *pair) for pair in ("ab", "cd", "ef"))


def test_without_a_file_they_last_as_long_as_the_gate() -> None:
    gate = DenyGate()
    gate.deny(*PAIR)
    assert denied(gate, *PAIR)
    assert not denied(DenyGate(), *PAIR)


def test_a_damaged_list_is_no_empty_list(tmp_path: Path) -> None:
    path = tmp_path / "denied.json"
    DenyGate(path).deny(*PAIR)
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(DataError, match=r"denied\.json: denied pairs cannot be read"):
        denied(DenyGate(path), *PAIR)
