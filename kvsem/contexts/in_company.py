"""The donor stands behind passages that it never meets in a request."""

from bisect import bisect_left
from collections.abc import Sequence

from kvsem.contexts.base import Donor, companions, place_passages, warn_lonely
from kvsem.errors import check_count
from kvsem.keys import digest
from kvsem.types import Kind, Request

Ring = list[tuple[str, str]]  # (digest of text, text), sorted


class InCompany:
    """Behind ``n`` passages of requests none of which holds this passage.

    Company is drawn from the digest of (seed, passage) on a ring of text digests, so that neither
    the requests' order nor most further requests change it. It is a passage rather than a turn
    of a conversation where there is a choice, and fewer than ``n`` where there are no more.
    Without any, the passage stands `behind_system`, with one warning.

    With ``draws`` the KV stored is the mean over so many companies, all different: what a passage
    owes to one company and would not to another falls with their number, and what it owes to any
    stays. Building costs ``draws`` times as much, an entry as many bytes as ever. Ours.
    """

    name = "in_company"

    def __init__(self, n: int = 1, draws: int = 1) -> None:
        check_count("context.n", n, 1)
        check_count("context.draws", draws, 1)
        self.n, self.draws = n, draws

    def donors(self, requests: Sequence[Request], seed: int) -> list[Donor]:
        met = companions(requests)
        rings = _ring(requests, "passage", "target"), _ring(requests, "turn")

        def place(text: str, system: str | None) -> Donor:
            drawn = self._draw(rings, met[text.strip()], seed, text)
            context = self.name if drawn else "behind_system"
            more = range(self.n, len(drawn) - self.n + 1, self.n)
            also = tuple(drawn[i : i + self.n] for i in more)
            return Donor(text, system, drawn[: self.n], context=context, also=also)

        donors = place_passages(requests, place)
        warn_lonely(donors, requests, self.name)
        return donors

    def _draw(
        self, rings: Sequence[Ring], banned: set[str], seed: int, text: str
    ) -> tuple[str, ...]:
        drawn: list[str] = []
        for i in range(self.n * self.draws):
            start = digest("company", seed=seed, text=text, draw=i)
            found = (_next(ring, start, banned | {d.strip() for d in drawn}) for ring in rings)
            drawn += next(([one] for one in found if one is not None), [])
        return tuple(drawn)


def _ring(requests: Sequence[Request], *kinds: Kind) -> Ring:
    texts = {text for r in requests if not r.donors for text in r.segments(*kinds)}
    return sorted((digest("company", text=text), text) for text in texts)


def _next(ring: Ring, start: str, banned: set[str]) -> str | None:
    """The first text at or behind ``start``, all the way round, that is not banned (stripped)."""
    first = bisect_left(ring, (start, ""))
    around = (ring[(first + i) % len(ring)][1] for i in range(len(ring)))
    return next((text for text in around if text.strip() not in banned), None)
