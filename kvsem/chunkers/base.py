"""A chunker cuts one segment's text into semantic spans."""

from collections.abc import Iterable
from typing import Protocol

from kvsem.errors import check_count
from kvsem.types import Span


class Chunker(Protocol):
    def split(self, text: str) -> list[Span]:
        """Character spans that cover ``text`` in order, without gap or overlap; [] for ``""``."""
        ...


def pack(
    text: str, blocks: Iterable[tuple[int, bool]], max_tokens: int, min_tokens: int = 0
) -> list[Span]:
    """Blocks grouped from the front, each group at most ``max_tokens`` estimated tokens.

    A block is ``(where it starts, whether it opens a group)``, in order; what is ahead of the
    first belongs to it. A group shorter than ``min_tokens`` takes in the block behind it even
    where that opens one. A block above ``max_tokens`` stands alone, uncut.
    """
    if not text:
        return []
    begins = dict(blocks)
    edges = sorted({0, *(start for start in begins if 0 < start < len(text))})
    starts, used = [0], 0.0
    for start, end in zip(edges, [*edges[1:], len(text)], strict=True):
        cost = estimate_tokens(text[start:end])
        opens = begins.get(start, False) and used >= min_tokens
        if start and (opens or used + cost > max_tokens):
            starts.append(start)
            used = 0.0
        used += cost
    return spans_from(starts, text)


def spans_from(starts: list[int], text: str) -> list[Span]:
    """Spans from each start to the next; ``starts`` begin with 0 and ascend."""
    return [Span(*pair) for pair in zip(starts, [*starts[1:], len(text)], strict=True)]


def estimate_tokens(text: str) -> float:
    """``max(1.3 * words, ascii / 4 + other bytes / 2)``: tokens of ``text``, without a tokenizer.

    The length of a chunk then depends on no tokenizer, and is about right for English and for
    Chinese.
    """
    n_bytes = len(text.encode(errors="surrogatepass"))
    n_ascii = len(text.encode("ascii", "ignore"))
    return max(1.3 * len(text.split()), n_ascii / 4 + (n_bytes - n_ascii) / 2)


def ahead_of_space(text: str, at: int) -> int:
    """``at`` moved ahead of the white space that it stands behind, which leads the next chunk."""
    while at and text[at - 1].isspace():
        at -= 1
    return at


def check_lengths(max_tokens: int, min_tokens: int = 0) -> None:
    """Raise `SettingError` for lengths of chunks that are none, or contradict each other."""
    check_count("max_tokens", max_tokens, 1)
    check_count("min_tokens", min_tokens, 0, max_tokens)
