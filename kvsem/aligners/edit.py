"""Longest common subsequence of token ids: what an edit left is reused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Run = tuple[int, int, int]  # target, donor, length: tokens that stand side by side in both


class EditAligner:
    """As many tokens as possible from the donor, in order, each from an equal token.

    A longest common subsequence: bit-parallel (Hyyrö 2004, "Bit-parallel LCS-length computation
    revisited") with the rows kept for the way back, target x donor bits of memory between the
    common head and tail. Of equally long alignments one with few runs is preferred: a run that
    fits whole beside its neighbour moves there.
    """

    def align(self, target_ids: np.ndarray, donor_ids: np.ndarray) -> np.ndarray:
        """int64 ``[target tokens]``: strictly increasing donor indices, and -1 between them."""
        target, donor = target_ids.tolist(), donor_ids.tolist()
        source = np.full(len(target), -1, dtype=np.int64)
        for start, origin, length in _joined(_runs(_pairs(target, donor)), target, donor):
            source[start : start + length] = np.arange(origin, origin + length)
        return source


def _pairs(target: Sequence[int], donor: Sequence[int]) -> list[tuple[int, int]]:
    """``(target, donor)`` indices of a longest common subsequence, ascending."""
    head = _common(target, donor)
    left, right = target[head:], donor[head:]
    tail = _common(left[::-1], right[::-1])
    middle = _subsequence(left[: len(left) - tail], right[: len(right) - tail])
    return [
        *((i, i) for i in range(head)),
        *((head + i, head + j) for i, j in middle),
        *((len(target) - i, len(donor) - i) for i in range(tail, 0, -1)),
    ]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        n += 1
    return n


def _subsequence(target: Sequence[int], donor: Sequence[int]) -> list[tuple[int, int]]:
    rows = _rows(target, donor)
    pairs = []
    i, j = len(target), len(donor)
    while i and j:
        if rows[j] >> (i - 1) & 1:  # target token i - 1 adds nothing
            i -= 1
        elif not rows[j - 1] >> (i - 1) & 1:  # the same length without donor token j - 1
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]


def _rows(target: Sequence[int], donor: Sequence[int]) -> list[int]:
    """Row ``j``, bit ``i`` is 0 where target token i lengthens the LCS with ``donor[:j]``."""
    places: dict[int, int] = {}
    for i, token in enumerate(target):
        places[token] = places.get(token, 0) | 1 << i
    full = row = (1 << len(target)) - 1
    rows = [row]
    for token in donor:
        matched = row & places.get(token, 0)
        row = (row + matched | row - matched) & full
        rows.append(row)
    return rows


def _runs(pairs: Sequence[tuple[int, int]]) -> list[Run]:
    runs: list[Run] = []
    for i, j in pairs:
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (i, j):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((i, j, 1))
    return runs


def _joined(runs: Sequence[Run], target: Sequence[int], donor: Sequence[int]) -> list[Run]:
    """The same number of tokens in fewer runs, where one fits whole beside its neighbour."""
    kept: list[Run] = []
    for i, j, n in runs:
        run = (i, j, n)
        while kept:
            i, j, n = run
            a, b, m = kept[-1]
            if target[a + m : a + m + n] == donor[b + m : b + m + n]:
                run = (a, b, m + n)  # this one moves back to the last
            elif target[i - m : i] == donor[j - m : j]:
                run = (i - m, j - m, m + n)  # the last moves up to this one
            else:
                break
            kept.pop()
        kept.append(run)
    return kept
