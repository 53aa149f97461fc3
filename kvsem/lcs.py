"""Longest common subsequence: what two sequences share in order, in few runs.

Bit-parallel (Hyyrö 2004, "Bit-parallel LCS-length computation revisited") with the rows kept for
the way back: target x donor bits of memory and as many bit operations between the common head and
tail, whatever repeats in them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Run = tuple[int, int, int]  # target, donor, length: items that stand side by side in both


def runs(target: Sequence[Hashable], donor: Sequence[Hashable]) -> list[Run]:
    """As many items of ``target`` as possible, in order, each with an equal one of ``donor``.

    Of equally long ones few runs are preferred: a run that fits whole beside its neighbour moves
    there.
    """
    return _joined(_runs(pairs(target, donor)), target, donor)


def pairs(target: Sequence[Hashable], donor: Sequence[Hashable]) -> list[tuple[int, int]]:
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


def _common(left: Sequence[Hashable], right: Sequence[Hashable]) -> int:
    """Length of the common prefix."""
    n = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        n += 1
    return n


def _subsequence(target: Sequence[Hashable], donor: Sequence[Hashable]) -> list[tuple[int, int]]:
    rows = _rows(target, donor)
    found = []
    i, j = len(target), len(donor)
    while i and j:
        if rows[j] >> (i - 1) & 1:  # target token i - 1 adds nothing
            i -= 1
        elif not rows[j - 1] >> (i - 1) & 1:  # the same length without donor token j - 1
            j -= 1
        else:
            i, j = i - 1, j - 1
            found.append((i, j))
    return found[::-1]


def _rows(target: Sequence[Hashable], donor: Sequence[Hashable]) -> list[int]:
    """Row ``j``, bit ``i`` is 0 where target token i lengthens the LCS with ``donor[:j]``."""
    places: dict[Hashable, int] = {}
    for i, token in enumerate(target):
        places[token] = places.get(token, 0) | 1 << i
    full = row = (1 << len(target)) - 1
    rows = [row]
    for token in donor:
        matched = row & places.get(token, 0)
        row = (row + matched | row - matched) & full
        rows.append(row)
    return rows


def _runs(found: Sequence[tuple[int, int]]) -> list[Run]:
    runs: list[Run] = []
    for i, j in found:
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (i, j):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((i, j, 1))
    return runs


def _joined(
    runs: Sequence[Run], target: Sequence[Hashable], donor: Sequence[Hashable]
) -> list[Run]:
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
