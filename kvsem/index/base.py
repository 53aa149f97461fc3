"""An index finds stored chunks by their vectors."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Embeds(Protocol):
    """What an index must know of an embedder."""

    dim: int
    identity: str


class ChunkIndex(Protocol):
    def __len__(self) -> int: ...

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
