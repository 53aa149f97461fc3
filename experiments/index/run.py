"""Study: recall and time of approximate search over chunk vectors, next to exact search.

python experiments/index/run.py --help
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HYDRA_FULL_ERROR"] = "1"

import faiss
import hydra
import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.compose import CONF, make  # noqa: E402
from experiments.public import read  # noqa: E402
from experiments.study import attempt, check_keys, data_file, entry, record  # noqa: E402
from kvsem.chunkers.sentence import SentenceChunker  # noqa: E402
from kvsem.errors import DataError, SettingError, check_range  # noqa: E402
from kvsem.index.base import ChunkIndex  # noqa: E402
from kvsem.plots import METHOD_COLOURS, STYLE  # noqa: E402

FILES = {  # and the field that holds prose; a list of passages where it is "passages"
    "rag/squad_question_paraphrases.jsonl.gz": "context",
    "rag/nq_open_gold.jsonl.gz": "text",
    "rag/musique_100.jsonl.gz": "passages",
    "rag/hotpotqa_dev100.jsonl.gz": "passages",
    "paraphrase/counterfactual_imdb.jsonl.gz": "original",
}
CHUNK_TOKENS = 64
WARM = 20  # unscored queries

Row = dict[str, Any]


def chunks(cfg: DictConfig) -> list[str]:
    """``n_real`` distinct chunks of real text, in a seeded order."""
    chunker = SentenceChunker(CHUNK_TOKENS)
    found = dict.fromkeys(
        text[span.start : span.end].strip()
        for name, field in FILES.items()
        for text in _texts(data_file(cfg, name), field)
        for span in chunker.split(text)
    )
    if len(found) < cfg.n_real:
        raise SettingError("n_real", cfg.n_real, f"a number up to {len(found)}, of so many chunks")
    order = np.random.default_rng(cfg.seed).permutation(len(found))
    texts = list(found)
    return [texts[i] for i in order[: cfg.n_real]]


def _texts(path: Path, field: str) -> Iterator[str]:
    for found in read(path):
        value = found[field]
        passages = value if isinstance(value, list) else [{"text": value}]
        yield from (passage["text"] for passage in passages)


def perturbed(vectors: np.ndarray, cosines: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Unit vectors at ``cosines`` ``[n]`` to the unit ``vectors`` ``[n, dim]``, in directions drawn
    like the differences of real vectors."""
    others = vectors[rng.permutation(len(vectors))] - vectors[rng.permutation(len(vectors))]
    others += 0.1 * rng.normal(size=vectors.shape) / np.sqrt(vectors.shape[1])
    others -= (others * vectors).sum(axis=1, keepdims=True) * vectors
    others /= np.linalg.norm(others, axis=1, keepdims=True)
    sines = np.sqrt(1 - cosines**2)
    return np.asarray((cosines[:, None] * vectors + sines[:, None] * others).astype(np.float32))


def stored(real: np.ndarray, cfg: DictConfig, rng: np.random.Generator) -> np.ndarray:
    """The real vectors, and perturbations of them up to ``n_vectors``."""
    more = real[rng.integers(len(real), size=cfg.n_vectors - len(real))]
    return np.concatenate([real, perturbed(more, _cosines(cfg, len(more), rng), rng)])


def _cosines(cfg: DictConfig, n: int, rng: np.random.Generator) -> np.ndarray:
    low, high = cfg.cosine
    return rng.uniform(low, high, n)


