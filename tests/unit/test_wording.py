"""What must count as a difference although few characters differ, and what it may cost to look."""

from __future__ import annotations

import time

import pytest

from kvsem.gates.base import Candidate
from kvsem.gates.lexical import LexicalGate
from kvsem.wording import MEANING, cut, differences


def kinds(target: str, donor: str) -> set[str]:
    return {found.kind for found in differences(cut(target), cut(donor))}


BOTH_WAYS = [
    ("Give the child 15 mg of it.", "Give the child 1,5 mg of it."),
    ("Items 1,2,3 are out.", "Items 123 are out."),
    ("It was at 5 degrees all night.", "It was at -5 degrees all night."),
    ("It was at 5 degrees all night.", "It was at \u22125 degrees all night."),
    ("Use 5 litres of it.", "Use .5 litres of it."),
    ("if (ready) go()", "if (!ready) go()"),
    ("when x > 5 it stops", "when x < 5 it stops"),
    ("so a = b here", "so a \u2260 b here"),
    ("take a - b here", "take a + b here"),
    ("Verdict: \U0001f44d from me.", "Verdict: \U0001f44e from me."),
    ("All 105 people left.", "All 10\u2075 people left."),
    ("In two-three weeks.", "In 5 weeks."),
    ("A fifty-fifty chance.", "A 100 chance."),
    ("for x in xs:\n    check(x)\nsend(x)", "for x in xs:\n    check(x)\n    send(x)"),
    ("for x in xs:\n\tcheck(x)\n\tsend(x)", "for x in xs:\n\tcheck(x)\nsend(x)"),
]


@pytest.mark.parametrize(("one", "other"), [*BOTH_WAYS, *((b, a) for a, b in BOTH_WAYS)])
def test_small_signs_change_the_meaning(one: str, other: str) -> None:
    """And so carry further than to themselves."""
    assert kinds(one, other) & MEANING
    decision = LexicalGate(reach=2, min_kept=0).accept(one, Candidate(other, 0.99))
    assert decision.compute


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("It cost 1,250,000.50 then.", "It cost 1250000.50 then."),
        ("Some prose that\nwas wrapped here.", "Some prose\nthat was wrapped here."),
        ("It ended.\n\nThen it began.", "It ended. Then it began."),
        ("  - first\n  - second", "  - first\n  - second"),
        ("IT WAS THERE.", "IT WAS THERE."),
    ],
)
def test_layout_of_prose_changes_nothing(one: str, other: str) -> None:
    assert not kinds(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("It was ready.", "It was ready!"),
        ("The dog (a small one) ran.", "The dog, a small one, ran."),
        ("It came - at last - home.", "It came, at last, home."),
    ],
)
def test_punctuation_is_no_meaning(one: str, other: str) -> None:
    assert not kinds(one, other) & MEANING


def test_an_acronym_is_not_the_word_that_it_spells() -> None:
    assert "name" in kinds("You must ask IT about that.", "You must ask it about that.")


def test_behind_any_word_left_out_the_next_one_is_computed() -> None:
    """It was made behind the word that is gone, whatever it said."""
    gate = LexicalGate(reach=2, min_kept=0)
    for gone in ("former ", "alleged ", "\u043d\u0435 "):
        target, donor = "The president visited us.", f"The {gone}president visited us."
        spans = gate.accept(target, Candidate(donor, 0.99)).compute
        assert [target[s.start : s.end] for s in spans] == ["president"]
    assert not LexicalGate(reach=0, min_kept=0).accept(target, Candidate(donor, 0.99)).compute


def table(rows: int, cell: int, first: int = 0) -> str:
    return "\n".join(f"| {i} | 0 | {cell} | 0 | x |" for i in range(first, first + rows))


def test_repetitive_text_is_compared_in_bounded_time() -> None:
    """A difflib without heuristics takes minutes for such tables."""
    target, donor = table(800, 1), table(800, 2, first=7)
    start = time.process_time()
    LexicalGate().accept(target, Candidate(donor, 0.99))
    per_pair = time.process_time() - start
    start = time.process_time()
    cut(target), cut(donor)
    assert per_pair < 200 * (time.process_time() - start)
