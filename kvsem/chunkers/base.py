"""A chunker cuts one segment's text into semantic spans."""

from typing import Protocol

from kvsem.types import Span


class Chunker(Protocol):
    def split(self, text: str) -> list[Span]:
        """Character spans that cover ``text`` in order, without gap or overlap; [] for ``""``."""
        ...
