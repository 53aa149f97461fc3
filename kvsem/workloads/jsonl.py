"""Requests from a file of one JSON object a line, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsem.errors import DataError, SettingError
from kvsem.types import Kind, Message, Request, Segment

Record = dict[str, Any]
_GZIP = b"\x1f\x8b"  # no UTF-8 text begins with it
_FORMS = '"passages" and "question", "messages", "prompt", or "donor" and "target"'
_KINDS: dict[str, Kind] = {"system": "system", "user": "turn", "assistant": "turn"}


class JsonlWorkload:
    """The records of ``path`` as requests; each has an "id" and one of these forms:

    - ``{"system"?, "passages": [str or {"title"?, "text"}], "question"}``: the
      list may be empty, as where a retriever found nothing
    - ``{"system"?, "messages": [{"role", "content"}]}``: the last one is the question, from the
      user; those before it are history (kind ``turn``)
    - ``{"prompt"}``: no chat template
    - ``{"system"?, "donor", "target", "question"?}``: the donor is ingested, the target is asked

    Where a record fits several, "donor" and "target" win over "messages", then "passages". Each
    form takes "answers" (a string or a list), "max_new_tokens" and "group": records that share it
    are one cluster in the bootstrap ("document" counts where there is no "group"). Other fields
    are ignored, and so are null ones and blank lines.

    Raises `DataError`, which names the file and the line, and `SettingError`.
    """

    def __init__(
        self,
        path: str | Path | None,
        limit: int | None = None,
        ingest: bool = True,
        max_new_tokens: int = 16,
    ) -> None:
        if not path:
            raise SettingError("workload.path", path, "a .jsonl or .jsonl.gz file")
        counts = {"limit": 1 if limit is None else limit, "max_new_tokens": max_new_tokens}
        for name, value in counts.items():
            if not _is_count(value):
                raise SettingError(f"workload.{name}", value, "an integer of at least 1")
        self.path, self.ingest = Path(path).expanduser(), ingest
        self._requests = tuple(_read(self.path, limit, max_new_tokens))
        if not self._requests:
            raise DataError(f"{self.path}: no records; expected one JSON object a line")

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


def _read(path: Path, limit: int | None, max_new_tokens: int) -> Iterator[Request]:
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        try:
            request = to_request(_parse(line), max_new_tokens)
            if request.id in seen:
                first = seen[request.id]
                raise DataError(
                    f'"id" {_short(request.id)} is taken by line {first}; make it unique'
                )
        except DataError as error:
            raise DataError(f"{path} line {number}: {error}") from None
        seen[request.id] = number
        yield request
        if len(seen) == limit:
            return


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank, split at newlines only (never at U+2028)."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP
        with gzip.open(path) if zipped else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip file is damaged ({error}); fetch it again") from None
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected a .jsonl or .jsonl.gz file") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a file that can be read") from None


def _parse(line: bytes) -> Record:
    try:
        record = json.loads(line.decode())
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        wrong = f"invalid UTF-8 at byte {error.start + 1}; save the file as UTF-8"
    except UnicodeEncodeError:
        wrong = "half a surrogate pair (\\ud800 to \\udfff); escape whole characters"
    except json.JSONDecodeError as error:
        wrong = f"broken JSON at column {error.colno} ({error.msg}); expected one object a line"
    except (RecursionError, ValueError):
        wrong = "JSON nested too deep or a number too long; simplify it"
    else:
        if isinstance(record, dict):
            return record
        wrong = f"a JSON {type(record).__name__}; expected an object"
    raise DataError(wrong)


def to_request(record: Record, max_new_tokens: int) -> Request:
    """One record as a request; `DataError` says which field is wrong, and what would be right."""
    record = {name: value for name, value in record.items() if value is not None}
    request = _form(record)(_identity(record), record)
    return replace(
        request,
        answers=_answers(record),
        max_new_tokens=_count(record, "max_new_tokens", max_new_tokens),
        group=_group(record),
    )


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
        raise DataError(f'"passages" is {_short(passages)}; expected a list')
    texts = [_passage(value, f'"passages"[{i}]') for i, value in enumerate(passages)]
    return Request.rag(id, texts, _text(record, "question"), system=_optional(record, "system"))


def _passage(value: object, name: str) -> str:
    if not isinstance(value, dict):
        return _checked(value, name)
    text = _checked(value.get("text"), f'{name}["text"]')
    title = value.get("title") or ""
    if not isinstance(title, str):
        raise DataError(f'{name}["title"] is {_short(title)}; expected a string')
    return f"{title}\n{text}" if title.strip() else text


def _chat(id: str, record: Record) -> Request:
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise DataError(f'"messages" is {_short(messages)}; expected a list of one or more')
    turns = [_turn(value, f'"messages"[{i}]', i) for i, value in enumerate(messages)]
    if turns[-1][0] != "user":
        raise DataError(f"the last message is from {turns[-1][0]!r}; expected one from the user")
    if system := _optional(record, "system"):
        if turns[0][0] == "system":
            raise DataError('"system" and a system message; expected one of them')
        turns.insert(0, ("system", system))
    history = [Message(role, (Segment(_KINDS[role], text),)) for role, text in turns[:-1]]
    return Request(id, (*history, Message("user", (Segment("question", turns[-1][1]),))))


def _turn(value: object, name: str, position: int) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise DataError(f'{name} is {_short(value)}; expected an object with "role" and "content"')
    role = value.get("role")
    if not isinstance(role, str) or role not in _KINDS or (role == "system" and position):
        allowed = "user or assistant, or system in the first message"
        raise DataError(f'{name}["role"] is {_short(role)}; expected {allowed}')
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
        raise DataError(f"{name} is {_short(value)}; expected a string that is not blank")
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
        raise DataError(f'"answers" is {_short(answers)}; expected a string or a list of strings')
    return tuple(answer for answer in answers if answer.strip())


def _count(record: Record, name: str, default: int) -> int:
    value = record.get(name, default)
    if not _is_count(value):
        raise DataError(f'"{name}" is {_short(value)}; expected an integer of at least 1')
    return int(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _group(record: Record) -> str | None:
    if "group" in record:
        return _label(record, "group")
    document = record.get("document")  # of any type, where it is a field of the data set's own
    return document if isinstance(document, str) and document.strip() else None


def _short(value: object) -> str:
    return _cut(" ".join(repr(value).split()), 40)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"
