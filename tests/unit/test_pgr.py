"""PGR against hand-computed values, and where there is no gap to recover."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsem.intervals import ratio_of_means
from kvsem.report import write_report
from kvsem.results import RunDir, summarise

NLL, F1 = "quality/answer_nll_nats", "quality/f1"


def rows(values: dict[str, dict[str, list[float]]], groups: Any = None) -> list[dict[str, Any]]:
    """{arm: {key: one value a request}}; NaN leaves the value out."""
    return [
        {"request": f"q-{i}", "group": groups[i] if groups else None, "arm": arm, "settings": {}}
        | {key: own[i] for key, own in keys.items() if not math.isnan(own[i])}
        for arm, keys in values.items()
        for i in range(len(next(iter(keys.values()))))
    ]


def summary(values: dict[str, dict[str, list[float]]], groups: Any = None) -> dict[str, Any]:
    return summarise(rows(values, groups), {}, {}, {"state": "finished", "notes": ["mine"]})


HAND = {
    "exact": {NLL: [1.0, 2.0, 3.0], F1: [1.0, 0.5, 0.0]},
    "no_context": {NLL: [3.0, 6.0, 6.0], F1: [0.0, 0.0, 0.0]},
    "near": {NLL: [1.5, 2.0, 4.0], F1: [1.0, 0.5, 0.75]},
    "worse": {NLL: [4.0, 7.0, 7.0], F1: [0.0, 0.0, 0.0]},
}


def test_a_ratio_of_means_by_hand_and_not_clipped() -> None:
    """NLL: gaps 2, 4, 3 of which `near` recovers 1.5, 4, 2, and `worse` loses 1 each."""
    found = summary(HAND)["pgr"]
    assert found.keys() == {"near", "worse"}
    assert found["near"][NLL]["mean"] == pytest.approx(7.5 / 9)  # the mean of ratios is 0.806
    assert found["worse"][NLL]["mean"] == pytest.approx(-1 / 3)
    assert found["near"][F1]["mean"] == pytest.approx(1.5)  # above exact
    assert found["worse"][F1]["mean"] == 0.0
    assert all(e["n"] == 3 for keys in found.values() for e in keys.values())


def test_the_interval_is_that_of_paired_resamples() -> None:
    """Three records make 27 resamples: their ratios, each as often as it is drawn."""
    estimate = summary(HAND)["pgr"]["near"][NLL]
    own, gap = np.array([1.5, 4.0, 2.0]), np.array([2.0, 4.0, 3.0])
    draws = np.stack(np.meshgrid(*[range(3)] * 3), axis=-1).reshape(-1, 3)
    ratios = np.sort(own[draws].sum(1) / gap[draws].sum(1))
    assert estimate["low"] == pytest.approx(ratios[0])  # 1 in 27 is more than 2.5 %
    assert estimate["high"] == pytest.approx(ratios[-1])
    assert (estimate["low"], estimate["high"]) == pytest.approx((2 / 3, 1.0))


def test_documents_are_drawn_whole() -> None:
    """One document, one resample: no width at all."""
    found = summary(HAND, groups=["a", "a", "a"])["pgr"]["near"][NLL]
    assert found["low"] == found["mean"] == found["high"]
    two = summary(HAND, groups=["a", "a", "b"])["pgr"]["near"][NLL]
    assert (two["low"], two["high"]) == pytest.approx((2 / 3, 5.5 / 6))


def test_only_requests_that_all_three_arms_have() -> None:
    values = json.loads(json.dumps(HAND))
    values["near"][NLL][1] = math.nan
    values["no_context"][F1][0] = math.nan
    found = summary(values)["pgr"]
    assert found["near"][NLL]["mean"] == pytest.approx(3.5 / 5)
    assert found["near"][NLL]["n"] == 2
    assert found["worse"][NLL]["n"] == 3
    assert found["near"][F1]["mean"] == pytest.approx(1.25 / 0.5)


def test_without_a_gap_there_is_none_and_a_note() -> None:
    values = json.loads(json.dumps(HAND))
    values["no_context"] = values["exact"]
    found = summary(values)
    assert found["pgr"] == {}
    mine, *notes = found["status"]["notes"]
    assert mine == "mine"
    assert [note.split()[2] for note in notes] == [NLL, F1]
    assert all("says little" in note for note in notes)


def test_a_gap_that_may_be_none_is_noted_and_one_that_is_there_is_not() -> None:
    values = json.loads(json.dumps(HAND))
    values["no_context"][NLL] = [0.5, 2.5, 3.1]  # better without, once
    notes = summary(values)["status"]["notes"]
    assert any(f"PGR on {NLL} says little" in note for note in notes)
    assert np.isfinite(list(summary(values)["pgr"]["near"][NLL].values())).all()
    assert not any(NLL in note for note in summary(HAND)["status"]["notes"])
    swapped = HAND | {"exact": HAND["no_context"], "no_context": HAND["exact"]}  # worse with
    assert any(NLL in note for note in summary(swapped)["status"]["notes"])


@pytest.mark.parametrize("gone", ["exact", "no_context"])
def test_absent_without_both_ends(gone: str) -> None:
    found = summary({arm: keys for arm, keys in HAND.items() if arm != gone})
    assert "pgr" not in found
    assert found["status"]["notes"] == ["mine"]


def test_without_answers_there_is_nothing_to_recover() -> None:
    kl = {arm: {"quality/kl_nats": [1.0, 2.0]} for arm in HAND}
    found = summary(kl)
    assert (found["pgr"], found["status"]["notes"]) == ({}, ["mine"])


FLOATS = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=6))
def test_a_ratio_is_finite_or_absent(pairs: list[tuple[float, float]]) -> None:
    found = ratio_of_means(np.array(pairs), [str(i) for i in range(len(pairs))], resamples=50)
    assert found is None or not np.isnan(found).any()


def test_the_page_shows_it(tmp_path: Path) -> None:
    pages = {}
    for name, values in {"with": HAND, "without": {"exact": HAND["exact"]}}.items():
        with RunDir.create(tmp_path / name, config="a: 1\n", env={}) as run:
            for row in rows(values):
                run.append(row | {"n_tokens": 9, "quality/kl_first_nats": 0.1})
            run.write_summary(summarise(run.rows(), {}, {}, {"state": "finished"}))
        pages[name] = write_report(run).read_text(encoding="utf-8")
    assert "Performance gap recovered" in pages["with"]
    section = pages["with"].split("Performance gap recovered", 1)[1].split("</section>", 1)[0]
    for expected in ("near", "0.833", "-0.333", "NLL", "F1", "not clipped"):
        assert expected in section
    assert "Performance gap recovered" not in pages["without"]
