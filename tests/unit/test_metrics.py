"""Metrics against values computed by other formulas."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsem.metrics.answer import AnswerMetric, token_f1
from kvsem.metrics.base import Observation
from kvsem.metrics.divergence import DivergenceMetric
from kvsem.metrics.greedy import GreedyMetric
from kvsem.metrics.kv_error import KvErrorMetric, per_layer
from kvsem.metrics.likelihood import LikelihoodMetric

STEPS, VOCAB = 5, 97


def observation(seed: int = 0, scale: float = 3.0) -> Observation:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(STEPS, VOCAB, generator=generator) * scale
    return Observation(
        logits=logits,
        greedy=tuple(logits.argmax(-1).tolist()),
        text="The cat sat.",
        answers=("the cat",),
        answer_nll_nats=1.5,
        keys=tuple(torch.randn(2, 3, 4, generator=generator) for _ in range(3)),
        values=tuple(torch.randn(2, 3, 4, generator=generator) for _ in range(3)),
    )


def softmax(logits: torch.Tensor) -> np.ndarray:
    powers = np.exp(logits.numpy().astype(np.longdouble))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


# --- divergence ---


def test_divergence_by_the_definition() -> None:
    exact, arm = observation(0), observation(1)
    p, q = softmax(exact.logits), softmax(arm.logits)
    kl = (p * np.log(p / q)).sum(-1)
    rows = range(STEPS)
    under = [np.array([d[i, t] for i, t in zip(rows, exact.greedy, strict=True)]) for d in (p, q)]
    agrees = [i for i in rows if p[i].argmax() == q[i].argmax()]
    assert DivergenceMetric().compare(exact, arm) == pytest.approx(
        {
            "quality/kl_first_nats": float(kl[0]),
            "quality/kl_nats": float(kl.mean()),
            "quality/top1_agreement": len(agrees) / STEPS,
            "quality/perplexity_ratio": float((under[0] / under[1]).prod() ** (1 / STEPS)),
        },
        rel=1e-9,
    )


def test_divergence_of_two_tokens_by_hand() -> None:
    exact = dataclasses.replace(
        observation(), logits=torch.tensor([[math.log(3.0), 0.0]]), greedy=(0,)
    )
    arm = dataclasses.replace(exact, logits=torch.zeros(1, 2))
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert DivergenceMetric().compare(exact, arm) == pytest.approx(
        {
            "quality/kl_first_nats": kl,
            "quality/kl_nats": kl,
            "quality/top1_agreement": 1.0,
            "quality/perplexity_ratio": 1.5,
        },
        rel=1e-6,
    )


def test_equal_distributions_diverge_by_nothing() -> None:
    exact = observation(scale=30)
    same = {"kl_first_nats": 0.0, "kl_nats": 0.0, "top1_agreement": 1.0, "perplexity_ratio": 1.0}
    assert DivergenceMetric().compare(exact, exact) == {f"quality/{k}": v for k, v in same.items()}
    moved = dataclasses.replace(exact, logits=exact.logits.double() + 5.0)  # softmax sees no offset
    assert DivergenceMetric().compare(exact, moved)["quality/kl_nats"] == pytest.approx(
        0, abs=1e-13
    )


def test_tiny_divergence_is_not_noise() -> None:
    """For logits moved by e the divergence is e**2 / 2 * variance under exact, to second order."""
    exact = observation(scale=1)
    step = torch.randn(STEPS, VOCAB, generator=torch.Generator().manual_seed(9)).double()
    p = softmax(exact.logits).astype(float)
    variance = (p * step.numpy() ** 2).sum(-1) - (p * step.numpy()).sum(-1) ** 2
    for size in (1e-4, 1e-5):
        arm = dataclasses.replace(exact, logits=exact.logits.double() + size * step)
        found = DivergenceMetric().compare(exact, arm)["quality/kl_nats"]
        assert found == pytest.approx(size**2 / 2 * variance.mean(), rel=1e-3)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_divergence_is_never_negative(one: int, other: int) -> None:
    found = DivergenceMetric().compare(observation(one), observation(other))
    assert found["quality/kl_nats"] >= 0
    assert found["quality/kl_first_nats"] >= 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_count_as_missing(bad: float) -> None:
    exact, arm = observation(0), observation(0)
    arm.logits[2, 5] = bad
    found = DivergenceMetric().compare(exact, arm)
    assert found["quality/kl_first_nats"] == 0
    assert all(math.isnan(v) for k, v in found.items() if k != "quality/kl_first_nats")
    arm.logits[0, 0] = bad
    assert all(map(math.isnan, DivergenceMetric().compare(exact, arm).values()))


def test_tokens_that_both_rule_out_do_not_matter() -> None:
    exact, arm = observation(0), observation(1)
    for o in (exact, arm):
        o.logits[:, -7:] = -math.inf
    cut = [dataclasses.replace(o, logits=o.logits[:, :-7]) for o in (exact, arm)]
    exact = dataclasses.replace(exact, greedy=(0,) * STEPS)
    cut[0] = dataclasses.replace(cut[0], greedy=(0,) * STEPS)
    metric = DivergenceMetric()
    assert metric.compare(exact, arm) == pytest.approx(metric.compare(*cut), rel=1e-12)


def test_direction_and_rows_matter() -> None:
    exact, arm = observation(0), observation(1)
    metric = DivergenceMetric()
    there, back = metric.compare(exact, arm), metric.compare(arm, exact)
    assert there["quality/kl_nats"] != pytest.approx(back["quality/kl_nats"], rel=1e-3)
    first = [dataclasses.replace(o, logits=o.logits[:1]) for o in (exact, arm)]
    assert metric.compare(*first)["quality/kl_nats"] == pytest.approx(
        there["quality/kl_first_nats"]
    )
    empty = dataclasses.replace(exact, logits=exact.logits[:0])
    assert metric.compare(empty, empty) == {}


# --- texts ---


def test_greedy_match() -> None:
    exact = observation()
    assert GreedyMetric().compare(exact, exact) == {"quality/exact_match_greedy": 1.0}
    other = dataclasses.replace(exact, text="The cat sat")
    assert GreedyMetric().compare(exact, other) == {"quality/exact_match_greedy": 0.0}


@pytest.mark.parametrize(
    ("text", "reference", "f1"),
    [
        ("The cat sat.", "the cat", 2 / 3),  # 1 of 2 and 1 of 1 tokens
        ("An answer: Paris!", "paris", 2 / 3),
        ("no", "yes", 0.0),
        ("", "yes", 0.0),
        ("the", "a", 0.0),
        ("a b b c", "b b b", 2 * 2 / (3 + 3)),  # "a" is an article; "b" counts twice
        ("3.14", "314", 1.0),  # punctuation goes without a space, as in LongBench
        ("今天很好", "今天好", 2 * 3 / (4 + 3)),
        ("“北京”。", "北京", 1.0),
        ("iPhone 手机", "iphone手机", 1.0),
        ("東京タワー", "タワー", 2 * 3 / (5 + 3)),
        ("서울 특별시", "서울", 2 / 3),  # Korean has spaces
    ],
)
def test_token_f1(text: str, reference: str, f1: float) -> None:
    assert token_f1(text, reference) == pytest.approx(f1)


def test_answers_take_the_best_reference() -> None:
    exact = observation()
    arm = dataclasses.replace(exact, text="cat", answers=("dog", "cat sat", "tree"))
    assert AnswerMetric().compare(exact, arm) == {
        "quality/f1_exact_arm": pytest.approx(2 / 3),
        "quality/f1": pytest.approx(2 / 3),
    }
    assert LikelihoodMetric().compare(exact, arm) == {"quality/answer_nll_nats": 1.5}


def test_what_is_not_known_is_left_out() -> None:
    arm = dataclasses.replace(observation(), answers=(), answer_nll_nats=None, text="...")
    exact = dataclasses.replace(arm, text="!")
    assert AnswerMetric().compare(arm, arm) == {"quality/f1_exact_arm": 1.0}
    assert AnswerMetric().compare(exact, arm) == {"quality/f1_exact_arm": 0.0}
    assert LikelihoodMetric().compare(exact, arm) == {}
    untold = dataclasses.replace(observation(), text=None, answers=("dog",))
    assert AnswerMetric().compare(exact, untold) == {}


# --- KV ---


def stacked(o: Observation, layer: int) -> np.ndarray:
    assert o.keys is not None
    assert o.values is not None
    return np.concatenate([o.keys[layer].numpy().ravel(), o.values[layer].numpy().ravel()])


def test_kv_error_by_the_definition() -> None:
    exact, arm = observation(0), observation(1)
    pairs = [(stacked(exact, layer), stacked(arm, layer)) for layer in range(3)]
    wanted = [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in pairs]
    assert per_layer(exact, arm) == pytest.approx(wanted, rel=1e-5)
    assert KvErrorMetric().compare(exact, arm) == {
        "quality/kv_error_rel": pytest.approx(float(np.mean(wanted)), rel=1e-5)
    }
    assert KvErrorMetric().compare(exact, exact) == {"quality/kv_error_rel": 0.0}


def test_kv_error_of_nothing_and_of_zero_kv() -> None:
    exact = observation()
    without = dataclasses.replace(exact, keys=None)
    assert KvErrorMetric().compare(exact, without) == {}
    assert KvErrorMetric().compare(without, exact) == {}
    assert exact.keys is not None
    assert exact.values is not None
    zero = dataclasses.replace(
        exact,
        keys=tuple(map(torch.zeros_like, exact.keys)),
        values=tuple(map(torch.zeros_like, exact.values)),
    )
    assert per_layer(exact, zero) == pytest.approx([1, 1, 1])
    assert all(map(math.isnan, per_layer(zero, exact)))
