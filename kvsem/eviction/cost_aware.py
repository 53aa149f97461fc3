"""What saves least recomputation per byte goes first, with ageing."""

from kvsem.eviction.base import Usage


class CostAware:
    """GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998, HPL-98-69R1).

    priority = floor + frequency x cost / size, with frequency = 1 + hits, cost in
    multiplications that computing the KV again takes, size in bytes. ``floor`` rises with every
    eviction, so that what was once popular does not stay for ever.
    """

    def priority(self, block: Usage, floor: float) -> float:
        return floor + (1 + block.hits) * block.cost / max(1, block.nbytes)
