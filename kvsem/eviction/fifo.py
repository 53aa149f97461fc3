"""Control: first in, first out, however often it was used."""

from kvsem.eviction.base import Usage


class FIFO:
    """Priority is the time of publication."""

    def priority(self, block: Usage, floor: float) -> float:
        return block.added
