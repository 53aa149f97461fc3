"""An eviction policy orders what the pool may give up."""

from typing import Protocol


class Usage(Protocol):
    """What a policy may look at: one cached block (a prefix page, or a chunk's pages).

    ``added`` and ``used`` are readings of the pool's clock, which ticks once a lookup or a
    publication; ``cost`` is the number of multiplications that computing its KV again takes.
    """

    added: int
    used: int
    hits: int
    n_tokens: int
    nbytes: int
    cost: float


class Eviction(Protocol):
    def priority(self, block: Usage, floor: float) -> float:
        """The block with the lowest priority is evicted first, among equals the one that has
        been idle longest. Asked when a block is published and whenever it is hit; ``floor`` is
        the highest priority that was evicted so far (0 at the start): what ageing adds up from.
        """
        ...
