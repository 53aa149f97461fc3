"""Control: the donor's KV is that of neutral filler."""

from collections.abc import Sequence
from dataclasses import replace

from kvsem.contexts.base import Donor, place_passages
from kvsem.types import Request


class FillerKV:
    """For each passage the KV of as many tokens of filler, computed exactly behind the system
    prompt and moved like any chunk's: what unrelated text of the same length is worth.

    Donors of donor/target records are filler too. No yaml of ``conf/context``, because only the
    arm ``filler_kv`` may find such entries.
    """

    name = "filler_kv"

    def donors(self, requests: Sequence[Request], seed: int) -> list[Donor]:
        return [
            replace(donor, filler=True, context=self.name)
            for donor in place_passages(requests, Donor)
        ]
