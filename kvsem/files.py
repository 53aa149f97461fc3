"""Files of ours: whole or not there, their owner's alone, and known to be what was written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvsem.errors import DataError


class DamagedError(DataError):
    """A file of ours is not what was written, or is not for this version; it counts as absent."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file (0600) to be written, which then takes the place of ``path`` in one step.

    Every call has a name of its own, so that writers never meet; readers see the old file or the
    whole new one, also after a power cut. Folders that are missing are made (0700). Raises
    `DataError` where nothing can be written; ``path`` is then as it was.
    """
    part = None
    try:
        _make_private(path.parent)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        yield Path(part)
        os.chmod(part, 0o600)
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error})") from error
    finally:
        if part is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)


def _make_private(folder: Path) -> None:
    """``mkdir(parents=True)`` gives its mode to the last folder only."""
    if not folder.is_dir():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _sync(path: Path | str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def seal(body: dict[str, Any]) -> str:
    """JSON with a checksum of itself; `unseal` takes it apart."""
    return json.dumps({"body": body, "sha256": _digest(body)})


def unseal(text: str) -> dict[str, Any]:
    """The body of what `seal` made. Raises `DamagedError` where anything in it has changed."""
    try:
        whole = json.loads(text)
        body: dict[str, Any] = whole["body"]
        if whole["sha256"] == _digest(body):
            return body
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise DamagedError("damaged: its checksum is another")


def checksum(array: np.ndarray) -> str:
    """Hex SHA-256 of type, shape and content."""
    sha = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    sha.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return sha.hexdigest()


def _digest(body: dict[str, Any]) -> str:
    plain = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()
