"""The generic input: what is read, and what is refused in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsem.errors import DataError, SettingError
from kvsem.records import to_request, to_requests
from kvsem.types import Message, Request, Segment
from kvsem.workloads.jsonl import JsonlWorkload

RAG = {"id": "r", "passages": ["One.", "Two."], "question": "Why?"}
CHAT = {
    "id": "c",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Why?"},
    ],
}
PLAIN = {"id": "p", "prompt": "Once upon a time"}
PAIR = {"id": "d", "donor": "The cat sat.", "target": "A cat sat.", "question": "Who?"}


def _write(folder: Path, *records: Any, name: str = "data.jsonl") -> Path:
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    path = folder / name
    path.write_bytes(b"\n".join(lines))
    return path


def _one(record: dict[str, Any]) -> Request:
    return to_request(record, max_new_tokens=16)


def test_rag() -> None:
    assert _one(RAG) == Request.rag("r", ["One.", "Two."], "Why?")
    assert _one(RAG | {"system": "Be brief."}).system == "Be brief."
    assert [m.content for m in _one(RAG).messages] == ["One.\n\nTwo.\n\nQuestion: Why?"]


def test_a_question_for_which_nothing_was_retrieved() -> None:
    assert _one(RAG | {"passages": []}) == Request.rag("r", [], "Why?")


def test_passages_with_titles() -> None:
    passages = [{"title": "Cats", "text": "They sit.", "gold": True}, {"title": "", "text": "No."}]
    passages += [{"title": None, "text": "Null."}, {"text": "None."}]
    request = _one(RAG | {"passages": passages})
    assert request.segments("passage") == ("Cats\nThey sit.", "No.", "Null.", "None.")


def test_chat() -> None:
    assert _one(CHAT).messages == (
        Message("system", (Segment("system", "Be brief."),)),
        Message("user", (Segment("turn", "Hello."),)),
        Message("assistant", (Segment("turn", "Hi."),)),
        Message("user", (Segment("question", "Why?"),)),
    )
    alone = {"id": "c", "messages": CHAT["messages"][-1:]}
    assert [m.role for m in _one(alone).messages] == ["user"]
    assert _one(alone | {"system": "Be kind."}).system == "Be kind."


def test_plain() -> None:
    assert _one(PLAIN) == Request("p", text="Once upon a time")


def test_donor_and_target() -> None:
    assert _one(PAIR) == Request.donor_target("d", "The cat sat.", "A cat sat.", "Who?")
    bare = _one({**PAIR, "question": None, "system": "Be brief.", "label": 1})
    assert bare.donors == ("The cat sat.",)
    assert [m.content for m in bare.messages] == ["Be brief.", "A cat sat."]


@pytest.mark.parametrize("record", [RAG, CHAT, PLAIN, PAIR], ids=lambda r: r["id"])
def test_what_every_form_takes(record: dict[str, Any]) -> None:
    assert _one(record).answers == ()
    assert _one(record).group is None
    full = _one(record | {"answers": ["a", " ", "b"], "max_new_tokens": 3, "group": "g"})
    assert (full.answers, full.max_new_tokens, full.group) == (("a", "b"), 3, "g")
    assert _one(record | {"answers": "Because."}).answers == ("Because.",)
    extra = {"type": "bridge", "level": 3, "answers": None, "tenant": "x", "donors": ["y"]}
    assert _one(record | extra) == _one(record)


def test_document_groups_where_there_is_no_group() -> None:
    assert _one(RAG | {"document": "doc 1"}).group == "doc 1"
    assert _one(RAG | {"document": "doc 1", "group": 7}).group == "7"
    assert _one(RAG | {"document": {"title": "of the data set's own"}}).group is None


def test_where_a_record_fits_several_forms() -> None:
    everything = {**RAG, **CHAT, **PLAIN, **PAIR}
    assert _one(everything).donors
    del everything["donor"]
    assert _one(everything).segments("turn")
    del everything["messages"]
    assert _one(everything).segments("passage")


def test_files_plain_zipped_and_with_a_byte_order_mark(tmp_path: Path) -> None:
    text = "\r\n".join(json.dumps(r, ensure_ascii=False) for r in (RAG, CHAT)) + "\r\n\r\n"
    plain, zipped = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_bytes(b"\xef\xbb\xbf" + text.encode())
    zipped.write_bytes(gzip.compress(text.encode()))
    assert list(JsonlWorkload(plain)) == list(JsonlWorkload(str(zipped))) == [_one(RAG), _one(CHAT)]


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path: Path) -> None:
    record = json.dumps(RAG | {"question": "Why\u2028not\x85?"}, ensure_ascii=False)
    (request,) = JsonlWorkload(_write(tmp_path, record.encode()))
    assert request.segments("question") == ("Question: Why\u2028not\x85?",)


def test_iterates_again_and_has_a_length(tmp_path: Path) -> None:
    workload = JsonlWorkload(_write(tmp_path, RAG, CHAT), ingest=False, max_new_tokens=5)
    assert list(workload) == list(workload)
    assert len(workload) == 2
    assert not workload.ingest
    assert {r.max_new_tokens for r in workload} == {5}


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = _write(tmp_path, RAG, CHAT, b"broken")
    assert len(JsonlWorkload(path, limit=2)) == 2
    with pytest.raises(DataError, match="line 3"):
        JsonlWorkload(path, limit=3)


def turns(record: dict[str, Any]) -> list[Request]:
    return list(to_requests(record, 16, conversations=True))


def test_conversations_ask_every_turn() -> None:
    first, second = turns(CHAT)
    assert first == Request(
        "c/turn-1",
        (
            Message("system", (Segment("system", "Be brief."),)),
            Message("user", (Segment("question", "Hello."),)),
        ),
        answers=("Hi.",),
        group="c",
    )
    assert (second.id, second.group, second.messages) == ("c/turn-2", "c", _one(CHAT).messages)
    assert second.answers == ()
    over = {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "So."}]}
    assert [r.answers for r in turns(over)] == [("Hi.",), ("So.",)]
    own = CHAT | {"group": "g", "answers": "Because.", "max_new_tokens": 3}
    assert [(r.group, r.answers, r.max_new_tokens) for r in turns(own)] == [
        ("g", ("Hi.",), 3),
        ("g", ("Because.",), 3),
    ]


def test_an_agent_is_asked_after_its_tools() -> None:
    said = ["user", "assistant", "tool", "tool", "assistant", "user"]
    messages = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(said)]
    record = {"id": "t", "messages": messages, "system": "Be brief."}
    assert [len(r.messages) for r in turns(record)] == [2, 5, 7]
    assert [r.messages[-1].role for r in turns(record)] == ["user", "tool", "user"]
    assert [r.answers for r in turns(record)] == [("assistant 1",), ("assistant 4",), ()]
    record["messages"] = messages[:4]
    assert turns(record)[1].messages == _one(record).messages
    record["messages"] = messages[1:2]
    with pytest.raises(DataError, match="asks nothing"):
        turns(record)


@pytest.mark.parametrize("record", [RAG, PLAIN, PAIR], ids=lambda r: r["id"])
def test_only_chats_have_turns(record: dict[str, Any]) -> None:
    assert turns(record) == [_one(record)]


def test_limit_counts_requests_and_ids_stay_unique(tmp_path: Path) -> None:
    path = _write(tmp_path, CHAT, CHAT | {"id": "d"}, RAG)
    ids = [r.id for r in JsonlWorkload(path, limit=3, conversations=True)]
    assert ids == ["c/turn-1", "c/turn-2", "d/turn-1"]
    assert len(JsonlWorkload(path, conversations=True)) == 5
    path = _write(tmp_path, CHAT, CHAT)
    with pytest.raises(DataError, match="line 2: \"id\" 'c/turn-1' is taken by line 1"):
        JsonlWorkload(path, conversations=True)


BAD: list[tuple[Any, str]] = [
    (b"{", "broken JSON at column 2"),
    (b'{"id": "\xff"}', "invalid UTF-8 at byte 9; save the file as UTF-8"),
    (b'{"id": "a", "prompt": "\\ud800"}', "half a surrogate pair"),
    (b"[" * 100_000, "JSON nested too deep"),
    (b'{"id": ' + b"1" * 5000 + b"}", "a number too long"),
    ([RAG], "a JSON list; expected an object"),
    ({}, 'no known form; expected "passages" and "question", "messages"'),
    ({"id": "a", "text": "b"}, "no known form; .* found id text"),
    ({"id": "a", "donor": "b", "question": "c"}, "no known form"),
    ({"id": "a", "passages": ["b"]}, "no known form"),
    ({"id": "a", "passages": ["b"], "question": None}, "no known form"),
    ({"passages": ["b"], "question": "c"}, 'no "id"'),
    (RAG | {"id": ""}, "\"id\" is ''; expected"),
    (RAG | {"id": True}, '"id" is True; expected'),
    (RAG | {"id": ["a"]}, '"id" is '),
    (RAG | {"passages": "One."}, "\"passages\" is 'One.'; expected a list"),
    (RAG | {"passages": [], "question": " "}, '"question" is .*not blank'),
    (RAG | {"passages": ["One.", " \n\t"]}, r'"passages"\[1\] is .*not blank'),
    (RAG | {"passages": ["One.", None]}, r'"passages"\[1\] is None'),
    (RAG | {"passages": [{"title": "Cats"}]}, r'"passages"\[0\]\["text"\] is None'),
    (RAG | {"passages": [{"title": 1, "text": "a"}]}, r'"passages"\[0\]\["title"\] is 1'),
    (RAG | {"question": "  "}, '"question" is .*not blank'),
    (RAG | {"question": 3}, '"question" is 3'),
    (RAG | {"system": 3}, '"system" is 3'),
    (RAG | {"answers": 3}, '"answers" is 3; expected a string or a list of strings'),
    (RAG | {"answers": ["a", 3]}, '"answers" is '),
    (RAG | {"max_new_tokens": 0}, '"max_new_tokens" is 0; expected an integer of at least 1'),
    (RAG | {"max_new_tokens": "16"}, "\"max_new_tokens\" is '16'"),
    (RAG | {"group": {"a": 1}}, '"group" is '),
    (CHAT | {"messages": []}, '"messages" is '),
    (CHAT | {"messages": "Hello."}, "\"messages\" is 'Hello.'; expected a list"),
    (
        CHAT | {"messages": CHAT["messages"][:3]},
        "the last message is from 'assistant'.*workload.conversations=true",
    ),
    (CHAT | {"messages": ["Hello."]}, r'"messages"\[0\] is \'Hello.\'; expected an object'),
    (
        CHAT | {"messages": [{"role": "robot", "content": "a"}]},
        "\"role\".* is 'robot'; expected user, assistant or tool",
    ),
    (CHAT | {"messages": [{"role": ["user"], "content": "a"}]}, r'"role"\] is '),
    (CHAT | {"messages": [{"role": "user"}]}, r'"content"\] is None'),
    (CHAT | {"messages": [{"role": "user", "content": " "}]}, r'"content"\] is '),
    (
        CHAT | {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
        r'"messages"\[0\] has "tool_calls" only; write them out in its "content"',
    ),
    (CHAT | {"messages": [*CHAT["messages"], CHAT["messages"][0]]}, r'\[4\]\["role"\] is'),
    (CHAT | {"system": "Be kind."}, '"system" and a system message'),
    (PLAIN | {"prompt": ""}, '"prompt" is'),
    (PLAIN | {"prompt": ["a"]}, '"prompt" is'),
    (PLAIN | {"system": "Be kind."}, '"system" beside a "prompt"'),
    (PAIR | {"donor": " "}, '"donor" is'),
    (PAIR | {"target": 1}, '"target" is 1'),
    (PAIR | {"question": " "}, '"question" is'),
    (RAG | {"id": "first"}, "\"id\" 'first' is taken by line 1; make it unique"),
]


@pytest.mark.parametrize(("record", "message"), BAD, ids=range(len(BAD)))
def test_bad_records_name_file_line_and_remedy(record: Any, message: str, tmp_path: Path) -> None:
    path = _write(tmp_path, RAG | {"id": "first"}, b"", record)
    with pytest.raises(DataError, match=message) as error:
        JsonlWorkload(path)
    assert str(error.value).startswith(f"{path} line 3: ")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) - len(str(path)) < 240


def test_bad_files(tmp_path: Path) -> None:
    zipped = gzip.compress(json.dumps(RAG).encode() * 50)
    (tmp_path / "cut.jsonl.gz").write_bytes(zipped[:-20])
    (tmp_path / "flipped.jsonl.gz").write_bytes(zipped[:12] + b"\xff\xff\xff" + zipped[15:])
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "empty.jsonl.gz").write_bytes(gzip.compress(b"\n \n"))
    for name, message in {
        "cut.jsonl.gz": "the gzip file is damaged",
        "flipped.jsonl.gz": "the gzip file is damaged",
        "empty.jsonl": "no records; expected one JSON object a line",
        "empty.jsonl.gz": "no records",
        "absent.jsonl": "no such file; expected a .jsonl",
        ".": "Is a directory; expected a file that can be read",
    }.items():
        with pytest.raises(DataError, match=message) as error:
            JsonlWorkload(tmp_path / name)
        assert str(error.value).startswith(str(tmp_path))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("limit", 0),
        ("limit", True),
        ("limit", "3"),
        ("max_new_tokens", 0),
        ("path", None),
        ("path", ""),
    ],
)
def test_settings_out_of_range(setting: str, value: object, tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"path": _write(tmp_path, RAG), setting: value}
    with pytest.raises(SettingError, match=rf"workload\.{setting}=.*expected"):
        JsonlWorkload(**kwargs)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "id",
    "system",
    "passages",
    "question",
    "messages",
    "prompt",
    "donor",
    "target",
    "answers",
]


@settings(max_examples=400, deadline=None)
@given(record=st.dictionaries(st.sampled_from([*FIELDS, "group", "document"]), JSON))
def test_any_record_becomes_a_request_or_a_data_error(record: dict[str, Any]) -> None:
    try:
        request = to_request(record, 16)
    except DataError:
        return
    assert request.id
    assert (request.text or "").strip() or request.messages[-1].role in ("user", "tool")


MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text()}
)


@settings(max_examples=200, deadline=None)
@given(messages=st.lists(MESSAGE | JSON, max_size=5), conversations=st.booleans())
def test_any_messages_are_asked_or_refused(messages: list[Any], conversations: bool) -> None:
    try:
        requests = list(to_requests({"id": 1, "messages": messages}, 16, conversations))
    except DataError:
        return
    assert requests
    assert {r.messages[-1].role for r in requests} <= {"user", "tool"}
    assert len({r.id for r in requests}) == len(requests)


@settings(max_examples=50, deadline=None)
@given(line=st.binary(max_size=60).filter(lambda line: b"\n" not in line and bool(line.strip())))
def test_any_bytes_are_refused_in_one_line(
    line: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = _write(tmp_path_factory.mktemp("any"), RAG, line)
    with pytest.raises(DataError, match="line 2: "):
        JsonlWorkload(path)
