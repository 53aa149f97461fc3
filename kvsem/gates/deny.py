"""Pairs of texts that were wrong once, and never stand in for each other again."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

from kvsem.errors import DataError, SettingError
from kvsem.files import DamagedError, replacing, seal, unseal
from kvsem.gates.base import Candidate, Decision
from kvsem.keys import digest

FORMAT = 1


class DenyGate:
    """Refuses the pairs that `deny` was told, in both directions.

    ``path``: the file that keeps them, so that they hold after a restart and for every cache tier
    and process that reads it, made with its folders at the first pair; without one they are
    forgotten with this object. It holds digests of the texts, never the texts. Raises `DataError`
    where it is damaged: a list of false hits that cannot be read must not count as empty.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        if path is not None and not isinstance(path, str | Path):
            raise SettingError("path", path, "the path of a file, or null")
        self.path = Path(path).expanduser() if path else None
        if self.path and (self.path.is_dir() or any(p.is_file() for p in self.path.parents)):
            raise SettingError("path", str(path), "a file, new or of denied pairs, in a folder")
        self._pairs: set[str] = set()
        self._read_at: tuple[int, int] | None = None  # of the file: time and length

    def deny(self, text: str, other: str) -> None:
        """From now on neither of the two texts takes KV from the other."""
        pair = _pair(text, other)
        if self.path is None:
            self._pairs.add(pair)
            return
        try:
            with FileLock(f"{self.path}.lock"):
                self._read()
                self._pairs.add(pair)
                with replacing(self.path) as part:
                    part.write_text(seal({"format": FORMAT, "pairs": sorted(self._pairs)}))
        except OSError as error:
            raise DataError(f"{self.path}: denied pairs cannot be written ({error})") from error
        self._read()

    def accept(self, text: str, candidate: Candidate) -> Decision:
        """Refuses with ``denied``."""
        self._read()
        if _pair(text, candidate.text) in self._pairs:
            return Decision(False, "denied")
        return Decision(True)

    def _read(self) -> None:
        """What the file holds by now, if it changed: another process may have added to it."""
        if self.path is None:
            return
        try:
            found = self.path.stat()
            if self._read_at == (found.st_mtime_ns, found.st_size):
                return
            body = unseal(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except (OSError, ValueError, DamagedError) as error:
            raise DataError(f"{self.path}: denied pairs cannot be read ({error})") from error
        if body.get("format") != FORMAT:
            raise DataError(f"{self.path}: format {body.get('format')}, expected {FORMAT}")
        self._pairs = set(body["pairs"])
        self._read_at = found.st_mtime_ns, found.st_size


def _pair(text: str, other: str) -> str:
    """The same for both orders, and whatever white space is around a text."""
    first, second = sorted((text.strip(), other.strip()))
    return digest("denied", first=first, second=second)
