"""Arms side by side on the same requests: every answer next to exact computation.

Per request every arm is prefilled once, in rotated order, interleaved with `exact`,
`exact_again` and a plain transformers forward; the clock of TTFT runs from text to first token
id. Quality is then read off the very KV that was timed.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kvsem.baselines import Baseline, Baselines
from kvsem.engine import Engine, Prefilled, final_provenance
from kvsem.environment import cpu, device_name, source_digest, versions
from kvsem.errors import KvsemError
from kvsem.keys import digest
from kvsem.lm import LM
from kvsem.metrics.base import Metric, Observation
from kvsem.metrics.kv_error import per_layer
from kvsem.observe import STEPS, Observer, sampled
from kvsem.prompt import Prompt, render
from kvsem.types import Provenance, Request

EXACT = ("exact", "exact_again")
Row = dict[str, Any]


@dataclass
class Arm:
    """A named engine under test. ``drop``: kinds of segments that its prompts leave out.
    ``substitute``: they hold the donor's text instead of the target's."""

    name: str
    engine: Engine
    drop: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    build_ms: float = 0.0
    substitute: bool = False

    def prompt_of(self, request: Request) -> Request:
        """What this arm is asked in the place of ``request``."""
        return (request.substituted() if self.substitute else request).without(self.drop)

    @property
    def has_own_prompt(self) -> bool:
        """Whether its tokens may stand at other positions than exact's."""
        return bool(self.drop) or self.substitute


@dataclass
class _Trial:
    """One request under every arm: what was prefilled, in which order."""

    request: Request
    n_tokens: int
    done: dict[str, Prefilled] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    evicted: dict[str, Counter[str]] = field(default_factory=dict)  # before it
    plain_ms: float = float("nan")


