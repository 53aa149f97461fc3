"""Every recompute rule on tiny models: exact at ratio 1, dearer with the ratio, the same twice.

kvpress#16, PR 31 (A28): whatever a rule does, the next token stands behind the prompt's last one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvsem.contexts.alone import Alone
from kvsem.contexts.base import DonorContext
from kvsem.contexts.behind_system import BehindSystem
from kvsem.contexts.in_company import InCompany
from kvsem.contexts.in_company_own import InCompanyOwn
from kvsem.engine import Engine, Prefilled
from kvsem.errors import KvsemError
from kvsem.forward import Job, KVBuffer, Watch
from kvsem.lm import LM
from kvsem.recompute.base import Needs, Spread, State
from kvsem.recompute.none import NoRecompute
from kvsem.repair import Repair
from kvsem.types import Provenance, Request
from tests.tiny import SYSTEM, copy_of, prose, relative, tiny_engine, tokens
from tests.tiny import exact as exact_of

CONF = Path(__file__).parents[2] / "conf" / "recompute"
CONFIGS = {path.stem: OmegaConf.load(path) for path in sorted(CONF.glob("*.yaml"))}
CONTROLS = ("zero_kv", "random_kv", "filler_kv")
RULES = [name for name in CONFIGS if name not in CONTROLS]
WITH_RATIO = [name for name in RULES if "ratio" in CONFIGS[name]]
CONTEXTS: dict[str, DonorContext] = {
    c.name: c for c in (Alone(), BehindSystem(), InCompany(), InCompanyOwn())
}
PASSAGES = [prose(70 + i, 20) for i in range(5)]
REQUEST = Request.rag("r", PASSAGES[:3], "Why?", system=SYSTEM)
OTHER = Request.rag("o", PASSAGES[3:], "When?", system=SYSTEM)
ONE = Request.rag("one", PASSAGES[:1], "Why?", system=SYSTEM)


def rule(name: str, **settings: Any) -> Any:
    return instantiate({**CONFIGS[name], **settings})


def engine(lm: LM, made: Any, context: str = "in_company", **more: Any) -> Engine:
    found = tiny_engine(lm, recompute=made, context=CONTEXTS[context], admit="none", seed=3, **more)
    found.ingest([REQUEST, OTHER])
    return found


def exact(lm: LM, request: Request) -> tuple[KVBuffer, torch.Tensor]:
    """KV of the whole prompt, with room to go on, and logits at its end."""
    return exact_of(lm, Engine(lm).render(request).ids, room=8)


def kv_error(lm: LM, done: Prefilled, request: Request) -> np.ndarray:
    """Relative error of K and V over all matched tokens, by layer."""
    kv, _ = exact(lm, request)
    at = torch.from_numpy(done.plan.matched).nonzero()[:, 0]
    found = []
    for layer in range(lm.n_layers):
        mine, theirs = done.kv.read(layer, done.plan.n_tokens), kv.read(layer, done.plan.n_tokens)
        squares = [
            ((a[0][:, at] - b[0][:, at]).square().sum(), b[0][:, at].square().sum())
            for a, b in zip(mine, theirs, strict=True)
        ]
        found.append(sum(float(d / s) for d, s in squares) ** 0.5)
    return np.array(found)


@pytest.mark.parametrize("name", WITH_RATIO)
@pytest.mark.parametrize("context", CONTEXTS)
def test_ratio_one_is_exact(llama: LM, name: str, context: str) -> None:
    """Behind an exact prefix (the system prompt, and more in behind_system), from any donor."""
    for request in (REQUEST, ONE):
        made = engine(llama, rule(name, ratio=1.0), context)
        done = made.prefill(request)
        assert done.plan.matched.any() or request is ONE
        assert (done.plan.provenance == Provenance.PREFIX).any() or context == "alone"
        assert (done.logits - exact(llama, request)[1]).abs().max() <= 1e-4
        if done.plan.matched.any():
            assert kv_error(llama, done, request).max() <= 1e-4


@pytest.mark.parametrize("name", WITH_RATIO)
def test_ratio_one_is_exact_on_every_architecture(lm: LM, name: str) -> None:
    done = engine(lm, rule(name, ratio=1.0)).prefill(REQUEST)
    assert done.plan.matched.sum() > 30
    assert (done.logits - exact(lm, REQUEST)[1]).abs().max() <= 1e-4


@pytest.mark.parametrize("name", WITH_RATIO)
def test_cost_grows_with_the_ratio(llama: LM, name: str) -> None:
    costs, tokens = [], []
    for ratio in (0.05, 0.1, 0.2, 0.5, 1.0):
        done = engine(llama, rule(name, ratio=ratio)).prefill(REQUEST)
        costs.append(done.cost.multiplications)
        tokens.append(done.cost.recomputed_layer_tokens)
    assert costs == sorted(set(costs))
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("name", RULES)
def test_the_same_under_a_seed(llama: LM, name: str) -> None:
    first, second = (engine(llama, rule(name)).prefill(REQUEST) for _ in range(2))
    assert torch.equal(first.logits, second.logits)
    assert (first.computed == second.computed).all()


def run(lm: LM, made: Any, ids: np.ndarray, kv: KVBuffer) -> torch.Tensor:
    """``made`` on a prompt whose tokens 10 … 99 and 110 … 139 are reused as ``kv`` has them."""
    spans = [(10, 40), (40, 100), (110, 140)]
    matched = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in spans:
        matched[start:end] = True
    state = State(len(ids), matched, ~matched, spans, seed=1, n_layers=lm.n_layers)
    job, _ = Repair(lm, made, ids, kv, state).ready()
    return lm.prefill_many([job])[0][0]


@pytest.mark.parametrize("name", RULES)
def test_over_exact_kv_nothing_changes(lm: LM, name: str) -> None:
    """A28: KV that is right stays right, the length is the prompt's, and so is what comes next."""
    ids = tokens(150)
    kv, logits = exact_of(lm, ids, room=8)
    mine = copy_of(kv)
    assert (run(lm, rule(name), ids, mine) - logits).abs().max() <= 1e-4
    assert mine.length == len(ids)
    for layer in range(lm.n_layers):
        for a, b in zip(mine.read(layer, 150), kv.read(layer, 150), strict=True):
            assert relative(a, b) <= 1e-5
    following = [lm.extend([7, 9], each) for each in (mine, kv)]
    assert (following[0] - following[1]).abs().max() <= 1e-4


