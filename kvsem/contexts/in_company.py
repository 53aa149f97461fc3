"""The donor stands behind passages that it never meets in a request."""

from bisect import bisect_left
from collections.abc import Sequence

from kvsem.contexts.base import Donor, companions, place_passages, warn_lonely
from kvsem.errors import SettingError
from kvsem.keys import digest
from kvsem.types import Kind, Request

Ring = list[tuple[str, str]]  # (digest of text, text), sorted


class InCompany:
    """Behind ``n`` passages of requests none of which holds this passage.

    Company is drawn from the digest of (seed, passage) on a ring of text digests, so that neither
    the requests' order nor most further requests change it. It is a passage rather than a turn
    of a conversation where there is a choice, and fewer than ``n`` where there are no more.
    Without any, the passage stands `behind_system`, with one warning.
    """

    name = "in_company"

    def __init__(self, n: int = 1) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise SettingError("context.n", n, "an integer of at least 1")
        self.n = n

    def donors(self, requests: Sequence[Request], seed: int) -> list[Donor]:
        met = companions(requests)
        rings = _ring(requests, "passage", "target"), _ring(requests, "turn")

        def place(text: str, system: str | None) -> Donor:
            company = self._draw(rings, met[text], seed, text)
            context = self.name if company else "behind_system"
            return Donor(text, system, company, context=context)

        donors = place_passages(requests, place)
        warn_lonely(donors, requests, self.name)
        return donors

    def _draw(
        self, rings: Sequence[Ring], banned: set[str], seed: int, text: str
    ) -> tuple[str, ...]:
        drawn: list[str] = []
        for i in range(self.n):
            start = digest("company", seed=seed, text=text, draw=i)
            found = (_next(ring, start, banned | {*drawn}) for ring in rings)
            drawn += next(([one] for one in found if one is not None), [])
        return tuple(drawn)


def _ring(requests: Sequence[Request], *kinds: Kind) -> Ring:
    texts = {text for r in requests if not r.donors for text in r.segments(*kinds)}
    return sorted((digest("company", text=text), text) for text in texts)


def _next(ring: Ring, start: str, banned: set[str]) -> str | None:
    """The first text at or behind ``start``, all the way round, that is not banned."""
    first = bisect_left(ring, (start, ""))
    around = (ring[(first + i) % len(ring)][1] for i in range(len(ring)))
    return next((text for text in around if text not in banned), None)