class Harness:
    """Runs ``arms`` and exact on requests and yields finished rows.

    ``exact`` is an engine that reuses nothing and publishes nothing. ``baselines`` None measures
    exact anew for every request.
    """

    def __init__(
        self,
        lm: LM,
        exact: Engine,
        arms: Sequence[Arm],
        metrics: Sequence[Metric],
        baselines: Baselines | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if lm.hooked:
            raise KvsemError(f"{lm.name} runs exact only, nothing to compare: {lm.hooked}")
        if exact.memory.pool.n_blocks or exact.reuse or exact.admit != "none":
            raise KvsemError("exact must start empty, reuse nothing and publish nothing")
        self.lm, self.metrics, self.baselines = lm, metrics, baselines
        self.observer = Observer(lm, any(getattr(m, "needs_text", True) for m in metrics))
        self.settings = dict(settings or {})
        self.exact = [Arm(name, exact) for name in EXACT]
        self.arms = list(arms)
        self.n_cached = 0  # requests whose baseline came from disk

    def check(self, request: Request) -> None:
        """Raise `KvsemError` where ``request`` is empty, or too long to be answered and scored."""
        room = max(self.observer.room(request), request.max_new_tokens)
        for arm in (self.exact[0], *self.arms):
            arm.engine.check(replace(arm.prompt_of(request), max_new_tokens=room))

    def warm_up(self, request: Request) -> None:
        """One unscored prefill per arm, and of the plain forward; nothing is admitted."""
        self.lm.plain(render(self.lm.tokenizer, request).ids)
        for arm in (*self.exact, *self.arms):
            arm.engine.drop(arm.engine.prefill(arm.prompt_of(request), room=STEPS))

    def run(self, requests: Sequence[Request]) -> Iterator[list[Row]]:
        """The rows of one request after another; arms admit what their engine admits."""
        for index, request in enumerate(requests):
            yield self._one(index, request)
        if self.baselines:
            self.baselines.prune()

    def _one(self, index: int, request: Request) -> list[Row]:
        prompt = render(self.lm.tokenizer, request)
        key = self._key(request, prompt)
        baseline = self.baselines.load(key) if self.baselines else None
        trial = self._prefill(index, request, len(prompt.ids), with_exact=baseline is None)
        earlier = {} if baseline is None else {"from_earlier_run": True}
        if baseline is None:
            baseline = self._baseline(trial)
            if self.baselines:
                self.baselines.save(key, baseline)
        else:
            self.n_cached += 1
        rows = [self._stamped(row | earlier, request) for row in baseline.rows]
        for arm in self.arms:
            row = self._row(arm, trial, baseline)
            start = time.perf_counter()
            arm.engine.leave(trial.done.pop(arm.name))
            row["cost/store_ms"] = (time.perf_counter() - start) * 1e3
            row["memory/evicted"] = dict(arm.engine.memory.evictions - trial.evicted[arm.name])
            rows.append(self._stamped(row, request, arm))
        return rows

    def _key(self, request: Request, prompt: Prompt) -> str:
        return digest(
            "baseline/1",
            namespace=self.lm.namespace(),
            ids=prompt.ids.tobytes(),
            sampled=sampled(prompt).tobytes(),
            steps=STEPS,
            answers="\0".join(request.answers),
            device=device_name(self.lm.device),
            threads=torch.get_num_threads(),
            metrics=";".join(_identity(m) for m in self.metrics),
            chunker=f"{type(self.exact[0].engine.chunker).__qualname__}",
            versions=" ".join(f"{name} {number}" for name, number in versions().items()),
            cpu=cpu(),
            source=source_digest(),
        )

    # -- timing ---------------------------------------------------------------------------------

    def _prefill(self, index: int, request: Request, n: int, with_exact: bool) -> _Trial:
        """Every arm once, in an order that rotates with the request."""
        trial = _Trial(request, n)
        steps: list[tuple[str, Callable[[], None]]] = []
        for arm in (*(self.exact if with_exact else ()), *self.arms):
            steps.append((arm.name, lambda arm=arm: self._time(arm, trial)))  # type: ignore[misc]
        if with_exact:
            steps.append(("plain", lambda: self._time_plain(trial)))
        turn = index % len(steps) if steps else 0
        for place, (name, step) in enumerate(steps[turn:] + steps[:turn]):
            trial.order[name] = place
            step()
        return trial

    def _time(self, arm: Arm, trial: _Trial) -> None:
        request = arm.prompt_of(trial.request)
        trial.evicted[arm.name] = arm.engine.memory.evictions
        done = arm.engine.prefill(request, room=self.observer.room(request))
        if arm.name in EXACT and (done.plan.provenance != Provenance.NEW).any():
            raise KvsemError("exact reused KV: its cache was not empty")
        trial.done[arm.name] = done

    def _time_plain(self, trial: _Trial) -> None:
        start = time.perf_counter()
        int(self.lm.plain(render(self.lm.tokenizer, trial.request).ids).argmax())
        trial.plain_ms = (time.perf_counter() - start) * 1e3

    # -- quality --------------------------------------------------------------------------------

    def _baseline(self, trial: _Trial) -> Baseline:
        done = trial.done[EXACT[0]]
        exact = self.observer.observe(done, None)
        ttft = min(done.cost.ttft_ms, trial.plain_ms)
        baseline = Baseline(exact[0], (), ttft)
        rows = []
        for arm in self.exact:
            row = self._row(arm, trial, baseline, exact if arm.name == EXACT[0] else None)
            row["cost/store_ms"] = 0.0  # exact publishes nothing
            row["cost/plain_ms"] = trial.plain_ms
            row["cost/exact_over_plain"] = row["cost/ttft_ms"] / trial.plain_ms
            rows.append(row)
            arm.engine.drop(trial.done.pop(arm.name))
        return Baseline(exact[0], tuple(rows), ttft)

    # -- rows -----------------------------------------------------------------------------------

    def _row(
        self,
        arm: Arm,
        trial: _Trial,
        baseline: Baseline,
        seen: tuple[Observation, float] | None = None,
    ) -> Row:
        done, exact = trial.done[arm.name], baseline.observation
        observation, decode_ms = seen or self.observer.observe(done, exact.greedy)
        if arm.has_own_prompt:  # other positions: nothing to compare token by token
            observation = replace(observation, keys=None, values=None)
        row: Row = {
            "arm": arm.name,
            "n_tokens": done.plan.n_tokens,
            "order": trial.order[arm.name],
            "text": observation.text,
        }
        for metric in self.metrics:
            row |= metric.compare(exact, observation)
        row["kv_error_rel_per_layer"] = per_layer(exact, observation) or None
        row["first_divergence"] = _first_divergence(exact, observation)
        row |= self._costs(done, baseline, trial, decode_ms) | _reuse(done)
        return row | {f"memory/{name}": value for name, value in done.gauges.items()}

    def _costs(
        self, done: Prefilled, baseline: Baseline, trial: _Trial, decode_ms: float
    ) -> dict[str, float]:
        cost = done.cost
        whole = np.ones((self.lm.n_layers, trial.n_tokens), dtype=bool)
        return {
            "cost/ttft_ms": cost.ttft_ms,
            "cost/ttft_speedup": baseline.ttft_ms / cost.ttft_ms,
            "cost/plan_ms": cost.plan_ms,
            "cost/load_ms": cost.load_ms,
            "cost/prefill_ms": cost.prefill_ms,
            "cost/decode_ms_per_token": decode_ms,
            "cost/flop_ratio": cost.multiplications / self.lm.multiplications(whole),
            "cost/recomputed_layer_tokens": cost.recomputed_layer_tokens,
            "cost/kv_bytes": cost.kv_bytes,
        }

    def _stamped(self, row: Row, request: Request, arm: Arm | None = None) -> Row:
        own = dict(arm.settings) if arm else {}
        head: Row = {"request": request.id, "group": request.group}
        return head | row | {"settings": self.settings | own}


def _identity(metric: Metric) -> str:
    """Name and settings; of one that is not kvsem's, whose code is known, also its source."""
    kind = type(metric)
    try:
        own = "" if kind.__module__.startswith("kvsem.") else inspect.getsource(kind)
    except (OSError, TypeError):  # typed in at a prompt
        own = ""
    return f"{kind.__qualname__} {vars(metric)} {own}".rstrip()


def _first_divergence(exact: Observation, arm: Observation) -> dict[str, float] | None:
    """Where the likeliest token first differs, and exact's margin (nats) over its second there.

    A margin near zero is a near tie, not a fault.
    """
    differs = (exact.logits.argmax(-1) != arm.logits.argmax(-1)).nonzero()
    if not len(differs):
        return None
    position = int(differs[0])
    best = exact.logits[position].double().log_softmax(-1).topk(2).values
    return {"position": position, "margin_nats": float(best[0] - best[1])}


def _reuse(done: Prefilled) -> Row:
    provenance = final_provenance(done.plan, done.computed)
    counts = {p.name.lower(): int((provenance == p).sum()) for p in Provenance}
    matched = sum(counts.values()) - counts["new"]
    row: Row = {f"reuse/{name}_tokens": count for name, count in counts.items()}
    row["reuse/matched_tokens"] = matched
    row["reuse/cacheable_tokens"] = done.plan.n_cacheable
    row["reuse/hit"] = int(matched > 0)
    row["reuse/hit_rate"] = matched / done.plan.n_cacheable if done.plan.n_cacheable else 0.0
    pairs = zip(done.plan.chunks, done.plan.matches, strict=True)
    exact = [chunk for chunk, match in pairs if match.kind == "prefix" and chunk.kind != "system"]
    row["reuse/prefix_chunks"] = len(exact)
    row["reuse/refused"] = dict(Counter(done.plan.refused))
    row["reuse/missed"] = done.plan.missed()
    return row
