"""An embedder turns texts into unit vectors."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Embedder(Protocol):
    dim: int
    identity: str  # model, revision and settings: vectors of two identities never share an index

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32 ``[n, dim]``, each row of length 1 (all zero where a text has no content)."""
        ...