@pytest.mark.parametrize("name", [*WITH_RATIO, "all"])
def test_error_falls_behind_an_exact_prefix(llama: LM, name: str) -> None:
    if name == "all":
        done = engine(llama, rule(name), "behind_system").prefill(REQUEST)
        assert kv_error(llama, done, REQUEST).max() <= 1e-5
        return
    context = "behind_system"
    errors = [
        kv_error(llama, engine(llama, rule(name, ratio=r), context).prefill(REQUEST), REQUEST)
        for r in (0.0, 0.2, 0.5, 0.8, 1.0)
    ]
    mean = [float(e.mean()) for e in errors]
    assert mean == sorted(mean, reverse=True)
    assert mean[-1] <= 1e-5


def test_what_it_needs_is_paid_for(llama: LM) -> None:
    """A pass of the question, full layers and an exact forward are all in the multiplications."""
    cost = {}
    for name in ("epic", "prophetkv", "cacheblend", "oracle_kv", "oracle_attention_kv"):
        done = engine(llama, rule(name, ratio=0.2)).prefill(REQUEST)
        cost[name] = done.cost.multiplications
    whole = exact_cost(llama, REQUEST)
    assert cost["prophetkv"] > cost["epic"] * 1.1
    assert cost["cacheblend"] > cost["epic"]
    assert cost["oracle_kv"] > whole
    assert cost["oracle_attention_kv"] > cost["oracle_kv"]


def exact_cost(lm: LM, request: Request) -> int:
    return Engine(lm).prefill(request).cost.multiplications


@pytest.mark.parametrize("sweeps", [1, 2, 3])
def test_sweeps_recompute_each_token_once(llama: LM, sweeps: int) -> None:
    """All sweeps together recompute the ratio, no token twice."""
    made = engine(llama, rule("refine", ratio=0.5, sweeps=sweeps))
    done = made.prefill(REQUEST)
    matched = int(done.plan.matched.sum())
    assert done.cost.recomputed_layer_tokens == round(0.5 * matched) * llama.n_layers
    assert (done.computed[-1] & done.plan.matched).sum() == round(0.5 * matched)


