"""Study: which similarity of two chunks predicts the divergence that reuse between them causes.

python experiments/embeddings/run.py --help
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["HYDRA_FULL_ERROR"] = "1"

import hydra
import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from rich.progress import track

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.compose import CONF, make  # noqa: E402
from experiments.embeddings.estimate import estimate, excess, fitted, spearman  # noqa: E402
from experiments.embeddings.pairs import FILES, KINDS, Pair, pairs  # noqa: E402
from experiments.study import attempt, check_keys, data_file, entry, record  # noqa: E402
from kvsem.aligners.base import Aligner  # noqa: E402
from kvsem.contexts.behind_system import BehindSystem  # noqa: E402
from kvsem.embedders.base import Embedder  # noqa: E402
from kvsem.embedders.hashing import HashingEmbedder  # noqa: E402
from kvsem.engine import Engine  # noqa: E402
from kvsem.errors import SettingError  # noqa: E402
from kvsem.gates.threshold import ThresholdGate  # noqa: E402
from kvsem.lm import LM, load  # noqa: E402
from kvsem.metrics.divergence import DivergenceMetric  # noqa: E402
from kvsem.model import hand  # noqa: E402
from kvsem.observe import STEPS, Observer  # noqa: E402
from kvsem.plots import METHOD_COLOURS, STYLE  # noqa: E402
from kvsem.types import Request  # noqa: E402

SYSTEM = "Answer the question from the text, in a few words."
KEYS = ("kl_first_nats", "kl_nats")
PER_SHARE = "per share reused"
MIN_SHARE = 0.01
SHARE, LENGTHS = "share of tokens reused", "length ratio"

Row = dict[str, Any]


class Bench:
    """A model, and the parts that are compared on it."""

    def __init__(self, cfg: DictConfig) -> None:
        self.lm: LM = load(cfg.model, packaged=True)
        self.observer = Observer(self.lm, decodes=False)
        self.metric = DivergenceMetric()
        self.exact = Engine(self.lm, reuse=(), admit="none")
        self.aligners: dict[str, Aligner] = {
            name: make(OmegaConf.load(CONF / "aligner" / f"{name}.yaml"), "aligner")
            for name in cfg.aligners
        }
        self.embedders = {name: _embedder(own) for name, own in cfg.embedders.items()}
        for embedder in self.embedders.values():
            hand(embedder, self.lm)
            embedder.embed(["warm"])

    def row(self, pair: Pair) -> Row:
        """Similarities, divergences and costs of one pair."""
        row: Row = {"id": pair.id, "kind": pair.kind, "group": pair.group}
        row["is_held_out"] = pair.is_held_out
        for name, embedder in self.embedders.items():
            (donor,) = embedder.embed([pair.donor])
            start = time.perf_counter()
            (target,) = embedder.embed([pair.target])
            row[f"ms/{name}"] = (time.perf_counter() - start) * 1e3
            row[f"similarity/{name}"] = float(donor @ target)
        return row | self._divergences(pair)

    def _divergences(self, pair: Pair) -> Row:
        question = pair.question
        request = Request.donor_target(pair.id, pair.donor, pair.target, question, system=SYSTEM)
        done = self.exact.prefill(request, room=STEPS)
        exact, _ = self.observer.observe(done, None)
        row: Row = {"n_tokens": done.plan.n_tokens, "exact_ms": done.cost.ttft_ms}
        self.exact.drop(done)
        first: Engine | None = None
        for name, aligner in self.aligners.items():
            engine = self._engine(aligner)
            if first is None:
                engine.ingest([request])
                first = engine
            else:
                engine.share(first)
            row |= self._arm(name, engine, request, exact)
        return row

    def _engine(self, aligner: Aligner) -> Engine:
        """One that takes whatever it finds, and knows one donor only."""
        return Engine(
            self.lm,
            aligner=aligner,
            gate=ThresholdGate(-1.0),
            context=BehindSystem(),
            embedder=HashingEmbedder(),
            admit="none",
        )

    def _arm(self, name: str, engine: Engine, request: Request, exact: Any) -> Row:
        done = engine.prefill(request, room=STEPS)
        seen, _ = self.observer.observe(done, exact.greedy)
        found = self.metric.compare(exact, seen)
        (chunk,) = (c for c in done.plan.chunks if c.kind == "target")
        used = done.plan.provenance[chunk.start : chunk.end] != 0
        (donor,) = (len(e.ids) for e in engine.store if e.context != "start")
        engine.drop(done)
        lengths = sorted((donor, len(used)))
        return {f"{key}/{name}": found[f"quality/{key}"] for key in KEYS} | {
            f"similarity/{SHARE} ({name})": float(used.mean()),
            f"similarity/{LENGTHS}": lengths[0] / lengths[1],
        }


def _embedder(own: Mapping[str, Any]) -> Embedder:
    """``conf/embedder/PART.yaml`` with what differs from it (``part_of_kv`` is its ``part``)."""
    part = CONF / "embedder" / f"{own['part']}.yaml"
    if not part.is_file():
        raise SettingError("embedders", own["part"], "a name of conf/embedder/*.yaml")
    more = {("part" if k == "part_of_kv" else k): v for k, v in own.items() if k != "part"}
    made: Embedder = make(OmegaConf.merge(OmegaConf.load(part), more), "embedder")
    return made


def summarise(rows: Sequence[Row], cfg: DictConfig) -> dict[str, Any]:
    """Per aligner, key, split and similarity: Spearman and excess; and the cost of each.

    Where less is alike, less is reused, and the divergence is small again: it is also looked at
    per share of tokens reused, which is how wrong the KV is that stands in.
    """
    names = [k.removeprefix("similarity/") for k in rows[0] if k.startswith("similarity/")]
    held_out = np.array([row["is_held_out"] for row in rows])
    found: dict[str, Any] = {"cost_ms": _costs(rows, cfg)}
    for aligner in cfg.aligners:
        for key in (*KEYS, *(f"{key} {PER_SHARE}" for key in KEYS)):
            whole = f"{key.removesuffix(PER_SHARE).strip()}/{aligner}"
            divergence = np.array([row[whole] for row in rows])
            similarity = {n: np.array([row[f"similarity/{n}"] for row in rows]) for n in names}
            share = similarity[f"{SHARE} ({aligner})"]
            if key.endswith(PER_SHARE):
                divergence = divergence / np.maximum(share, MIN_SHARE)
            for name in cfg.embedders:
                features = np.column_stack([similarity[name], share])
                similarity[f"{name} + share, fitted"] = fitted(features, divergence, ~held_out)
            found[f"{key}/{aligner}"] = {
                split: {
                    name: _estimates(values, divergence, rows, mask, cfg)
                    for name, values in similarity.items()
                }
                for split, mask in (("development", ~held_out), ("held_out", held_out))
            }
    found["kinds"] = _by_kind(rows, cfg, names)
    return found


def _estimates(
    similarity: Any, divergence: Any, rows: Sequence[Row], mask: Any, cfg: DictConfig
) -> dict[str, Any]:
    groups = [row["group"] for row, is_in in zip(rows, mask, strict=True) if is_in]
    measures = {"spearman": spearman, "excess": excess}
    return {
        name: estimate(measure, similarity[mask], divergence[mask], groups, cfg.resamples, cfg.seed)
        for name, measure in measures.items()
    }


def _costs(rows: Sequence[Row], cfg: DictConfig) -> dict[str, float]:
    """Median milliseconds of embedding one target, and of its exact prefill."""
    names = [*cfg.embedders]
    found = {name: float(np.median([row[f"ms/{name}"] for row in rows])) for name in names}
    return found | {"exact prefill": float(np.median([row["exact_ms"] for row in rows]))}


def _by_kind(rows: Sequence[Row], cfg: DictConfig, names: Sequence[str]) -> dict[str, Any]:
    """Means within each kind of pair, all pairs: where similarity and divergence part."""
    kinds = dict.fromkeys(row["kind"] for row in rows)
    columns = [*(f"similarity/{n}" for n in names)]
    columns += [f"{key}/{aligner}" for key in KEYS for aligner in cfg.aligners]
    return {
        kind: {"n": sum(row["kind"] == kind for row in rows)}
        | {c: float(np.mean([row[c] for row in rows if row["kind"] == kind])) for c in columns}
        for kind in kinds
    }


def figure(rows: Sequence[Row], cfg: DictConfig) -> Figure:
    """Divergence against each embedder's similarity, by kind of pair."""
    aligner = cfg.aligners[0]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    with rc_context(STYLE):
        drawn = Figure(figsize=(2.9 * len(cfg.embedders) / 2 + 1, 6), layout="constrained")
        across = -(-len(cfg.embedders) // 2)
        panels = drawn.subplots(2, across, sharey=True, squeeze=False).flat
        for name, axes in zip(cfg.embedders, panels, strict=False):
            for i, kind in enumerate(kinds):
                own = [row for row in rows if row["kind"] == kind]
                x = [row[f"similarity/{name}"] for row in own]
                y = [max(row[f"kl_first_nats/{aligner}"], 1e-6) for row in own]
                mark = "o" if i < len(METHOD_COLOURS) else "^"
                colour = METHOD_COLOURS[i % len(METHOD_COLOURS)]
                axes.plot(x, y, mark, color=colour, ms=3.5, label=kind)
            axes.set(yscale="log", xlabel=f"cosine, {name}")
        drawn.axes[0].set_ylabel(f"kl_first_nats, {aligner}")
        lines, labels = drawn.axes[0].get_legend_handles_labels()
        drawn.legend(lines, labels, loc="outside lower center", ncols=5, fontsize=7)
        return drawn


def perform(cfg: DictConfig) -> None:
    known = OmegaConf.load(Path(__file__).parent / "config.yaml")
    check_keys(cfg, {str(key): None for key in known})
    kinds = list(KINDS) if cfg.kinds is None else list(cfg.kinds)
    for kind in kinds:
        if kind not in KINDS:
            raise SettingError("kinds", kind, f"names out of {', '.join(KINDS)}")
    torch.set_num_threads(cfg.threads)
    files = {name: data_file(cfg, path) for name, path in FILES.items()}
    made = pairs(files, kinds, cfg.n, cfg.max_words, cfg.seed)
    if not (any(p.is_held_out for p in made) and any(not p.is_held_out for p in made)):
        raise SettingError("n", cfg.n, "more pairs: one side of the split is empty")
    bench = Bench(cfg)
    rows = [bench.row(pair) for pair in track(made, description="pairs")]
    identities = {name: embedder.identity for name, embedder in bench.embedders.items()}
    folder = record(
        cfg,
        rows,
        summarise(rows, cfg),
        {"divergence": figure(rows, cfg)},
        model=bench.lm.name,
        namespace=bench.lm.namespace(),
        embedders=identities,
    )
    print(f"study: {folder}")


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(cfg: DictConfig) -> None:
    attempt(perform, cfg)


if __name__ == "__main__":
    sys.exit(entry(main))
