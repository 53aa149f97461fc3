"""The calibrated gate: what it predicts from, what it refuses, and that the probe reads KV."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvsem.engine import Engine
from kvsem.errors import ModelError, SettingError
from kvsem.gates.all_of import AllOf
from kvsem.gates.base import Candidate
from kvsem.gates.calibrated import CalibratedGate
from kvsem.gates.lexical import LexicalGate
from kvsem.lm import LM

TEXT = "The mill by the river was closed in the spring."
NEAR = "The mill by the lake was closed in the spring."
FAR = "Bond yields fell after the central bank had spoken."


def gate(**more: float) -> CalibratedGate:
    return CalibratedGate({"similarity": -2.0, "overlap": -1.0}, 1.0, **more)  # type: ignore[arg-type]


def test_the_prediction_is_the_model_s() -> None:
    found = gate().features(TEXT, Candidate(NEAR, 0.9))
    assert found == {"similarity": 0.9, "overlap": 10 / 11, "length_ratio": 1.0}
    assert gate().predicted(found) == pytest.approx(10 ** (1.0 - 1.8 - 10 / 11))


def test_both_sides_of_the_limit() -> None:
    limit = gate().predicted(gate().features(TEXT, Candidate(NEAR, 0.9)))
    assert gate(max_divergence=limit * 1.001).accept(TEXT, Candidate(NEAR, 0.9)).accepted
    refused = gate(max_divergence=limit * 0.999).accept(TEXT, Candidate(NEAR, 0.9))
    assert (refused.accepted, refused.reason) == (False, "divergence_predicted")


def test_nothing_in_common_and_no_number_are_refused() -> None:
    lax = gate(max_divergence=1e9)
    assert lax.accept(TEXT, Candidate("Zahlen stiegen", 0.99)).reason == "nothing_in_common"
    assert lax.accept(TEXT, Candidate(TEXT, math.nan)).reason == "score_not_finite"


def test_lengths_compare_either_way() -> None:
    twice = f"{TEXT} {TEXT}"
    both = [gate().features(a, Candidate(b, 0.5)) for a, b in ((TEXT, twice), (twice, TEXT))]
    assert [f["length_ratio"] for f in both] == [0.5, 0.5]


def test_the_probe_compares_values_of_aligned_tokens(lm: LM) -> None:
    probing = CalibratedGate({"probe": 1.0}, 0.0, max_divergence=1.0, probe_layers=2)
    with pytest.raises(ModelError, match="calibrated reads the language model"):
        probing.features(TEXT, Candidate(NEAR, 0.9))
    Engine(lm, gate=AllOf((probing, LexicalGate())))  # hands the model to gates inside a gate
    same, near, far = (
        probing.features(TEXT, Candidate(text, 0.9))["probe"] for text in (TEXT, NEAR, FAR)
    )
    assert same == -6.0  # the floor
    assert same < near < far
    assert probing.predicted({"probe": near}) == pytest.approx(10**near)


def test_the_probe_wants_layers_that_there_are(llama: LM) -> None:
    with pytest.raises(SettingError, match="probe_layers=99"):
        Engine(llama, gate=CalibratedGate({"probe": 1.0}, 0.0, probe_layers=99))


@pytest.mark.parametrize(
    ("weights", "more", "name"),
    [
        ({}, {}, "weights"),
        ({"colour": 1.0}, {}, "weights"),
        ({"overlap": math.nan}, {}, "weights"),
        ({"overlap": 1.0}, {"max_divergence": 0.0}, "max_divergence"),
        ({"overlap": 1.0}, {"max_divergence": math.nan}, "max_divergence"),
        ({"overlap": 1.0}, {"probe_layers": 0}, "probe_layers"),
    ],
)
def test_settings_are_checked(weights: dict[str, float], more: dict[str, float], name: str) -> None:
    with pytest.raises(SettingError, match=name):
        CalibratedGate(weights, 0.0, **more)  # type: ignore[arg-type]


def test_the_shipped_weights_are_those_of_the_committed_fit() -> None:
    root = Path(__file__).parents[2]
    fit = json.loads((root / "experiments/gates/results/calibrated/calibrated.json").read_text())
    shipped = OmegaConf.load(root / "conf/gate/calibrated.yaml").gates[0]
    found = fit["models"][" + ".join(shipped.weights)]
    assert dict(shipped.weights) == pytest.approx(found["weights"], rel=1e-3)
    assert shipped.bias == pytest.approx(found["bias"], abs=1e-3)
