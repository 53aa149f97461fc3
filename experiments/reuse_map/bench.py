"""Exact and several ways to reuse, pair by pair; and what their rows say, with intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from rich.progress import track

from experiments.compose import CONF, make
from experiments.embeddings.pairs import Pair
from experiments.study import record
from kvsem.aligners.edit import EditAligner
from kvsem.contexts.behind_system import BehindSystem
from kvsem.embedders.minilm import MinilmEmbedder
from kvsem.engine import Engine
from kvsem.intervals import bootstrap
from kvsem.lm import LM
from kvsem.metrics.divergence import DivergenceMetric
from kvsem.observe import STEPS, Observer
from kvsem.types import Provenance, Request

KEYS = ("kl_first_nats", "kl_nats", "top1_agreement", "hit_rate", "flop_ratio")
DIGITS = 5
Row = dict[str, Any]
Parts = Mapping[str, Any]  # of an Engine, by its arguments


def part(group: str, name: str, **more: Any) -> Any:
    """What ``conf/GROUP/NAME.yaml`` describes, with ``more`` laid over it."""
    return make(OmegaConf.merge(OmegaConf.load(CONF / group / f"{name}.yaml"), more), group)


class Bench:
    """``arms``: parts of engines whose one donor stands behind the system prompt."""

    def __init__(self, lm: LM, system: str, arms: Iterable[Parts]) -> None:
        self.lm, self.system, self.arms = lm, system, list(arms)
        self.embedder = MinilmEmbedder()
        self._observer, self._metric = Observer(self.lm, decodes=False), DivergenceMetric()
        self._exact = Engine(self.lm, reuse=(), admit="none")
        self._donor: str | None = None
        self._engines: list[Engine] = []

    def rows(self, pair: Pair) -> Iterator[Row]:
        """One of each arm, in their order, all next to the same exact prefill."""
        texts = (pair.id, pair.donor, pair.target, pair.question)
        request = Request.donor_target(*texts, system=self.system)
        done = self._exact.prefill(request, room=STEPS)
        exact, _ = self._observer.observe(done, None)
        self._exact.drop(done)
        about: Row = {"kind": pair.kind, "id": pair.id, "group": pair.group} | self._likeness(pair)
        about["n_tokens"] = done.plan.n_tokens
        whole = self.lm.multiplications(np.ones((self.lm.n_layers, done.plan.n_tokens), dtype=bool))
        for engine in self._behind(request):
            done = engine.prefill(request, room=STEPS)
            seen, _ = self._observer.observe(done, exact.greedy)
            found = self._metric.compare(exact, seen)
            matched = int((done.plan.provenance != Provenance.NEW).sum())
            row = {key: found[f"quality/{key}"] for key in KEYS[:3]}
            row["hit_rate"] = matched / done.plan.n_cacheable
            row["flop_ratio"] = done.cost.multiplications / whole
            engine.drop(done)
            yield about | _short(row) | {"refused": ", ".join(done.plan.refused)}

    def _behind(self, request: Request) -> list[Engine]:
        """An engine an arm that all know this request's donor and no other."""
        if self._donor != request.donors[0]:
            self._engines = [
                Engine(
                    self.lm, context=BehindSystem(), embedder=self.embedder, admit="none", **parts
                )
                for parts in self.arms
            ]
            self._engines[0].ingest([request])
            for engine in self._engines[1:]:
                engine.share(self._engines[0])
            self._donor = request.donors[0]
        return self._engines

    def _likeness(self, pair: Pair) -> Row:
        donor, target = self.embedder.embed([pair.donor, pair.target])
        ids = (self.lm.tokenizer(t, add_special_tokens=False) for t in (pair.target, pair.donor))
        found = {"similarity": float(donor @ target)}
        return _short(found | {"overlap": overlap(*(i["input_ids"] for i in ids))})


def overlap(target: Sequence[int], donor: Sequence[int]) -> float:
    """Share of the target's tokens in a longest common subsequence with the donor's."""
    return float((EditAligner().align(np.array(target), np.array(donor)) >= 0).mean())


def _short(row: Mapping[str, float]) -> Row:
    return {key: float(f"{value:.{DIGITS}g}") for key, value in row.items()}


def collected(
    cfg: DictConfig, pairs: Iterable[Pair], measure: Callable[[Pair], Iterable[Row]], **env: Any
) -> list[Row]:
    """The rows of every pair, written to ``cfg.out`` as they come. Pairs that are there already,
    as after a run that was killed, are not measured again."""
    path = Path(cfg.out) / "rows.jsonl" if cfg.out is not None else None
    rows: list[Row] = []
    if path is not None and path.is_file():
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    known = {row["id"] for row in rows}
    cfg.out = str(record(cfg, rows, {}, {}, **env))
    with (Path(cfg.out) / "rows.jsonl").open("a", encoding="utf-8") as file:
        for pair in track([p for p in pairs if p.id not in known], description="pairs"):
            new = list(measure(pair))
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in new))
            file.flush()
            rows += new
    return rows


def means(rows: Sequence[Row], by: Sequence[str]) -> dict[str, Row]:
    """Per combination of ``by``: n, and mean and 95 % interval of each number; documents are
    drawn whole."""
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(" | ".join(str(row[name]) for name in by), []).append(row)
    return {name: _mean(own) for name, own in cells.items()}


def _mean(rows: Sequence[Row]) -> Row:
    keys = (*KEYS, "similarity", "overlap")
    values = np.array([[row[key] for key in keys] for row in rows], dtype=np.float64)
    groups = [row["group"] for row in rows]
    low, high = bootstrap(values, groups)
    found: Row = {"n": len(rows), "n_groups": len(set(groups))}
    for i, key in enumerate(keys):
        ends = {"mean": values[:, i].mean(), "low": low[i], "high": high[i]}
        found[key] = _short(ends)
    return found


def shown(estimate: Mapping[str, float]) -> str:
    """A mean with its interval, three digits each."""
    return "{:.3g} ({:.3g} … {:.3g})".format(*(estimate[k] for k in ("mean", "low", "high")))