def timed(index: ChunkIndex, queries: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The best id of every query, and milliseconds each."""
    for query in queries[:WARM]:
        index.search(query, 1)
    found, times = [], []
    for query in queries:
        start = time.perf_counter()
        hits = index.search(query, 1)
        times.append((time.perf_counter() - start) * 1e3)
        found.append(hits[0][0])
    return found, np.array(times)


def measure(
    name: str, index: ChunkIndex, queries: np.ndarray, best: list[int], build_s: float
) -> Row:
    """One row: recall of the best, and time a query."""
    found, times = timed(index, queries)
    hits = np.array(found) == np.array(best)
    error = 1.96 * hits.std() / np.sqrt(len(hits))
    return {
        "index": name,
        "recall_at_1": float(hits.mean()),
        "recall_error": float(error),  # half the 95 % interval
        "query_ms_mean": float(times.mean()),
        "query_ms_median": float(np.median(times)),
        "query_ms_p99": float(np.quantile(times, 0.99)),
        "build_s": build_s,
        "n_vectors": len(index),
        "n_queries": len(queries),
    }


def study(cfg: DictConfig) -> tuple[list[Row], str]:
    embedder = make(OmegaConf.load(CONF / "embedder" / f"{cfg.embedder}.yaml"), "embedder")
    texts = chunks(cfg)
    start = time.perf_counter()
    real = embedder.embed(texts)
    embed_s = time.perf_counter() - start
    print(f"{len(texts)} chunks embedded in {embed_s:.0f} s", flush=True)
    rng = np.random.default_rng(cfg.seed)
    vectors = stored(real, cfg, rng)
    asked = vectors[rng.choice(len(vectors), cfg.n_queries, replace=False)]
    queries = perturbed(asked, _cosines(cfg, len(asked), rng), rng)
    rows: list[Row] = []
    best: list[int] = []
    for kind in ("flat", "hnsw"):
        settings = OmegaConf.load(CONF / "index" / f"{kind}.yaml")
        start = time.perf_counter()
        index = make(settings, "index")(dim=embedder.dim, identity=embedder.identity)
        index.add(range(len(vectors)), vectors)
        build = time.perf_counter() - start
        print(f"{kind}: built in {build:.0f} s", flush=True)
        if kind == "flat":
            best, _ = timed(index, queries)
            rows.append(measure(kind, index, queries, best, build))
            continue
        for width in cfg.ef_search:
            index.ef_search = width
            name = f"hnsw m={settings.m} ef_search={width}"
            rows.append(measure(name, index, queries, best, build))
            print(rows[-1], flush=True)
    return rows, embedder.identity


def figure(rows: list[Row]) -> Figure:
    """Recall against time a query."""
    with rc_context(STYLE):
        drawn = Figure(figsize=(5.4, 3.2), layout="constrained")
        axes = drawn.subplots()
        for row, colour in zip(rows, METHOD_COLOURS, strict=False):
            at = (row["query_ms_mean"], row["recall_at_1"])
            axes.plot(*at, "o", color=colour)
            axes.annotate(row["index"], at, fontsize=7, xytext=(4, -9), textcoords="offset points")
        axes.set(xscale="log", xlabel="ms a query", ylabel="recall@1 against flat")
        return drawn


def perform(cfg: DictConfig) -> None:
    known = OmegaConf.load(Path(__file__).parent / "config.yaml")
    check_keys(cfg, {str(key): None for key in known})
    low, high = cfg.cosine
    check_range("cosine", low, 0, high)
    check_range("cosine", high, low, 1)
    if not 1 <= cfg.n_real <= cfg.n_vectors:
        raise SettingError("n_real", cfg.n_real, f"a number from 1 to n_vectors={cfg.n_vectors}")
    if not (CONF / "embedder" / f"{cfg.embedder}.yaml").is_file():
        raise DataError(f"embedder={cfg.embedder!r}: no conf/embedder/{cfg.embedder}.yaml")
    torch.set_num_threads(cfg.threads)
    faiss.omp_set_num_threads(cfg.threads)
    rows, identity = study(cfg)
    summary = {"indexes": {row["index"]: row for row in rows}}
    path = record(cfg, rows, summary, {"recall": figure(rows)}, embedder=identity)
    print(f"study: {path}")


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(cfg: DictConfig) -> None:
    attempt(perform, cfg)


if __name__ == "__main__":
    sys.exit(entry(main))
