"""The donor stands behind a few dummy tokens whose KV is dropped."""

from collections.abc import Sequence
from dataclasses import replace

from kvsem.contexts.base import Donor, place_passages
from kvsem.errors import SettingError, check_count
from kvsem.types import Request


class BehindDummy:
    """LegoLink-0 of EPIC (ICML 2025, arXiv 2410.15332): tokens that nobody reads take the place of
    the attention sink, so that the passage's own first tokens do not.

    EPIC compiles each chunk alone, behind ``n`` dummies (4) at the very start. Ours stands them
    between the system prompt and the passage; ``bare: true`` is EPIC's own, behind BOS and dummies
    only. A dummy is a line break, which makes a sink like any other token (arXiv 2309.17453,
    section 3.1); what EPIC takes was not looked up.
    """

    name = "behind_dummy"

    def __init__(self, n: int = 4, bare: bool = False) -> None:
        check_count("context.n", n, 1)
        if type(bare) is not bool:
            raise SettingError("context.bare", bare, "true or false")
        self.n, self.bare = n, bare

    def donors(self, requests: Sequence[Request], seed: int) -> list[Donor]:
        dummies = Donor("", None, bare=self.bare, context=self.name, n_dummies=self.n)
        return place_passages(
            requests, lambda text, system: replace(dummies, text=text, system=system)
        )
