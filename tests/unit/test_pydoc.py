"""The workload over the Python language reference: its texts, its sharing, its conversations."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from types import ModuleType

import pytest

from kvsem.errors import DataError, SettingError
from kvsem.types import Request
from kvsem.workloads import pydoc
from kvsem.workloads.pydoc import PydocWorkload, cut_passage, paragraphs, rank_bm25

TOPIC = """The "thing" statement
*********************

   thing_stmt ::= "thing"

A *thing* is a reference-
counted **object**, see below [1].  It does
‘"things"’ with "*args" and "x[1]".

* First item.

and what continues code that is left out.

   >>> thing()

Changed in version 3.8: no more.

New in version 3.9.

   thing(1)

-[ Footnotes ]-

[1] A note.
"""


@pytest.fixture(scope="module")
def questions() -> list[Request]:
    return list(PydocWorkload())


@pytest.fixture(scope="module")
def conversations() -> list[Request]:
    return list(PydocWorkload(conversations=True))


def _uses(requests: list[Request]) -> Counter[str]:
    return Counter(text for r in requests for text in r.segments("passage"))


def test_paragraphs_read_well() -> None:
    assert paragraphs(TOPIC) == [
        'A thing is a reference-counted object, see below. It does "things" with "*args" and '
        '"x[1]".',
        "- First item.",
    ]


def test_a_passage_ends_with_a_whole_sentence() -> None:
    sentence = "Twelve words that say little stand here again for this small test."
    topic = f"Anchor here.\n\n{' '.join([sentence] * 12)}"
    passage = cut_passage(topic, "Anchor")
    assert passage is not None
    assert passage.endswith(sentence)
    assert 75 <= len(passage.split()) <= 115
    assert cut_passage(topic, "absent") is None


def test_nearest_passages_share_the_rare_words() -> None:
    passages = {"a": "the loop ends", "b": "the exception is raised", "c": "the name is bound"}
    assert rank_bm25("Which exception ends the loop?", passages)[0] == "a"
    assert rank_bm25("exception", passages) == ["b", "a", "c"]


def test_questions_spread_over_topics(questions: list[Request]) -> None:
    assert len(questions) >= 44
    assert len({r.group for r in questions}) >= 20
    assert len({r.id for r in questions}) == len(questions)
    assert len({r.segments("question") for r in questions}) == len(questions)


def test_every_answer_stands_in_one_of_the_passages(questions: list[Request]) -> None:
    for request in questions:
        assert 1 <= len(request.answers) <= 3
        gold = [t for t in request.segments("passage") if all(a in t for a in request.answers)]
        assert gold, request.id


def test_the_gold_passage_holds_every_answer() -> None:
    workload = PydocWorkload()
    for question in workload._questions.values():
        for answer in question["answers"]:
            assert answer in workload._passages[question["passage"]], question["id"]


def test_passages_are_clean_prose_of_about_ninety_words(questions: list[Request]) -> None:
    texts = list(_uses(questions))
    words = [len(text.split()) for text in texts]
    assert 80 <= sum(words) / len(words) <= 110
    assert all(55 <= n <= 115 for n in words)
    for text in texts:
        assert not re.search(r"\n\n|  |^\s|\s$|::=|>>>|\n([*=~-])\1\1", text), text
        assert "in version 3." not in text


def test_no_paragraph_stands_in_two_passages(questions: list[Request]) -> None:
    seen = Counter(line for text in _uses(questions) for line in text.split("\n"))
    assert [line for line, n in seen.items() if n > 1 and len(line.split()) > 6] == []


def test_prompts_are_of_the_size_that_was_aimed_at(questions: list[Request]) -> None:
    words = [sum(len(m.content.split()) for m in r.messages) for r in questions]
    assert all(
        len(r.segments("passage")) == len(set(r.segments("passage"))) == 5 for r in questions
    )
    assert 440 <= sum(words) / len(words) <= 560  # 700 tokens of a GPT-2-like tokenizer


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("limit", [12, None])
def test_passages_recur_at_other_positions(limit: int | None, seed: int) -> None:
    requests = list(PydocWorkload(limit=limit, seed=seed))
    uses, places = _uses(requests), defaultdict(set)
    for request in requests:
        for place, text in enumerate(request.segments("passage")):
            places[text].add(place)
    shared = [n for n in uses.values() if n > 1]
    assert sum(shared) >= 0.6 * sum(uses.values())
    moving = [len(places[text]) > 1 for text, n in uses.items() if n > 1]
    assert moving
    assert all(moving)


def test_no_predecessor_is_always_the_same(questions: list[Request]) -> None:
    pairs = Counter(pair for r in questions for pair in pairwise(r.segments("passage")))
    uses = _uses(questions)
    assert all(n < uses[text] for (_, text), n in pairs.items() if uses[text] > 3)


def test_the_gold_passage_is_not_always_at_one_place() -> None:
    workload = PydocWorkload()
    gold = [workload._passages[q["passage"]] for q in workload._questions.values()]
    places = Counter(
        r.segments("passage").index(text) for r, text in zip(workload, gold, strict=True)
    )
    assert sorted(places) == [0, 1, 2, 3, 4]
    assert max(places.values()) <= len(gold) / 2


def test_the_seed_moves_passages_and_nothing_else() -> None:
    first, again, other = (list(PydocWorkload(seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    for a, b in zip(first, other, strict=True):
        assert (a.id, a.answers, set(a.segments("passage"))) == (
            b.id,
            b.answers,
            set(b.segments("passage")),
        )


def test_order_is_the_same_in_every_process() -> None:
    code = (
        "from kvsem.workloads.pydoc import PydocWorkload; import hashlib; "
        "print(hashlib.sha256(repr(list(PydocWorkload(conversations='all'))).encode()).hexdigest())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_conversations_have_three_turns_or_more(conversations: list[Request]) -> None:
    turns = Counter(r.group for r in conversations)
    assert len(turns) >= 12
    assert min(turns.values()) >= 3
    assert conversations[1].id == "conv-01/turn-2"
    assert all(r.id.startswith(f"{r.group}/turn-") for r in conversations)


def test_a_turn_continues_the_one_before(conversations: list[Request]) -> None:
    for before, after in pairwise(conversations):
        if before.group != after.group:
            continue
        *ahead, asked = before.messages
        *history, then, reply, _ = after.messages
        assert history == ahead
        assert (then.content, reply.content) == (asked.content, before.answers[0])
        assert [s.kind for s in then.segments][-1] == "turn"
        assert reply.segments[0].kind == "turn"


def test_kinds_of_a_turn(conversations: list[Request]) -> None:
    for request in conversations:
        *history, last = request.messages
        assert [s.kind for s in last.segments][-1] == "question"
        assert 1 <= sum(s.kind == "passage" for s in last.segments) <= 2
        assert all(s.kind != "question" for m in history for s in m.segments)
        assert any(a in s.text for a in request.answers for s in last.segments[:-1])
        roles = [m.role for m in request.messages]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2 - 1), "user"]


def test_passages_come_back_within_and_between_conversations(
    conversations: list[Request],
) -> None:
    last = {r.group: r for r in conversations}.values()  # each holds its whole conversation
    within = [max(Counter(r.segments("passage")).values()) for r in last]
    holders = Counter(text for r in last for text in set(r.segments("passage")))
    assert sum(n > 1 for n in within) >= 10
    assert sum(n > 1 for n in holders.values()) >= 4


def test_kinds_of_workload() -> None:
    counts = {k: len(PydocWorkload(conversations=k)) for k in pydoc.KINDS if isinstance(k, str)}
    assert counts["all"] == counts["questions"] + counts["conversations"]
    assert len(PydocWorkload(limit=3)) == len(list(PydocWorkload(limit=3))) == 3
    assert {r.max_new_tokens for r in PydocWorkload(max_new_tokens=5, limit=4)} == {5}
    assert len(next(iter(PydocWorkload(n_passages=1))).segments("passage")) == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("n_passages", 0),
        ("n_passages", 1000),
        ("n_passages", True),
        ("limit", 0),
        ("limit", "3"),
        ("max_new_tokens", 0),
        ("conversations", "some"),
        ("conversations", None),
    ],
)
def test_settings_out_of_range(setting: str, value: object) -> None:
    with pytest.raises(SettingError, match=rf"workload\.{setting}=.*expected"):
        PydocWorkload(**{setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("topics", [None, {}, {"with": "Nothing of what is asked."}])
def test_missing_topics_are_said_in_one_line(
    topics: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("pydoc_data.topics")
    if topics is not None:
        module.topics = topics  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", module)
    with pytest.raises(DataError, match=r"pydoc_data\.topics: .*workload=jsonl") as error:
        PydocWorkload()
    assert "\n" not in str(error.value)


def test_a_question_that_this_python_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(PydocWorkload(conversations="all"))
    topics = pydoc.read_topics()
    del topics["del"]
    monkeypatch.setattr(pydoc, "read_topics", lambda: topics)
    with pytest.warns(UserWarning, match="left out, not in this Python: del-unbound"):
        rest = list(PydocWorkload(conversations="all"))
    assert {r.id for r in whole} - {r.id for r in rest} == {"del-unbound", "conv-01/turn-3"}
