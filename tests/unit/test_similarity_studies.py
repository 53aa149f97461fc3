"""The studies of search and of embeddings: what they count, checked by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.embeddings.estimate import area, estimate, excess, fitted, spearman
from experiments.embeddings.pairs import FILES, KINDS, pairs
from experiments.gates import thresholds
from experiments.index.run import perturbed
from experiments.study import DATA

ROOT = Path(__file__).parents[2]
needs_data = pytest.mark.skipif(
    not (DATA / FILES["xquad"]).is_file(), reason="needs the public files of the studies"
)


def test_a_perfect_order_and_its_opposite() -> None:
    likeness = np.array([0.9, 0.8, 0.3, 0.1])
    assert spearman(likeness, np.array([0.0, 1.0, 2.0, 50.0])) == pytest.approx(1)
    assert spearman(likeness, np.array([3.0, 2.0, 1.0, 0.0])) == pytest.approx(-1)
    assert spearman(likeness, np.ones(4)) == 0
    # ranks of dissimilarity 1 2 3 4 and of divergence 2 1 4 3: 1 - 6 * 4 / (4 * 15)
    assert spearman(likeness, np.array([0.2, 0.1, 0.9, 0.5])) == pytest.approx(0.6)


def test_the_area_under_the_risk_coverage_curve() -> None:
    divergence = np.array([0.0, 1.0, 2.0])
    assert area(np.array([0.9, 0.5, 0.1]), divergence) == pytest.approx((0 + 0.5 + 1) / 3)
    assert area(np.zeros(3), divergence) == pytest.approx(1)  # no order: the mean everywhere
    assert excess(np.array([0.9, 0.5, 0.1]), divergence) == pytest.approx(0)
    assert excess(np.zeros(3), divergence) == pytest.approx(1)
    assert excess(np.array([0.1, 0.5, 0.9]), divergence) > 1


def test_documents_are_drawn_whole() -> None:
    likeness, divergence = np.array([0.9, 0.8, 0.2, 0.1]), np.array([0.0, 1.0, 2.0, 3.0])
    one = estimate(spearman, likeness, divergence, ["a"] * 4, 50, 0)
    assert (one["low"], one["high"]) == (pytest.approx(1), pytest.approx(1))
    two = estimate(area, likeness, divergence, ["a", "a", "b", "b"], 200, 0)
    # only the first document twice: 0, 1 shared out over equal similarities: 0, 0, 1/3, 1/2
    assert two["low"] == pytest.approx((0 + 0 + 1 / 3 + 1 / 2) / 4)
    assert two["high"] == pytest.approx((2 + 2 + 7 / 3 + 10 / 4) / 4)


def test_a_fit_learns_from_the_known_half_only() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 2))
    divergence = np.exp(features @ np.array([-2.0, 0.5]))
    known = np.arange(60) < 30
    score = fitted(features, divergence, known)
    assert spearman(score[~known], divergence[~known]) > 0.95
    changed = np.where(known, divergence, rng.random(60))
    assert np.allclose(fitted(features, changed, known), score)


@needs_data
def test_pairs_are_of_their_kind_and_no_document_is_on_both_sides() -> None:
    files = {name: DATA / path for name, path in FILES.items()}
    made = pairs(files, list(KINDS), 6, 80, 0)
    assert made == pairs(files, list(KINDS), 6, 80, 0)
    assert len(made) == 6 * len(KINDS) == len({pair.id for pair in made})
    sides = defaultdict(set)
    for pair in made:
        sides[pair.group].add(pair.is_held_out)
        assert pair.donor != pair.target
        assert max(len(text.split()) for text in (pair.donor, pair.target)) <= 80
    assert all(len(side) == 1 for side in sides.values())
    assert {side for found in sides.values() for side in found} == {True, False}


def test_perturbations_are_as_near_as_they_are_said_to_be() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(40, 16))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = rng.uniform(0.9, 0.97, 40)
    found = perturbed(vectors, cosines, rng)
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(40), abs=1e-6)
    assert (found * vectors).sum(axis=1) == pytest.approx(cosines, abs=1e-6)


@needs_data
def test_the_search_study_runs_and_flat_finds_all(tmp_path: Path) -> None:
    command = [sys.executable, "experiments/index/run.py", "embedder=hashing", "n_real=300"]
    command += ["n_vectors=1200", "n_queries=40", "ef_search=[64]", f"out={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["indexes"]
    assert found["flat"]["recall_at_1"] == 1
    (hnsw,) = (row for name, row in found.items() if name != "flat")
    assert hnsw["recall_at_1"] >= 0.95
    assert hnsw["n_vectors"] == 1200


@pytest.mark.parametrize(
    ("study", "given", "said"),
    [
        ("index", "n_real=0", "n_real"),
        ("index", "cosine=[0.9,1.5]", "cosine"),
        ("index", "data=nowhere", "is missing"),
        ("embeddings", "kinds=[nonsense]", "kinds"),
    ],
)
def test_a_mistake_is_one_line(study: str, given: str, said: str) -> None:
    command = [sys.executable, f"experiments/{study}/run.py", given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def _pair(similarity: float, kl: float, hit_rate: float = 0.9) -> dict[str, Any]:
    row = {"similarity": similarity, "kl_first_nats": kl, "hit_rate": hit_rate}
    return row | {"group": f"{similarity}/{kl}"}


def test_a_false_hit_is_above_the_threshold_and_off_by_more_than_the_budget() -> None:
    rows = [_pair(0.9, 0.001), _pair(0.9, 0.1), _pair(0.7, 0.5), _pair(0.95, 0.3, hit_rate=0.0)]
    low, high = (thresholds.at(rows, threshold, 0.02) for threshold in (0.6, 0.8))
    assert (low["hits"], low["false hits"]) == (3, 2)  # what reuses nothing is no hit
    assert (high["hits"], high["false hits"]) == (2, 1)
    assert high["kl_first_nats"]["mean"] == pytest.approx(0.101 / 4)
    assert high["hit_rate"]["mean"] == pytest.approx(1.8 / 4)
    rate = high["false hits rate"]
    assert rate["low"] < rate["mean"] == 0.25 < rate["high"]


def test_the_threshold_is_chosen_precision_first() -> None:
    """By the upper end of the interval, and never below a threshold that is too lax."""
    many = [_pair(0.8 + i / 1000, 0.001) for i in range(200)]
    rows = [*many, *(_pair(0.75, 0.1 + i) for i in range(30)), _pair(0.71, 0.001)]
    found = [thresholds.at(rows, threshold, 0.02) for threshold in (0.7, 0.75, 0.8, 0.9)]
    assert thresholds.lowest(found, 0.05) == 0.8
    assert thresholds.lowest(found, 0.9) == 0.7
    assert thresholds.lowest(found, 0.001) is None
    assert "| 0.75 | 1" not in thresholds.table(found[2:])
