"""One record of a data set as requests: the forms that every workload of records reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kvsem.errors import DataError, check_count
from kvsem.types import Kind, Message, Request, Segment

Record = dict[str, Any]
_FORMS = '"passages" and "question", "messages", "prompt", or "donor" and "target"'
_KINDS: dict[str, Kind] = {"system": "system", "user": "turn", "assistant": "turn", "tool": "turn"}
_ASKING = ("user", "tool")  # whose message the assistant answers


def read_requests(
    source: str,
    records: Iterable[tuple[str, Record]],
    limit: int | None,
    max_new_tokens: int,
    conversations: bool,
) -> Iterator[Request]:
    """At most ``limit`` requests from records and the places where they stand in ``source``.

    Raises `DataError`, which names the source and the place, also for an "id" that was there.
    """
    seen: dict[str, str] = {}
    for place, record in records:
        try:
            for request in to_requests(record, max_new_tokens, conversations):
                if first := seen.get(request.id):
                    raise DataError(f'"id" {short(request.id)} is taken by {first}; make it unique')
                seen[request.id] = place
                yield request
                if len(seen) == limit:
                    return
        except DataError as error:
            raise DataError(f"{source} {place}: {error}") from None


def to_requests(record: Record, max_new_tokens: int, conversations: bool) -> Iterator[Request]:
    """One request; with ``conversations``, of a chat one for every turn.

    A turn is a message that the assistant answers, behind everything before it; the answer that
    the record holds is its reference answer. They are called ID/turn-1, ID/turn-2, …, and are one
    cluster unless the record says another.
    """
    record = _without_nulls(record)
    if not conversations or _form(record) is not _chat:
        yield to_request(record, max_new_tokens)
        return
    id, messages = _identity(record), record["messages"]
    roles = [role for role, _ in _turns(messages)]
    ends = [i for i, role in enumerate(roles) if role in _ASKING]
    asked = [i for i in ends if roles[i + 1 : i + 2] in ([], ["assistant"])]
    if not asked:
        raise DataError('"messages" asks nothing; expected one from the user')
    for turn, i in enumerate(asked, start=1):
        own = {"id": f"{id}/turn-{turn}", "messages": messages[: i + 1]}
        own["group"] = _group(record) or id
        if i + 1 < len(messages):
            own["answers"] = messages[i + 1]["content"]
        yield to_request(record | own, max_new_tokens)


def to_request(record: Record, max_new_tokens: int) -> Request:
    """One record as a request; `DataError` says which field is wrong, and what would be right."""
    record = _without_nulls(record)
    request = _form(record)(_identity(record), record)
    return replace(
        request,
        answers=_answers(record),
        max_new_tokens=_count(record, "max_new_tokens", max_new_tokens),
        group=_group(record),
    )


def _without_nulls(record: Record) -> Record:
    return {name: value for name, value in record.items() if value is not None}


def _form(record: Record) -> Callable[[str, Record], Request]:
    for names, build in (
        (("donor", "target"), _donor_target),
        (("messages",), _chat),
        (("passages", "question"), _rag),
        (("prompt",), _plain),
    ):
        if all(name in record for name in names):
            return build
    found = " ".join(sorted(record)) or "no field"
    raise DataError(f"no known form; expected {_FORMS}, found {_cut(found, 80)}")


def _rag(id: str, record: Record) -> Request:
    passages = record["passages"]
    if not isinstance(passages, list):
        raise DataError(f'"passages" is {short(passages)}; expected a list')
    texts = [_passage(value, f'"passages"[{i}]') for i, value in enumerate(passages)]
    return Request.rag(id, texts, _text(record, "question"), system=_optional(record, "system"))


def _passage(value: object, name: str) -> str:
    if not isinstance(value, dict):
        return _checked(value, name)
    text = _checked(value.get("text"), f'{name}["text"]')
    title = value.get("title") or ""
    if not isinstance(title, str):
        raise DataError(f'{name}["title"] is {short(title)}; expected a string')
    return f"{title}\n{text}" if title.strip() else text


def _chat(id: str, record: Record) -> Request:
    turns = _turns(record["messages"])
    if turns[-1][0] not in _ASKING:
        raise DataError(
            f"the last message is from {turns[-1][0]!r}; expected one from the user, "
            "or workload.conversations=true to ask every turn"
        )
    if system := _optional(record, "system"):
        if turns[0][0] == "system":
            raise DataError('"system" and a system message; expected one of them')
        turns.insert(0, ("system", system))
    history = [Message(role, (Segment(_KINDS[role], text),)) for role, text in turns[:-1]]
    return Request(id, (*history, Message(turns[-1][0], (Segment("question", turns[-1][1]),))))


def _turns(messages: object) -> list[tuple[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f'"messages" is {short(messages)}; expected a list of one or more')
    return [_turn(value, f'"messages"[{i}]', i) for i, value in enumerate(messages)]


def _turn(value: object, name: str, position: int) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise DataError(f'{name} is {short(value)}; expected an object with "role" and "content"')
    role = value.get("role")
    if not isinstance(role, str) or role not in _KINDS or (role == "system" and position):
        allowed = "user, assistant or tool, or system in the first message"
        raise DataError(f'{name}["role"] is {short(role)}; expected {allowed}')
    if value.get("tool_calls") and not value.get("content"):
        raise DataError(f'{name} has "tool_calls" only; write them out in its "content"')
    return role, _checked(value.get("content"), f'{name}["content"]')


def _plain(id: str, record: Record) -> Request:
    if _optional(record, "system"):
        raise DataError('"system" beside a "prompt", which stands alone; expected "messages"')
    return Request(id, text=_text(record, "prompt"))


def _donor_target(id: str, record: Record) -> Request:
    donor, target = _text(record, "donor"), _text(record, "target")
    question = _optional(record, "question") or ""
    return Request.donor_target(id, donor, target, question, system=_optional(record, "system"))


def _optional(record: Record, name: str) -> str | None:
    """A text that may be missing, or empty to the same effect."""
    return None if record.get(name, "") == "" else _text(record, name)


def _text(record: Record, name: str) -> str:
    return _checked(record[name], f'"{name}"')


def _checked(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{name} is {short(value)}; expected a string that is not blank")
    return value


def _identity(record: Record) -> str:
    if "id" not in record:
        raise DataError('no "id"; expected one that no other record has')
    return _label(record, "id")


def _label(record: Record, name: str) -> str:
    value = record[name]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else _text(record, name)


def _answers(record: Record) -> tuple[str, ...]:
    answers = record.get("answers", [])
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f'"answers" is {short(answers)}; expected a string or a list of strings')
    return tuple(answer for answer in answers if answer.strip())


def _count(record: Record, name: str, default: int) -> int:
    value = record.get(name, default)
    if type(value) is not int or value < 1:
        raise DataError(f'"{name}" is {short(value)}; expected an integer of at least 1')
    return value


def check_counts(limit: int | None, max_new_tokens: int) -> None:
    """Raise `SettingError` for a workload's setting that is no number to count with."""
    if limit is not None:
        check_count("workload.limit", limit, 1)
    check_count("workload.max_new_tokens", max_new_tokens, 1)


def _group(record: Record) -> str | None:
    if "group" in record:
        return _label(record, "group")
    document = record.get("document")  # of any type, where it is a field of the data set's own
    return document if isinstance(document, str) and document.strip() else None


def short(value: object) -> str:
    """``value`` as one line that fits into a message."""
    return _cut(" ".join(repr(value).split()), 40)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"
