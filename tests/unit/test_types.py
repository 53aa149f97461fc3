"""Plans as plain data: what a notebook reads is what was planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvsem.engine import Engine
from kvsem.errors import DataError, SettingError
from kvsem.lm import LM
from kvsem.types import Match, Provenance, Request, ReusePlan
from tests.tiny import SYSTEM, prose


@pytest.fixture(scope="module")
def plan(llama: LM) -> ReusePlan:
    """Prefix, identical and unknown chunks of a real plan, and a refused candidate put to it."""
    engine = Engine(llama)
    first, second, unknown = (prose(seed) for seed in (1, 2, 3))
    engine.ingest([first, second], system=SYSTEM)
    request = Request.rag("r", [second, unknown, first], "which bridge", system=SYSTEM)
    made = engine.plan(request)
    assert {int(kind) for kind in made.provenance} >= {Provenance.NEW, Provenance.CHUNK}
    refused = Match("none", "entry", 0.5, "below_threshold")
    matches = tuple(refused if m.kind == "none" else m for m in made.matches)
    return replace(made, matches=matches, refused=("below_threshold",), miss="diverged")


@pytest.mark.parametrize("count", [-1, "ten", None, 2.5, True])
def test_answers_have_a_length(count: Any) -> None:
    with pytest.raises(SettingError, match=r"max_new_tokens=.*: expected a whole number from 0"):
        Request.rag("r", ["a"], "q", max_new_tokens=count)


def test_a_plan_survives_json(plan: ReusePlan) -> None:
    again = ReusePlan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False)))
    assert again.provenance.dtype == np.int8
    np.testing.assert_array_equal(again.provenance, plan.provenance)
    assert [vars(c) | {"ids": c.ids.tolist()} for c in again.chunks] == [
        vars(c) | {"ids": c.ids.tolist()} for c in plan.chunks
    ]
    assert {c.ids.dtype for c in again.chunks} == {np.dtype(np.int64)}
    for name in {f.name for f in fields(ReusePlan)} - {"provenance", "chunks"}:
        assert getattr(again, name) == getattr(plan, name)
    assert plan.runs
    pd.testing.assert_frame_equal(again.to_frame(), plan.to_frame())
    assert again.missed() == plan.missed()
    assert again.reuse_ratio == plan.reuse_ratio


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plain: {},
        lambda plain: plain | {"tokens": 3},
        lambda plain: plain | {"provenance": plain["provenance"][1:]},
        lambda plain: plain | {"provenance": [9] * plain["n_tokens"]},
        lambda plain: plain | {"matches": plain["matches"][1:]},
        lambda plain: plain | {"runs": [{"entry": "e"}]},
        lambda plain: plain | {"chunks": None},
    ],
)
def test_what_is_no_plan_is_said_in_one_line(
    plan: ReusePlan, spoil: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    with pytest.raises(DataError, match=r"^not a plan: .+$"):
        ReusePlan.from_dict(spoil(plan.to_dict()))
