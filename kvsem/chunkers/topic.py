"""Topics: a boundary where what is said next is unlike what was said before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvsem.chunkers.base import Chunker, check_lengths, pack
from kvsem.errors import SettingError, check_count, check_range
from kvsem.types import Span


class Vectors(Protocol):
    """What is asked of an embedder: unit rows, float32 ``[n, dim]``."""

    def embed(self, texts: Sequence[str]) -> np.ndarray: ...


class TopicChunker:
    """Sentences, parted where the similarity of neighbours drops by ``depth`` at least.

    Between two sentences stands the cosine of the mean vectors of ``window`` sentences on either
    side. A boundary is a valley of it: as deep as its neighbours or deeper, and ``depth`` below the
    higher of the two peaks around it (TextTiling, Hearst 1997, with sentence vectors for counts of
    words and the higher peak for the sum of both, so that a slope ends in a boundary). Chunks hold
    at least ``min_tokens`` and at most ``max_tokens`` estimated tokens; a sentence longer than that
    stands alone. ``sentences`` is the chunker that cuts sentences, of one each.

    The same text is cut the same way, whatever was cut before. Locality: a sentence that changes
    moves boundaries among the ``window`` sentences around it, and as far as the next boundary.
    """

    def __init__(
        self,
        sentences: Chunker,
        embedder: Vectors,
        depth: float = 0.2,
        window: int = 2,
        max_tokens: int = 256,
        min_tokens: int = 32,
    ) -> None:
        if isinstance(sentences, str) or not hasattr(sentences, "split"):
            raise SettingError("sentences", sentences, "a chunker")
        if not hasattr(embedder, "embed"):
            raise SettingError("embedder", embedder, "an embedder")
        check_lengths(max_tokens, min_tokens)
        check_range("depth", depth, 0.0, 2.0)
        check_count("window", window, 1)
        self.sentences, self.embedder = sentences, embedder
        self.depth, self.window = depth, window
        self.max_tokens, self.min_tokens = max_tokens, min_tokens

    def split(self, text: str) -> list[Span]:
        spans = self.sentences.split(text)
        if len(spans) < 2:
            return spans
        vectors = self.embedder.embed([text[span.start : span.end] for span in spans])
        opens = valleys(similarities(vectors, self.window), self.depth)
        blocks = [(0, False), *zip((span.start for span in spans[1:]), opens, strict=True)]
        return pack(text, blocks, self.max_tokens, self.min_tokens)


def similarities(vectors: np.ndarray, window: int) -> np.ndarray:
    """Cosine across each gap between neighbours, float64 ``[n - 1]``; 0 beside no content."""
    n = len(vectors)
    sums = np.vstack([np.zeros((1, vectors.shape[1])), np.cumsum(vectors, axis=0, dtype=float)])
    gaps = np.arange(1, n)
    before = sums[gaps] - sums[np.maximum(gaps - window, 0)]
    behind = sums[np.minimum(gaps + window, n)] - sums[gaps]
    lengths = np.linalg.norm(before, axis=1) * np.linalg.norm(behind, axis=1)
    products = np.einsum("ij,ij->i", before, behind)
    cosines: np.ndarray = np.divide(products, lengths, out=np.zeros(n - 1), where=lengths > 1e-9)
    # the last bits depend on the order of additions, and should not decide on a boundary
    return np.asarray(cosines.round(4))


def valleys(values: np.ndarray, depth: float) -> list[bool]:
    """Whether each value is a valley, ``depth`` below the higher of the peaks beside it."""
    peaks = np.maximum(_peaks(values), _peaks(values[::-1])[::-1])
    padded = np.pad(values, 1, constant_values=np.inf)
    is_lowest = (values <= padded[:-2]) & (values < padded[2:])
    return [bool(x) for x in is_lowest & (peaks - values >= depth)]


def _peaks(values: np.ndarray) -> np.ndarray:
    """How high one comes from each value walking to the left, as long as it goes up."""
    peaks = values.copy()
    for i in range(1, len(values)):
        if values[i - 1] >= values[i]:
            peaks[i] = peaks[i - 1]
    return peaks
