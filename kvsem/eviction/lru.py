"""Least recently used goes first."""

from kvsem.eviction.base import Usage


class LRU:
    """Priority is the time of the last use; a block just published counts as used."""

    def priority(self, block: Usage, floor: float) -> float:
        return block.used
