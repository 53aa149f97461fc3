"""Run directories, their rows, and the summary of means with intervals.

A run directory holds ``config.yaml``, ``env.json``, ``samples.jsonl`` (one row per request and
arm), ``summary.json`` and later ``report.html``. The files are the record; tracking mirrors them.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import pandas as pd
import yaml

from kvsem.errors import DataError, SettingError
from kvsem.summary import Row, bootstrap, comparable, summarise

if sys.platform != "win32":
    import fcntl

__all__ = ["RunData", "RunDir", "bootstrap", "comparable", "load_run", "summarise"]

State = Literal["running", "finished", "failed"]
STATUS = "status.json"  # of a run that is a job of a sweep; it may be there before the run is
REUSABLE = "an empty folder or a run of the same configuration"


class RunDir:
    """One run's folder. Made by ``create`` (writes and resumes) or ``open`` (reads)."""

    def __init__(self, path: Path, samples: IO[bytes] | None = None) -> None:
        self.path = path
        self._samples = samples
        self._finished = {(row["request"], row["arm"]) for row in self.rows()}

    @classmethod
    def create(
        cls,
        out: Path | None,
        root: Path = Path("runs"),
        name: str = "run",
        *,
        config: str,
        env: Mapping[str, Any],
    ) -> RunDir:
        """A new folder under ``root``, or ``out``: new, empty, or a run of the same ``config``.

        A run of the same configuration is resumed: a torn last line is cut off, finished rows
        stay as they are. Raises `SettingError` for any other folder, and for one that another
        process is writing to.
        """
        path = unique_folder(root, name) if out is None else _claimed(out, config)
        _write_new(path / "config.yaml", config)
        _write_new(path / "env.json", _dump(env))
        samples = (path / "samples.jsonl").open("ab+", buffering=0)
        _lock(samples, path)
        if (path / "config.yaml").read_text(encoding="utf-8") != config:  # another start was faster
            raise SettingError("out", str(path), REUSABLE)
        _cut_torn_line(samples)
        return cls(path, samples)

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """An existing run, for reading. Raises `DataError` where there is none."""
        path = Path(path)
        if not (path / "config.yaml").is_file():
            raise DataError(f"{path}: not a run directory (no config.yaml in it)")
        return cls(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row as one line. Non-finite numbers become null and are named in the row."""
        if self._samples is None:
            raise DataError(f"{self.path}: opened for reading")
        key = (row["request"], row["arm"])
        if key in self._finished:
            raise DataError(
                f"{self.path}: request {key[0]!r} of arm {key[1]!r} is finished already"
            )
        line = json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, default=_plain)
        self._samples.write(line.encode() + b"\n")
        self._finished.add(key)

    def rows(self) -> Iterator[Row]:
        """The whole rows, in the order written; a torn last line is not one."""
        path = self.path / "samples.jsonl"
        data = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: not a JSON object ({error})") from None

    def finished(self) -> set[tuple[str, str]]:
        """(request, arm) of every row that is on disk."""
        return set(self._finished)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomic(self.path / "summary.json", _dump(summary))

    def close(self) -> None:
        if self._samples is not None:
            self._samples.close()
            self._samples = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class RunData:
    """A run as a notebook reads it; ``samples`` has one row per request and arm."""

    path: Path
    config: dict[str, Any]
    env: dict[str, Any]
    samples: pd.DataFrame
    summary: dict[str, Any]

    @property
    def arms(self) -> list[str]:
        return list(self.summary["arms"])


def load_run(path: Path | str) -> RunData:
    """Read a run directory; a run without a summary (killed) is summarised from its rows."""
    run = RunDir.open(path)
    rows = list(run.rows())
    summary = _read_json(run.path / "summary.json")
    return RunData(
        path=run.path,
        config=yaml.safe_load((run.path / "config.yaml").read_text(encoding="utf-8")) or {},
        env=_read_json(run.path / "env.json"),
        samples=pd.DataFrame(rows),
        summary=summary or summarise(rows, {}, {}, {"state": "unfinished"}),
    )


def write_status(path: Path, state: State, overrides: Sequence[str], **more: str) -> None:
    """How the job in the folder ``path`` stands; ``more``: ``error``, one line, and the rest."""
    path.mkdir(parents=True, exist_ok=True)
    status = {"state": state, "overrides": list(overrides)} | more
    write_atomic(path / STATUS, _dump(status))


def read_status(path: Path) -> dict[str, Any]:
    """The job's state, overrides and, where it failed, error; empty where none was written."""
    return _read_json(path / STATUS)


def _finite(row: Mapping[str, Any]) -> Row:
    """JSON has no NaN: null in its place, and ``non_finite`` says what was there."""
    gone = {key: str(float(v)) for key, v in row.items() if _is_broken(v)}
    clean: Row = {key: _nulled(value) for key, value in row.items()}
    return clean | {"non_finite": gone} if gone else clean


def _nulled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _nulled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nulled(item) for item in value]
    return None if _is_broken(value) else value


def _is_broken(value: Any) -> bool:
    return isinstance(value, float | np.floating) and not math.isfinite(value)


def _plain(value: Any) -> Any:
    """numpy scalars and arrays as plain numbers; anything else as its text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(_nulled(value), indent=2, ensure_ascii=False, default=_plain) + "\n"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    return value


def write_atomic(path: Path, text: str) -> None:
    """Readers see the old file or the whole new one."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    os.chmod(file.name, 0o644)  # a temporary file is its owner's alone
    os.replace(file.name, path)


def _write_new(path: Path, text: str) -> None:
    if not path.exists():
        write_atomic(path, text)


def unique_folder(root: Path, name: str) -> Path:
    """A new folder ``root/NAME-TIME``.

    ``mkdir`` itself decides who gets a name, so two starts in one second never share one.
    """
    if not name or Path(name).name != name:
        raise SettingError("name", name, "a plain folder name")
    root.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in count(1):
        path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


def _claimed(out: Path, config: str) -> Path:
    """``out``, made where missing; refused unless empty or a run of the same configuration."""
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise SettingError("out", str(out), "a folder")
    out.mkdir(parents=True, exist_ok=True)
    known = out / "config.yaml"
    if known.is_file() and known.read_text(encoding="utf-8") == config:
        return out
    if any(path.name != STATUS for path in out.iterdir()):
        raise SettingError("out", str(out), REUSABLE)
    return out


def _lock(samples: IO[bytes], path: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(samples, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        samples.close()
        raise SettingError("out", str(path), "a folder that no other run is writing to") from None


def _cut_torn_line(samples: IO[bytes]) -> None:
    samples.seek(0)
    data = samples.read()
    if not data.endswith(b"\n"):  # a whole file stays as it is, its time of writing too
        samples.truncate(data.rfind(b"\n") + 1)
