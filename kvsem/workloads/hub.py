"""Requests from a data set of the hub, or from a local one, through `datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from kvsem.errors import DataError, SettingError
from kvsem.records import Record, check_counts, read_requests
from kvsem.types import Request

FIELDS = (
    "id", "system", "passages", "question", "messages", "prompt", "donor", "target", "answers",
    "group", "max_new_tokens",
)  # fmt: skip
BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {  # of a file, by its suffix
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
}
PACKED = (".gz", ".bz2", ".xz", ".zst")
_PATH = f"a data set of the hub, a folder, or a {', '.join(BUILDERS)} file"
_ROLES = {
    "human": "user", "gpt": "assistant", "bot": "assistant", "agent": "assistant",
    "model": "assistant", "function": "tool", "observation": "tool",
}  # fmt: skip
_LONGEST = 240  # characters of somebody else's message
_MOST_NAMES = 30


class HubWorkload:
    """The rows of a data set as requests.

    ``path``: a name on the hub, a folder, or a JSON, CSV or Parquet file. ``fields`` says which
    field of a row is what: a dotted name (``answers.text``, ``turns.0``; of a list of objects the
    field of each), a list of names (their values after each other) or, of passages, ``{title,
    text}``. Without it the rows have the fields of `kvsem.workloads.jsonl.JsonlWorkload`. A row
    whose id is not named is called ``row-0``, ``row-1``, …

    A passage may be a list of sentences; blank ones are left out. Messages may also be ShareGPT's
    ``{from, value}``, ``{user, assistant}`` pairs, or texts of the two in turn. With ``limit`` rows
    are streamed and no more are read than needed; without, the data set is downloaded once.

    Raises `SettingError` and `DataError`.
    """

    def __init__(
        self,
        path: str | Path | None,
        config: str | None = None,
        split: str = "train",
        revision: str | None = None,
        fields: Mapping[str, Any] | None = None,
        limit: int | None = None,
        ingest: bool = True,
        max_new_tokens: int = 16,
        conversations: bool = False,
    ) -> None:
        if not path:
            raise SettingError("workload.path", path, _PATH)
        check_counts(limit, max_new_tokens)
        chosen = {kind: name for kind, name in (fields or {}).items() if name is not None}
        for kind in chosen:
            if kind not in FIELDS:
                raise SettingError("workload.fields", kind, f"some of {', '.join(FIELDS)}")
        self.path, self.ingest = str(path), ingest
        rows = _rows(self.path, config, split, revision, streaming=limit is not None)
        records = _records(self.path, rows, chosen)
        self._requests = tuple(
            read_requests(self.path, records, limit, max_new_tokens, conversations)
        )
        if not self._requests:
            raise DataError(f"{self.path}: no rows in split {split!r}")

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


# Reading --------------------------------------------------------------------------------------


def _rows(
    path: str, config: str | None, split: str, revision: str | None, streaming: bool
) -> Iterator[Record]:
    """The rows of one split; whatever goes wrong on the way is a `DataError` of one line."""
    name, more = _source(path)
    try:
        from datasets import load_dataset

        local = bool(more) or Path(name).is_dir()  # streamed, so that nothing is copied
        yield from load_dataset(
            name, config, split=split, revision=revision, streaming=streaming or local, **more
        )
    except ConnectionError as error:
        raise DataError(
            f"data set {path!r}: the hub cannot be reached, and it is not in the cache; load it "
            "once with a network, or give a local path"
        ) from error
    except Exception as error:  # of Arrow, of the hub's client, of the file system
        text = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"data set {path!r} cannot be read: {text[:_LONGEST]}") from error


def _source(path: str) -> tuple[str, dict[str, Any]]:
    """What `load_dataset` is to be called with for ``path``."""
    file = Path(path).expanduser()
    if file.is_dir():
        return str(file), {}
    suffixes = [suffix for suffix in file.suffixes if suffix not in PACKED]
    builder, more = BUILDERS.get(suffixes[-1] if suffixes else "", (None, {}))
    if not file.is_file():
        if builder or file.is_absolute() or path.count("/") > 1 or path.startswith("."):
            raise DataError(f"{path}: no such file or folder; expected {_PATH}")
        return path, {}
    if builder is None:
        raise SettingError("workload.path", path, _PATH)
    return builder, {"data_files": str(file), **more}


# Fields ---------------------------------------------------------------------------------------


def _records(
    path: str, rows: Iterable[Record], fields: Mapping[str, Any]
) -> Iterator[tuple[str, Record]]:
    for i, row in enumerate(rows):
        try:
            record = _record(row, fields, i)
        except DataError as error:
            raise DataError(f"{path} row {i}: {error}") from None
        yield f"row {i}", record


def _record(row: Record, fields: Mapping[str, Any], number: int) -> Record:
    """One row as a record of `kvsem.records`."""
    found = {kind: _value(row, name, kind) for kind, name in fields.items()} if fields else row
    record = {kind: value for kind, value in found.items() if value is not None}
    for kind, shape in (("passages", _passages), ("answers", _answers), ("messages", _messages)):
        if kind in record:
            record[kind] = shape(record[kind])
    return {"id": f"row-{number}"} | record


def _value(row: Record, name: Any, kind: str) -> Any:
    if isinstance(name, str):
        return _look_up(row, name, kind)
    if isinstance(name, Mapping) and kind == "passages" and set(name) == {"title", "text"}:
        titles, texts = (_listed(_look_up(row, str(name[of]), kind)) for of in ("title", "text"))
        if len(titles) != len(texts):
            raise DataError(f"{len(titles)} titles of {len(texts)} passages")
        return [{"title": t, "text": text} for t, text in zip(titles, texts, strict=True)]
    if isinstance(name, Iterable) and not isinstance(name, Mapping):
        return list(chain.from_iterable(_listed(_look_up(row, str(of), kind)) for of in name))
    raise SettingError(f"workload.fields.{kind}", name, "the name of a field, or a list of them")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _look_up(row: Record, name: str, kind: str) -> Any:
    """The value under a dotted name. Raises `SettingError` that names what there is."""
    if name in row:
        return row[name]
    values: Any = row
    for part in name.split("."):
        try:
            values = _step(values, part)
        except (KeyError, IndexError):
            names = list(_names(row))
            shown = ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
            raise SettingError(f"workload.fields.{kind}", name, f"one of {shown}") from None
    return values


def _step(value: Any, part: str) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return value[int(part)] if part.isdecimal() else [_step(item, part) for item in value]
    if isinstance(value, Mapping):
        return value[part]
    raise KeyError(part)


def _names(value: Any, ahead: str = "") -> Iterator[str]:
    """Dotted names of the fields of ``value``, of lists those of their first object."""
    if isinstance(value, list):
        value = next(iter(value), None)
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield f"{ahead}{name}"
            yield from _names(inner, f"{ahead}{name}.")


# Shapes ---------------------------------------------------------------------------------------


def _passages(value: Any) -> Any:
    """A list of texts or ``{title, text}``, without blank ones."""
    passages = [_passage(passage) for passage in _listed(value)]
    return [passage for passage in passages if not _is_blank(passage)]


def _passage(value: Any) -> Any:
    if isinstance(value, Mapping) and "text" in value:
        return {**value, "text": _joined(value["text"])}
    return _joined(value)


def _is_blank(passage: Any) -> bool:
    text = passage.get("text", passage) if isinstance(passage, Mapping) else passage
    return text is None or (isinstance(text, str) and not text.strip())


def _joined(value: Any) -> Any:
    """Sentences as one text; those of some data sets bring their space with them."""
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        return value
    spaced = any(part != part.strip() for part in value)
    return ("" if spaced else " ").join(value)


def _answers(value: Any) -> Any:
    """A list of texts, whatever they were nested in; numbers as they are written."""
    if isinstance(value, list):
        return list(chain.from_iterable(_listed(_answers(part)) for part in value))
    return str(value) if isinstance(value, int | float) else value


def _messages(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    if all(isinstance(message, str) for message in value):
        return [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(value)
        ]
    return list(chain.from_iterable(_message(message) for message in value))


def _message(value: Any) -> list[Any]:
    if not isinstance(value, Mapping) or "role" in value:
        return [value]
    if "from" in value:
        return [{"role": _role(value["from"]), "content": value.get("value")}]
    spoken = [(_role(name), text) for name, text in value.items() if text is not None]
    if {role for role, _ in spoken} <= {"user", "assistant"}:
        return [{"role": role, "content": text} for role, text in sorted(spoken, reverse=True)]
    return [value]


def _role(name: Any) -> Any:
    return _ROLES.get(name, name) if isinstance(name, str) else name
