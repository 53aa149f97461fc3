"""The donor stands directly behind the system prompt."""

from collections.abc import Sequence

from kvsem.contexts.base import Donor, place_passages
from kvsem.types import Request


class BehindSystem:
    """System prompt and template as in the request, then the passage alone."""

    name = "behind_system"

    def donors(self, requests: Sequence[Request], seed: int) -> list[Donor]:
        return place_passages(requests, Donor)
