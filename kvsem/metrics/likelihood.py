"""The likelihood of the reference answer."""

from kvsem.metrics.base import Observation


class LikelihoodMetric:
    """``quality/answer_nll_nats``: of the first reference answer, per token, as observed. It is in
    `AnswerMetric` too, which needs the arm's text beside it; without one nothing is decoded."""

    needs_text = False

    def __init__(self) -> None:
        self.higher_is_better = {"quality/answer_nll_nats": False}

    def compare(self, exact: Observation, arm: Observation) -> dict[str, float]:
        if arm.answer_nll_nats is None:
            return {}
        return {"quality/answer_nll_nats": arm.answer_nll_nats}
