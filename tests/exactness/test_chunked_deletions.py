"""Documents that lost chunks: every kept token is matched once, with the KV of its own place."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kvsem.engine import Engine
from kvsem.lm import LM
from kvsem.memory.gather import gather
from kvsem.types import Provenance, Request, ReusePlan
from tests.tiny import WORDS, relative, tiny_engine

CONF = Path(__file__).parents[2] / "conf"
CHUNKERS = sorted(path.stem for path in (CONF / "chunker").glob("*.yaml"))
N_BLOCKS = 6
SMALL = {"max_tokens": 8, "min_tokens": 0, "size": 40}  # so that a short document has many chunks


@cache
def chunker_of(name: str) -> Any:
    cfg: Any = OmegaConf.load(CONF / "chunker" / f"{name}.yaml")
    if "embedder" in cfg:
        cfg.embedder = OmegaConf.load(CONF / "embedder" / "hashing.yaml")
    for key in SMALL.keys() & cfg.keys():
        cfg[key] = SMALL[key]
    return instantiate(cfg)


def block(i: int, name: str) -> str:
    """A block of its own words, which the chunker of this name cuts apart."""
    said = " ".join(WORDS[13 + 6 * i : 19 + 6 * i])
    heads = {"dialogue": "User: ", "code": f"def f{i}():\n    return '"}
    return heads.get(name, "") + said + ("'" if name == "code" else ".")


def test_there_are_chunkers() -> None:
    assert len(CHUNKERS) >= 7


@pytest.fixture(scope="module", params=CHUNKERS)
def learnt(request: pytest.FixtureRequest, llama: LM) -> tuple[str, Engine]:
    """The chunker's name, and an engine that has learnt the whole document."""
    name = str(request.param)
    engine = tiny_engine(llama, chunker=chunker_of(name), admit="none")
    engine.ingest([asking(name, range(N_BLOCKS))])
    return name, engine


def document(name: str, kept: Iterable[int]) -> str:
    return "\n\n".join(block(i, name) for i in kept)


def asking(name: str, kept: Iterable[int]) -> Request:
    whole = document(name, range(N_BLOCKS))
    return Request.donor_target("r", whole, document(name, kept), "Why?")


@settings(max_examples=8, deadline=None)
@given(kept=st.lists(st.integers(0, N_BLOCKS - 1), min_size=1, unique=True))
def test_kept_chunks_are_matched_once_and_none_is_lost(
    learnt: tuple[str, Engine], kept: list[int]
) -> None:
    """Deleted and reordered (A7, llama.cpp PR 12161: offsets from before a shift)."""
    name, engine = learnt
    plan = engine.plan(asking(name, kept))
    places = [place for run in plan.runs for place in range(run.target, run.target + run.length)]
    assert sorted(set(places)) == sorted(places)
    reused = np.flatnonzero(plan.provenance != Provenance.NEW)
    assert set(places) | set(range(plan.n_paged)) == set(reused.tolist())
    whole = {chunk.text for chunk in engine.plan(asking(name, range(N_BLOCKS))).chunks[1:]}
    for chunk, match in zip(plan.chunks[1:], plan.matches[1:], strict=True):
        if chunk.text in whole:
            assert match.kind in ("chunk", "prefix"), chunk.text
            inner = range(chunk.start + chunk.inner[0], chunk.start + chunk.inner[1])
            assert set(inner) <= set(reused.tolist())
    if name not in ("segment", "fixed", "topic"):
        assert len(whole) == N_BLOCKS
        assert {chunk.text for chunk in plan.chunks[1:]} <= whole
    assert_moved(engine, asking(name, kept), plan)


def assert_moved(engine: Engine, request: Request, plan: ReusePlan) -> None:
    """Values are the donor's own, and first-layer keys those computed at the token's new place."""
    lm, ids = engine.lm, engine.render(request).ids
    donors = {run.entry: entry for run in plan.runs if (entry := engine.store.get(run.entry))}
    kv = lm.buffer(len(ids))
    gather(lm, kv, plan.runs, donors)
    fresh, _ = lm.alone(ids, 0)
    for run in plan.runs:
        donor, there = donors[run.entry], slice(run.source, run.source + run.length)
        here = slice(run.target, run.target + run.length)
        assert (ids[here] == donor.ids[there]).all()
        assert relative(kv.keys[0][0, :, here], fresh[0][:, here]) <= 1e-5
        for layer in range(lm.n_layers):
            assert (kv.values[layer][0, :, here] == donor.values[layer][:, there]).all()