@pytest.mark.parametrize("sweeps", [2, 3])
def test_what_sweeps_left_behind_is_not_exact(llama: LM, sweeps: int) -> None:
    """All tokens are recomputed, some of them over KV that was corrected only later."""
    made = rule("refine", ratio=0.9999, sweeps=sweeps)  # all of them, and yet not at once
    serving = tiny_engine(llama, recompute=made, context=InCompany())
    serving.ingest([REQUEST, OTHER])
    done = serving.prefill(REQUEST)
    assert done.computed[:, done.plan.matched].all()
    serving.leave(done)
    kv, _ = exact(llama, REQUEST)
    again = serving.prefill(REQUEST)
    n = int((again.plan.provenance == Provenance.PREFIX).sum())
    assert 0 < n < again.plan.n_cacheable
    for layer in range(llama.n_layers):
        for mine, theirs in zip(again.kv.read(layer, n), kv.read(layer, n), strict=True):
            assert relative(mine, theirs) <= 1e-5


class _OneTellsAnother:
    """Token 70 is recomputed, and what it differs by is carried over to token 84, twofold."""

    needs = Needs()

    def tokens(self, layer: int, state: State) -> torch.Tensor:
        chosen = state.nothing()
        chosen[70] = True
        return chosen

    def spread(self, state: State) -> Spread:
        return _Twice()


class _Twice:
    sources, span, per_column = torch.tensor([70]), slice(83, 86), 1

    def to(self, device: torch.device) -> Spread:
        return self

    def carry(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = torch.tensor([[0.0], [2.0], [0.0]])
        return middle * keys, middle * values


def turned(vector: torch.Tensor, positions: int, theta: float = 10000.0) -> torch.Tensor:
    """``[head_dim]`` turned by so many positions, pair by pair, by hand."""
    half = len(vector) // 2
    turn = np.exp(1j * positions * theta ** (-np.arange(half) / half))
    paired = (vector[:half].double().numpy() + 1j * vector[half:].double().numpy()) * turn
    return torch.from_numpy(np.concatenate([paired.real, paired.imag])).float()


def test_spread_is_what_it_says(llama: LM) -> None:
    """At every layer: reused + 2 x (fresh - reused), keys as they would be at position 0."""
    made = _OneTellsAnother()
    plain = engine(llama, NoRecompute(), "behind_system").prefill(REQUEST)
    done = engine(llama, made, "behind_system").prefill(REQUEST)
    n, s, t = done.plan.n_tokens, 70, 84
    assert done.plan.matched[[s, t]].all()
    assert not done.computed[:, t].any()
    for layer in range(llama.n_layers):
        before, after = plain.kv.read(layer, n), done.kv.read(layer, n)
        for head in range(llama.shapes[layer].kv_heads):
            values = [kv[1][0, head] for kv in (before, after)]
            want = values[0][t] + 2 * (values[1][s] - values[0][s])
            assert (values[1][t] - want).abs().max() <= 1e-4
            keys = [kv[0][0, head] for kv in (before, after)]
            want = keys[0][t] + 2 * turned(keys[1][s] - keys[0][s], t - s)
            assert (keys[1][t] - want).abs().max() <= 1e-4
    assert (done.logits - plain.logits).abs().max() > 1e-3


def test_a_source_must_stay_recomputed(llama: LM) -> None:
    class Leaves(_OneTellsAnother):
        def tokens(self, layer: int, state: State) -> torch.Tensor:
            return super().tokens(layer, state) if layer < 2 else state.nothing()

    with pytest.raises(KvsemError, match="source of the spread is not recomputed at layer 2"):
        engine(llama, Leaves(), "behind_system").prefill(REQUEST)


def test_kriging_brings_reused_kv_nearer(lm: LM) -> None:
    """What all tokens of a chunk have in common is found by a few of them."""

    ids = tokens(150)
    want, _ = exact_of(lm, ids)
    errors = {}
    for name in ("none", "random", "krige"):
        kv = copy_of(want)
        for values in kv.values:
            values[:, :, 10:140] += 0.5 * values.std()
        settings = {} if name == "none" else {"ratio": 0.2}
        run(lm, rule(name, **settings), ids, kv)
        errors[name] = relative(kv.values[0], want.values[0])  # where samples are exact
    assert errors["krige"] < 0.2 * errors["random"] < 0.2 * errors["none"]


def test_watching_is_what_the_pass_before_sees(lm: LM) -> None:
    """Attention captured in a forward of all tokens, against the question's own pass."""
    done = Engine(lm).prefill(REQUEST)
    n, ids = done.plan.n_tokens, done.prompt.ids
    rows = np.arange(n - 5, n)
    want = lm.question_attention(ids, done.kv, rows)
    watch, kv = Watch(n - 5), lm.buffer(n)
    lm.prefill_many([Job(ids, kv, lambda _: torch.ones(n, dtype=torch.bool), None, watch)])
    assert (torch.stack(watch.seen) - want).abs().max() <= 1e-5
