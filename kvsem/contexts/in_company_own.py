"""The donor stands behind its own request's passages, in another order."""

from collections import defaultdict
from collections.abc import Sequence

from kvsem.contexts.base import PASSAGES, Donor, place_passages, predecessors, warn_lonely
from kvsem.keys import digest
from kvsem.types import Request


class InCompanyOwn:
    """Behind all other passages of the first request that holds it, shuffled with the seed.

    The last of them is never the predecessor that the passage has in any request; where each of
    them is one, the next request that holds the passage lends its passages. Without any, the
    passage stands `behind_system`, with one warning.
    """

    name = "in_company_own"

    def donors(self, requests: Sequence[Request], seed: int) -> list[Donor]:
        held = _holders(requests)
        ahead = predecessors(requests)

        def place(text: str, system: str | None) -> Donor:
            for others in held[system, text.strip()]:
                ranked = sorted(others, key=lambda o: digest("own", seed=seed, text=text, other=o))
                if last := [o for o in ranked if o.strip() not in ahead[text.strip()]]:
                    company = (*(o for o in ranked if o != last[-1]), last[-1])
                    return Donor(text, system, company, context=self.name)
            return Donor(text, system)

        donors = place_passages(requests, place)
        warn_lonely(donors, requests, self.name)
        return donors


def _holders(requests: Sequence[Request]) -> dict[tuple[str | None, str], list[list[str]]]:
    """(system, stripped text) → the other distinct passages of each request that holds it."""
    held = defaultdict(list)
    for request in requests:
        texts = {text.strip(): text for text in request.segments(*PASSAGES)}
        for text in texts if not request.donors else ():
            others = [other for stripped, other in texts.items() if stripped != text]
            held[request.system, text].append(others)
    return held
