"""Nearest tokens and the hybrid: against a plain double loop, and what each may never do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsem.aligners.base import Aligner
from kvsem.aligners.edit import EditAligner
from kvsem.aligners.hybrid import HybridAligner
from kvsem.aligners.nearest import BLOCK, NearestAligner
from kvsem.errors import ModelError, SettingError
from kvsem.lm import LM
from tests.tiny import tiny_lm, tokens

IDS = st.lists(st.integers(4, 24), max_size=16)


def nearest(lm: LM, **settings: float) -> NearestAligner:
    aligner = NearestAligner(**settings)
    aligner.use(lm)
    return aligner


def hybrid(lm: LM, **settings: float) -> HybridAligner:
    aligner = HybridAligner(EditAligner(), NearestAligner(**settings))
    aligner.use(lm)
    return aligner


def aligned(aligner: Aligner, target: list[int], donor: list[int]) -> list[int]:
    source = aligner.align(np.array(target, np.int64), np.array(donor, np.int64))
    return [int(s) for s in source]


def turned(lm: LM, token: int, position: int, theta: float) -> np.ndarray:
    """The token's embedding as complex numbers, each turned by its own frequency (RoFormer)."""
    row = lm.model.get_input_embeddings().weight[token].double().numpy()
    half = len(row) // 2
    pairs = row[:half] + 1j * row[half:]
    found = pairs * np.exp(1j * position * theta ** (-np.arange(half) / half))
    return np.asarray(found / np.linalg.norm(found))


@settings(max_examples=30, deadline=None)
@given(target=IDS, donor=IDS, theta=st.sampled_from([100.0, 10_000.0]))
def test_every_token_takes_a_nearest_one(
    llama: LM, target: list[int], donor: list[int], theta: float
) -> None:
    source = aligned(nearest(llama, min_score=0.3, theta=theta), target, donor)
    rows = [turned(llama, t, j, theta) for j, t in enumerate(donor)]
    for i, (token, s) in enumerate(zip(target, source, strict=True)):
        row = turned(llama, token, i, theta)
        cosines = [float(np.real(np.vdot(row, other))) for other in rows]
        if s < 0:
            assert max(cosines, default=-1) < 0.3 + 1e-4
        else:
            assert cosines[s] >= max(cosines) - 1e-4
            assert cosines[s] >= 0.3 - 1e-4


def test_a_token_that_moved_is_found_again_and_may_serve_twice(llama: LM) -> None:
    aligner = nearest(llama)
    assert aligned(aligner, [9, 8, 7], [7, 8, 9]) == [2, 1, 0]
    assert aligned(aligner, [9, 9, 9, 8], [8, 9]) == [1, 1, 1, 0]
    assert aligned(aligner, [9, 8], [7, 6]) == [-1, -1]  # random rows are far from each other


def test_more_tokens_than_a_block(llama: LM) -> None:
    target = tokens(2 * BLOCK + 3, seed=1)
    shifted = np.roll(target, 5)
    source = nearest(llama, min_score=-1.0).align(target, shifted)
    assert (shifted[source] == target).mean() > 0.95
    assert nearest(llama).align(target, target).tolist() == list(range(len(target)))


@settings(max_examples=40, deadline=None)
@given(target=IDS, donor=IDS)
def test_the_hybrid_keeps_what_edit_found_and_crosses_none_of_it(
    llama: LM, target: list[int], donor: list[int]
) -> None:
    edit = EditAligner().align(np.array(target, np.int64), np.array(donor, np.int64)).tolist()
    source = aligned(hybrid(llama, min_score=-1.0), target, donor)
    kept = [-1, *(i for i, s in enumerate(edit) if s >= 0), len(target)]
    origin = [-1, *(s for s in edit if s >= 0), len(donor)]
    assert [source[i] for i in kept[1:-1]] == origin[1:-1]
    for (i, j), (low, high) in zip(pairwise(kept), pairwise(origin), strict=True):
        inside = source[i + 1 : j]
        # what is left of the target has a counterpart exactly where something of the donor is left
        assert all(low < s < high for s in inside) if high - low > 1 else set(inside) <= {-1}


def test_the_hybrid_reuses_the_word_in_whose_place_another_stands(llama: LM) -> None:
    aligner = hybrid(llama, min_score=-1.0)
    assert aligned(aligner, [5, 6, 99, 7, 8], [5, 6, 55, 7, 8]) == [0, 1, 2, 3, 4]
    assert aligned(aligner, [5, 6, 99, 7], [5, 6, 7]) == [0, 1, -1, 2]  # inserted
    strict = hybrid(llama, min_score=0.9)
    assert aligned(strict, [5, 6, 99, 7], [5, 6, 55, 7]) == [0, 1, -1, 3]


def test_a_part_belongs_to_one_model(llama: LM) -> None:
    aligner = NearestAligner()
    with pytest.raises(ModelError, match="nearest reads the language model"):
        aligner.align(np.array([5]), np.array([5]))
    aligner.use(llama)
    aligner.use(llama)  # shared by two engines of one model
    with pytest.raises(ModelError, match=r"belongs to .*llama"):
        aligner.use(tiny_lm("qwen3"))


def test_the_embedding_table_is_read_as_it_is_now() -> None:
    lm = tiny_lm("llama")
    aligner = nearest(lm)
    ids = np.array([9]), np.array([8])
    assert aligner.align(*ids).tolist() == [-1]
    table = lm.model.get_input_embeddings().weight
    with torch.no_grad():
        table[9] = table[8]
    assert aligner.align(*ids).tolist() == [0]


@pytest.mark.parametrize("name", ["min_score", "theta"])
@pytest.mark.parametrize("value", [-1.5, np.inf, np.nan, "abc", None, True])
def test_settings_are_checked(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=rf"{name}=.*: expected a"):
        NearestAligner(**{name: value})
    with pytest.raises(SettingError, match="theta"):
        NearestAligner(theta=0.0)
