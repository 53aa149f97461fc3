"""An index finds stored chunks by their vectors; and what every index checks, ranks and saves."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvsem.errors import DataError, KvsemError, SettingError
from kvsem.files import DamagedError, checksum, replacing, seal, unseal

FILE = "index.safetensors"
FORMAT = 1  # raise it when the file's meaning changes
_MAX_ID = 2**63 - 1


class Embeds(Protocol):
    """What an index must know of an embedder."""

    @property
    def dim(self) -> int: ...
    @property
    def identity(self) -> str: ...


class ChunkIndex(Protocol):
    dim: int
    identity: str  # of the embedder whose vectors these are

    def __len__(self) -> int: ...

    def ids(self) -> list[int]:
        """Of all vectors that are there."""
        ...

    def add(self, ids: Sequence[int], vectors: np.ndarray) -> None:
        """Store float32 ``[n, dim]`` under our own positive 64-bit ids; a known id is replaced."""
        ...

    def search(self, vector: np.ndarray, k: int) -> list[tuple[int, float]]:
        """At most ``k`` ``(id, cosine)``, best first; [] where nothing is comparable."""
        ...

    def check(self, embedder: Embeds) -> None:
        """Raise `KvsemError` where vectors of ``embedder`` do not belong here."""
        ...

    def remove(self, ids: Sequence[int]) -> int:
        """Forget ids; returns how many were there."""
        ...

    def save(self, folder: Path) -> None:
        """Keep everything in a file in ``folder``, with the embedder's identity."""
        ...

    def load(self, folder: Path) -> None:
        """Hold what `save` left in ``folder``, of whatever kind of index, and nothing else.

        Raises `DataError` where nothing was saved, `KvsemError` where it is of another embedder.
        Where the file is damaged: one warning, and what was held before stays.
        """
        ...


def import_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise KvsemError(
            "faiss is missing: pip install 'kvsem[cpu]' or 'kvsem[gpu]' (never both)"
        ) from error
    return faiss


def check_embedder(index: Embeds, embedder: Embeds) -> None:
    """Raise `KvsemError` unless ``index`` holds vectors of ``embedder``."""
    if embedder.dim != index.dim:
        raise KvsemError(f"the index holds vectors of {index.dim}, the embedder {embedder.dim}")
    if embedder.identity != index.identity:
        raise KvsemError(
            f"the index belongs to embedder {index.identity!r}, not to {embedder.identity!r}"
        )


def units(vectors: np.ndarray, dim: int) -> np.ndarray:
    """float32 ``[n, dim]``, rows of length 1; all zero where a row has no direction."""
    wide = np.asarray(vectors, dtype=np.float64)
    if wide.ndim != 2 or wide.shape[1] != dim:
        raise KvsemError(f"vectors of shape {wide.shape}, the index holds dimension {dim}")
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    usable = np.isfinite(norms) & (norms > 0)
    rows = np.where(usable, wide, 0) / np.where(usable, norms, 1)
    return np.ascontiguousarray(rows, dtype=np.float32)


def to_store(ids: Sequence[int], vectors: np.ndarray, dim: int) -> tuple[list[int], np.ndarray]:
    """Distinct ids and their unit vectors ``[n, dim]``; of an id given twice the last one stays.

    Raises `KvsemError` for vectors without a direction, of another dimension or number.
    """
    rows = units(vectors, dim)
    if len(ids) != len(rows):
        raise KvsemError(f"{len(ids)} ids for {len(rows)} vectors")
    if bad := [i for i in ids if not 0 <= i <= _MAX_ID]:
        raise SettingError("ids", bad[0], "a number from 0 to 2**63 - 1")
    if not rows.any(axis=1).all():
        raise KvsemError("a vector that is zero or not finite cannot be indexed")
    last = {int(id): row for row, id in enumerate(ids)}
    return list(last), rows[list(last.values())]


def ranked(ids: Iterable[int], scores: np.ndarray) -> list[tuple[int, float]]:
    """``(id, cosine)``, best first, equal ones by id; FAISS's -1 for "none" is left out."""
    found = zip(ids, scores.clip(-1, 1).tolist(), strict=True)
    return sorted(((i, s) for i, s in found if i >= 0), key=lambda hit: (-hit[1], hit[0]))


# In a file ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """What an index leaves in a file; no id is there twice."""

    ids: np.ndarray  # int64 [n]
    vectors: np.ndarray  # float32 [n, dim], of length 1
    graph: np.ndarray | None = None  # uint8, FAISS's own bytes of what it built over them
    built: dict[str, Any] = field(default_factory=dict)  # with what; another's graph is no use


def write_saved(folder: Path, of: Embeds, saved: Saved) -> None:
    """One file, so that vectors, ids and identity are never of different moments."""
    tensors = {"ids": saved.ids, "vectors": saved.vectors}
    if saved.graph is not None:
        tensors["graph"] = saved.graph
    header = {
        "format": FORMAT,
        "identity": of.identity,
        "dim": of.dim,
        "metric": "cosine",
        "built": saved.built,
        "sha256": {name: checksum(tensor) for name, tensor in tensors.items()},
    }
    with replacing(folder / FILE) as part:
        save_file(tensors, part, metadata={"kvsem": seal(header)})


def read_saved(folder: Path, of: Embeds) -> Saved | None:
    """What `write_saved` left; None, with a warning, where it is damaged.

    Every byte is held against its checksum here, before FAISS sees any: it can be made to write
    where it should not. A damaged graph is left out, and can be built again from the vectors.
    """
    path = folder / FILE
    try:
        tensors, text = _read(path)
        header = unseal(text)
        if header["format"] != FORMAT:
            raise DamagedError(f"format {header['format']}, this version reads {FORMAT}")
        return _checked(path, tensors, header, of)
    except DamagedError as error:
        warnings.warn(f"{path}: not read, {error}", stacklevel=3)
        return None


def _checked(
    path: Path, tensors: dict[str, np.ndarray], header: dict[str, Any], of: Embeds
) -> Saved:
    _check_identity(path, header, of)
    whole = {n: t for n, t in tensors.items() if checksum(t) == header["sha256"].get(n)}
    if not {"ids", "vectors"} <= whole.keys():
        raise DamagedError("damaged: its checksum is another")
    graph = whole.get("graph")
    if graph is None and "graph" in header["sha256"]:
        warnings.warn(f"{path}: damaged graph, built again from the vectors", stacklevel=4)
    return Saved(whole["ids"], whole["vectors"], graph, header["built"])


def _check_identity(path: Path, header: dict[str, Any], of: Embeds) -> None:
    for name, mine in (("identity", of.identity), ("dim", of.dim)):
        if header[name] != mine:
            raise KvsemError(
                f"{path}: vectors of embedder {header['identity']!r} (dim {header['dim']}), "
                f"not of {of.identity!r} (dim {of.dim})"
            )


def _read(path: Path) -> tuple[dict[str, np.ndarray], str]:
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, (file.metadata() or {})["kvsem"]
    except FileNotFoundError:
        raise DataError(f"{path}: not there, no index was saved in this folder") from None
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"damaged or not readable ({error})") from None
