"""A donor context says behind which text a passage's KV is computed at ingestion."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from kvsem.types import Kind, Request

PASSAGES: tuple[Kind, ...] = ("passage", "target", "turn")
FILLER = (
    "The morning was mild and the road was dry. A cart stood beside the barn, and someone had left "
    "a bucket near the gate. Across the field a row of trees gave some shade, and a path led past "
    "them to the edge of the water. Later in the day a light wind came up. The doors were closed, "
    "the lamps were lit, and the table was set for the evening. Nothing in particular happened, "
    "and the next day began much like the one before."
)  # neutral prose: no name, number or fact that a question could ask for


@dataclass(frozen=True)
class Donor:
    """One chunk-to-be and what stands ahead of it in the donor prompt.

    ``company`` texts stand between the system prompt and ``text``. With ``also`` the KV stored is
    the mean over ``company`` and these further ones, and never exact. With ``bare`` the text stands
    behind the tokenizer's BOS only: no system prompt, no template. With ``n_dummies`` so many
    copies of one token stand ahead of it instead of the company. With ``filler`` the KV stored is
    of filler in the place of ``text``, token for token, and never exact. ``context`` is what
    really was built, which differs from the name asked for where no company could be had.
    """

    text: str
    system: str | None
    company: tuple[str, ...] = ()
    bare: bool = False
    context: str = "behind_system"
    n_dummies: int = 0
    filler: bool = False
    also: tuple[tuple[str, ...], ...] = ()


class DonorContext(Protocol):
    name: str

    def donors(self, requests: Sequence[Request], seed: int) -> list[Donor]:
        """One donor for each distinct (system, passage) of the requests; donors of donor/target
        records stand directly behind the system prompt whatever the context."""
        ...


def place_passages(
    requests: Sequence[Request], place: Callable[[str, str | None], Donor]
) -> list[Donor]:
    """Donors of donor/target records behind the system prompt, and ``place(text, system)`` for
    each other distinct (system, passage); one per key, in the order in which they first occur.

    The target of a donor/target record is not placed: it is what the donor stands in for.
    """
    given = _given(requests)
    keys = ((r.system, text) for r in requests for text in r.donors or r.segments(*PASSAGES))
    return [
        Donor(text, system) if (system, text.strip()) in given else place(text, system)
        for system, text in dict.fromkeys(keys)
    ]


def companions(requests: Sequence[Request]) -> dict[str, set[str]]:
    """Text → every text of the requests that hold it, itself included; all of them stripped."""
    met: dict[str, set[str]] = defaultdict(set)
    for request in requests:
        texts = {text.strip() for text in request.segments(*PASSAGES)}
        for text in texts:
            met[text] |= texts
    return met


def predecessors(requests: Sequence[Request]) -> dict[str, set[str]]:
    """Text → the texts directly ahead of it in any prompt; all of them stripped."""
    ahead: dict[str, set[str]] = defaultdict(set)
    for request in requests:
        texts = [s.text.strip() for message in request.messages for s in message.segments]
        for before, text in pairwise(texts):
            ahead[text].add(before)
    return ahead


def warn_lonely(donors: Sequence[Donor], requests: Sequence[Request], name: str) -> None:
    """One warning where passages without donors of their own fell back to ``behind_system``."""
    given = _given(requests)
    lonely = (d for d in donors if d.context == "behind_system")
    if n_lonely := sum((d.system, d.text.strip()) not in given for d in lonely):
        warnings.warn(
            f"context={name}: no company for {n_lonely} of {len(donors)} passages, which stand "
            "directly behind the system prompt instead",
            stacklevel=3,
        )


def _given(requests: Sequence[Request]) -> set[tuple[str | None, str]]:
    """(system, text) of the donors of donor/target records, stripped."""
    return {(r.system, text.strip()) for r in requests for text in r.donors}
