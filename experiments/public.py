"""The public data files that the studies read: one JSON object a line, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsem.errors import DataError

Record = dict[str, Any]


def read(path: Path) -> Iterator[Record]:
    """Every record of ``path``; raises `DataError` where it cannot be read."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            yield from map(json.loads, lines)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)
