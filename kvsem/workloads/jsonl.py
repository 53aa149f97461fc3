"""Requests from a file of one JSON object a line, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvsem.errors import DataError, SettingError
from kvsem.records import Record, check_counts, read_requests
from kvsem.types import Request

_GZIP = b"\x1f\x8b"  # no UTF-8 text begins with it


class JsonlWorkload:
    """The records of ``path`` as requests; each has an "id" and one of these forms:

    - ``{"system"?, "passages": [str or {"title"?, "text"}], "question"}``: the
      list may be empty, as where a retriever found nothing
    - ``{"system"?, "messages": [{"role", "content"}]}``: the last one is the question, from the
      user (or a tool); those before it are history (kind ``turn``)
    - ``{"prompt"}``: no chat template
    - ``{"system"?, "donor", "target", "question"?}``: the donor is ingested, the target is asked

    Where a record fits several, "donor" and "target" win over "messages", then "passages". Each
    form takes "answers" (a string or a list), "max_new_tokens" and "group": records that share it
    are one cluster in the bootstrap ("document" counts where there is no "group"). Other fields
    are ignored, and so are null ones and blank lines.

    With ``conversations`` every turn of "messages" is a request of its own, behind the recorded
    turns before it; its reference answer is the recorded reply. ``limit`` counts requests.

    Raises `DataError`, which names the file and the line, and `SettingError`.
    """

    def __init__(
        self,
        path: str | Path | None,
        limit: int | None = None,
        ingest: bool = True,
        max_new_tokens: int = 16,
        conversations: bool = False,
    ) -> None:
        if not path:
            raise SettingError("workload.path", path, "a .jsonl or .jsonl.gz file")
        check_counts(limit, max_new_tokens)
        self.path, self.ingest = Path(path).expanduser(), ingest
        self._requests = tuple(
            read_requests(str(self.path), _records(self.path), limit, max_new_tokens, conversations)
        )
        if not self._requests:
            raise DataError(f"{self.path}: no records; expected one JSON object a line")

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


def _records(path: Path) -> Iterator[tuple[str, Record]]:
    for number, line in _lines(path):
        try:
            record = _parse(line)
        except DataError as error:
            raise DataError(f"{path} line {number}: {error}") from None
        yield f"line {number}", record


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
