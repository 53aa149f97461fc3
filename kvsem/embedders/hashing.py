"""Feature hashing: an embedder without a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from zlib import crc32

import numpy as np

from kvsem.errors import check_count

_VERSION = 1  # raise it when a text's features or their hashes change


class HashingEmbedder:
    """Words, pairs of words and character n-grams, counted in ``dim`` signed buckets.

    Sees surface form only: a shared word counts, a synonym does not. CRC-32 chooses bucket and
    sign, so vectors are the same in every process. A text of white space is all zero. Weinberger
    et al., arXiv 0902.2206.
    """

    def __init__(self, dim: int = 512, ngram: int = 3) -> None:
        check_count("dim", dim, 1)
        check_count("ngram", ngram, 1)
        self.dim = dim
        self.ngram = ngram
        self.identity = f"hashing/{_VERSION} dim={dim} ngram={ngram} normalise=l2"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32 ``[n, dim]``, rows of length 1, or 0 for a text without content."""
        counts = np.array([self._counts(text) for text in texts]).reshape(len(texts), self.dim)
        norms = np.linalg.norm(counts, axis=1, keepdims=True)
        return (counts / np.where(norms > 0, norms, 1)).astype(np.float32)

    def _counts(self, text: str) -> np.ndarray:
        hashes = [crc32(feature.encode(errors="surrogatepass")) for feature in self._features(text)]
        signed = np.array(hashes, dtype=np.int64)
        counts = np.zeros(self.dim)
        # the top bit is the sign, so that it is not the bucket's own parity
        np.add.at(counts, signed % self.dim, np.where(signed >> 31, -1.0, 1.0))
        if hashes and not counts.any():  # all signs cancelled, as a very short text's may
            counts[hashes[0] % self.dim] = 1
        return counts

    def _features(self, text: str) -> Iterator[str]:
        words = re.findall(r"\w+", text.casefold())
        yield from (f"w {word}" for word in words)
        yield from (f"p {left} {right}" for left, right in pairwise(words))
        if plain := " ".join(text.casefold().split()):
            padded = f" {plain} "
            last = max(1, len(padded) - self.ngram + 1)
            yield from (f"c {padded[i : i + self.ngram]}" for i in range(last))
