"""Edits are found by their surface; the embedder is asked about what is left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsem.embedders.hashing import HashingEmbedder
from kvsem.index.flat import FlatIndex
from kvsem.memory.vectors import ChunkVectors
from tests.tiny import prose

TEXT = prose(1, 80)
EDITED = TEXT.replace(" ", "  ", 1) + " And so on."
OTHER = prose(2, 80)


class Counting:
    """A real embedder that keeps what it was asked."""

    def __init__(self) -> None:
        self.inner, self.asked = HashingEmbedder(256), [""]
        self.dim, self.identity = self.inner.dim, "counting"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.asked += texts
        return self.inner.embed(texts)


def test_the_embedder_is_not_asked_about_edits() -> None:
    embedder = Counting()
    surface = ChunkVectors(HashingEmbedder(), FlatIndex)
    vectors = ChunkVectors(embedder, FlatIndex, surface, 0.9)
    vectors.add("n", {"a": TEXT})
    embedder.asked.clear()
    (edited, other) = vectors.near("n", [EDITED, OTHER], 3)
    assert embedder.asked == [OTHER]
    assert edited[0][0] == "a"
    assert edited[0][1] >= 0.9
    assert all(score < 0.9 for _, score in other)
    assert vectors.near("m", [EDITED], 3) == [[]]  # another tenant's
    vectors.forget("a")
    assert vectors.near("n", [EDITED, OTHER], 3) == [[], []]
