"""The likelihood of the reference answer."""

from kvsem.metrics.base import Observation


class LikelihoodMetric:
    """``quality/answer_nll_nats``: negative log likelihood of the first reference answer, mean over
    its tokens; left out where there is none."""

    needs_text = False

    def __init__(self) -> None:
        self.higher_is_better = {"quality/answer_nll_nats": False}

    def compare(self, exact: Observation, arm: Observation) -> dict[str, float]:
        if arm.answer_nll_nats is None:
            return {}
        return {"quality/answer_nll_nats": arm.answer_nll_nats}
