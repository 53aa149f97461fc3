"""The donor stands alone, as in TurboRAG and Block-Attention (arXiv 2410.07590, 2409.15355)."""

from collections.abc import Sequence

from kvsem.contexts.base import Donor, place_passages
from kvsem.types import Request


class Alone:
    """Behind the tokenizer's BOS only: no system prompt, no template.

    Donors of donor/target records stand behind the system prompt all the same.
    """

    name = "alone"

    def donors(self, requests: Sequence[Request], seed: int) -> list[Donor]:
        return place_passages(
            requests, lambda text, system: Donor(text, system, bare=True, context=self.name)
        )
