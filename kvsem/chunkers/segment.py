"""No cutting: a segment is one chunk."""

from kvsem.types import Span


class SegmentChunker:
    """The whole text as one span, for passages that are reused as they stand."""

    def split(self, text: str) -> list[Span]:
        return [Span(0, len(text))] if text else []
