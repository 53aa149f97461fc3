"""Whether greedy decoding says the same."""

from kvsem.metrics.base import Observation


class GreedyMetric:
    """``quality/exact_match_greedy``: 1 where the arm's own greedy text equals exact's, else 0."""

    def __init__(self) -> None:
        self.higher_is_better = {"quality/exact_match_greedy": True}

    def compare(self, exact: Observation, arm: Observation) -> dict[str, float]:
        return {"quality/exact_match_greedy": float(arm.text == exact.text)}
