"""The donor is what an earlier request left behind."""

from collections.abc import Sequence

from kvsem.contexts.base import Donor
from kvsem.errors import SettingError
from kvsem.types import Request


class InRequest:
    """As served requests left it, without a second prefill: nothing is ever ingested.

    What was computed on reused KV carries its depth; ``admit: exact_only`` of an arm leaves it
    out. Raises `SettingError` where passages are to be ingested.
    """

    name = "in_request"

    def donors(self, requests: Sequence[Request], seed: int) -> list[Donor]:
        allowed = "workload.ingest=false with it: it is what served requests leave behind"
        raise SettingError("context", self.name, allowed)
