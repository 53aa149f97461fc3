"""The threshold gate: its edge, its reasons, its range."""

import math
from typing import Any

import pytest

from kvsem.errors import SettingError
from kvsem.gates.base import Candidate, Decision
from kvsem.gates.threshold import ThresholdGate


def decide(score: float, min_score: float = 0.85) -> Decision:
    return ThresholdGate(min_score).accept("a", Candidate("b", score))


def test_both_sides_of_the_threshold() -> None:
    assert decide(0.85) == Decision(True)
    assert decide(0.8501) == Decision(True)
    assert decide(0.8499) == Decision(False, "below_threshold")


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_refused(score: float) -> None:
    assert decide(score, -1.0) == Decision(False, "score_not_finite")


def test_identical_texts_pass_the_highest_threshold() -> None:
    """FAISS gives 0.99999988 for a vector with itself."""
    assert decide(0.99999988, 1.0).accepted
    assert not decide(0.9999, 1.0).accepted


def test_noise_at_the_threshold_decides_nothing() -> None:
    assert {decide(0.85 + noise).accepted for noise in (-2e-7, 0.0, 2e-7)} == {True}


@pytest.mark.parametrize("min_score", [-2, 1.01, math.nan, "abc", True, None])
def test_range(min_score: Any) -> None:
    with pytest.raises(SettingError, match=r"min_score=.*: expected a number from -1.0 to 1.0"):
        ThresholdGate(min_score)
