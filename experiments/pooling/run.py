"""Study: one memory budget for contiguous reservation, a pool of pages, and prefix pages in it.

python experiments/pooling/run.py --help
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["HYDRA_FULL_ERROR"] = "1"

import hydra
import numpy as np
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig
from rich.progress import track

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.public import read  # noqa: E402
from experiments.study import attempt, data_file, entry, record  # noqa: E402
from kvsem.engine import Engine  # noqa: E402
from kvsem.environment import keep_memory  # noqa: E402
from kvsem.errors import KvsemError, SettingError  # noqa: E402
from kvsem.lm import LM, load  # noqa: E402
from kvsem.memory.memory import MemorySettings  # noqa: E402
from kvsem.plots import METHOD_COLOURS, STYLE  # noqa: E402
from kvsem.serving.loop import Loop, Served  # noqa: E402
from kvsem.types import Request  # noqa: E402

ARMS = {  # what may be reused, and whether the greatest length is reserved
    "reserve": ((), True),
    "pool": ((), False),
    "pool_prefix": (("prefix",), False),
}
SYSTEM = "Answer the question from the passages, in a few words."
RESAMPLES = 2000
PERCENT = 100

Row = dict[str, Any]


@dataclass
class Clock:
    """Seconds that pass while work is done; idle time is skipped."""

    skipped: float = 0.0
    start: float = field(default_factory=time.perf_counter)

    def __call__(self) -> float:
        return time.perf_counter() - self.start + self.skipped

    def skip_to(self, then: float) -> None:
        self.skipped += max(0.0, then - self())


def requests_of(cfg: DictConfig, run: int) -> list[Request]:
    """Questions about a few documents of one to five paragraphs each, in a seeded order."""
    rng = np.random.default_rng([cfg.seed, run])
    low, high = cfg.answer_tokens
    articles = list(_articles(data_file(cfg, "rag/xquad_en_zh_es.jsonl.gz")).values())
    chosen = rng.choice(len(articles), min(cfg.documents, len(articles)), replace=False)
    found = []
    for i in range(cfg.n_requests):
        paragraphs = articles[int(rng.choice(chosen))]
        n = 1 + int(rng.integers(len(paragraphs)))
        asked = paragraphs[int(rng.integers(n))]["qas"]
        question = asked[int(rng.integers(len(asked)))]["question"]
        found.append(
            Request.rag(
                f"{run}-{i}",
                [p["context"]["en"] for p in paragraphs[:n]],
                question["en"] if isinstance(question, dict) else question,
                system=SYSTEM,
                max_new_tokens=int(rng.integers(low, high + 1)),
            )
        )
    return found


def _articles(path: Path) -> dict[str, list[dict[str, Any]]]:
    articles: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for paragraph in read(path):
        articles[paragraph["article"]].append(paragraph)
    return articles


def serve(
    engine: Engine, requests: Sequence[Request], arrivals: Sequence[float], reserve: int | None
) -> tuple[list[Served], list[Row]]:
    """Serve ``requests`` as they arrive; also what the memory held, iteration by iteration."""
    clock = Clock()
    loop = Loop(engine, reserve=reserve, clock=clock, max_batch_tokens=1)
    coming = list(zip(requests, arrivals, strict=True))[::-1]
    over: list[Served] = []
    history: list[Row] = []
    while coming or loop.n_left:
        if not loop.n_left:
            clock.skip_to(coming[-1][1])
        while coming and coming[-1][1] <= clock():
            loop.submit(*coming.pop())
        start = clock()
        over += loop.step()
        if loop.running:
            gauges = engine.memory.gauges()
            history.append(
                {
                    "seconds": clock() - start,
                    "running": len(loop.running),
                    "waiting": len(loop.waiting),
                    "utilisation": _of_active(loop),
                    "pool_utilisation": gauges["pool_utilisation"],
                }
            )
    return over, history


def _of_active(loop: Loop) -> float:
    """Tokens held ÷ token slots of the pages that requests in flight hold."""
    kvs = [flight.done.kv for flight in loop.running if flight.done]
    pages = {page for kv in kvs for page in kv.pages}
    shared = {page: n for kv in kvs for page, n in _tokens(kv, loop)}
    return sum(shared.values()) / (len(pages) * loop.engine.memory.settings.page_size)


def _tokens(kv: Any, loop: Loop) -> Iterator[tuple[int, int]]:
    size = loop.engine.memory.settings.page_size
    for i, page in enumerate(kv.pages):
        yield page, min(size, max(0, kv.length - i * size))


def measure(cfg: DictConfig, lm: LM) -> tuple[list[Row], list[Row]]:
    """One row per request and arm, and one per run and arm."""
    per_request, per_run = [], []
    alone = _seconds_alone(cfg, lm)
    jobs = [(run, arm) for run in range(cfg.n_runs) for arm in _rotated(list(cfg.arms), run)]
    for run, arm in track(jobs, description="runs"):
        requests = requests_of(cfg, run)
        rng = np.random.default_rng([cfg.seed, run, 1])
        arrivals = np.cumsum(rng.exponential(alone / cfg.load, len(requests)))
        reuse, reserved = ARMS[arm]
        memory = MemorySettings(cfg.page_size, cfg.budget_tokens)
        engine = Engine(lm, reuse=reuse, memory=memory, admit="all" if reuse else "none")
        reserve = cfg.max_tokens if reserved else None
        over, history = serve(engine, requests, arrivals.tolist(), reserve)
        if failed := [s for s in over if s.error]:
            raise KvsemError(f"{failed[0].request.id}: {failed[0].error}")
        per_request += [_request_row(run, arm, served) for served in over]
        per_run.append(_run_row(run, arm, over, history))
    return per_request, per_run


def _seconds_alone(cfg: DictConfig, lm: LM) -> float:
    """Mean seconds that a request takes on its own."""
    engine = Engine(lm, reuse=(), admit="none")
    requests = requests_of(cfg, 0)[:6]
    engine.generate(requests[0])
    start = time.perf_counter()
    for request in requests:
        engine.generate(request)
    return (time.perf_counter() - start) / len(requests)


def _rotated(arms: list[str], by: int) -> list[str]:
    return arms[by % len(arms) :] + arms[: by % len(arms)]


def _request_row(run: int, arm: str, served: Served) -> Row:
    plan = served.prefilled.plan if served.prefilled else None
    return {
        "run": run,
        "arm": arm,
        "request": served.request.id,
        "ttft_ms": round(served.ttft_ms, 1),
        "latency_ms": round(served.latency_ms, 1),
        "preempted": served.n_preempted,
        "prompt_tokens": plan.n_tokens if plan else 0,
        "paged_tokens": plan.n_paged if plan else 0,
        "answer": list(served.tokens),
    }


def _run_row(run: int, arm: str, over: Sequence[Served], history: Sequence[Row]) -> Row:
    seconds = np.array([row["seconds"] for row in history])
    queued = np.array([row["waiting"] > 0 for row in history])
    means = {
        key: float(np.average([row[key] for row in history], weights=seconds))
        for key in ("running", "utilisation", "pool_utilisation")
    }
    running = np.array([row["running"] for row in history])
    return {
        "run": run,
        "arm": arm,
        **means,
        "running_queued": float(running[queued].mean()) if queued.any() else means["running"],
        "most_running": int(running.max()),
        "requests_per_second": len(over) / float(seconds.sum()),
    }


def summarise(per_request: Sequence[Row], per_run: Sequence[Row], arms: Sequence[str]) -> Row:
    """Means over runs and percentiles over requests, with 95 % intervals: runs are drawn whole."""
    runs = sorted({row["run"] for row in per_run})
    rng = np.random.default_rng(0)
    draws = [list(range(len(runs))), *rng.integers(0, len(runs), (RESAMPLES, len(runs))).tolist()]
    summary: Row = {"arms": {}, "ratios": {}, "n_runs": len(runs)}
    samples: dict[str, dict[str, np.ndarray]] = {}
    for arm in arms:
        ttft = [
            [r["ttft_ms"] for r in per_request if (r["arm"], r["run"]) == (arm, run)]
            for run in runs
        ]
        means = {
            key: [[r[key] for r in per_run if (r["arm"], r["run"]) == (arm, run)] for run in runs]
            for key in (
                "utilisation",
                "pool_utilisation",
                "running",
                "running_queued",
                "most_running",
                "requests_per_second",
            )
        }
        samples[arm] = {key: _drawn(values, draws, np.mean) for key, values in means.items()}
        for q in (50, 99):
            samples[arm][f"ttft_p{q}_ms"] = _drawn(ttft, draws, lambda x, q=q: np.percentile(x, q))
        summary["arms"][arm] = {k: _estimate(v) for k, v in samples[arm].items()}
        summary["arms"][arm]["n_requests"] = sum(map(len, ttft))
        summary["arms"][arm]["preempted"] = sum(
            r["preempted"] for r in per_request if r["arm"] == arm
        )
    for arm in arms[1:]:
        summary["ratios"][f"{arm} ÷ {arms[0]}"] = {
            key: _estimate(samples[arm][key] / samples[arms[0]][key]) for key in samples[arm]
        }
    answers: dict[str, set[str]] = defaultdict(set)
    for row in per_request:
        answers[row["request"]].add(str(row["answer"]))
    summary["requests_answered_alike"] = sum(len(found) == 1 for found in answers.values())
    summary["requests"] = len(answers)
    return summary


def _drawn(
    by_run: Sequence[Sequence[float]], draws: Sequence[Sequence[int]], of: Any
) -> np.ndarray:
    return np.array([of(np.concatenate([by_run[i] for i in draw])) for draw in draws])


def _estimate(values: np.ndarray) -> dict[str, float]:
    low, high = np.percentile(values[1:], (2.5, 97.5))
    return {"mean": float(values[0]), "low": float(low), "high": float(high)}


def figure(per_request: Sequence[Row], summary: Mapping[str, Any]) -> Figure:
    """TTFT of every request, from the fastest to the slowest; utilisation beside it."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = drawn.subplots(1, 2, width_ratios=(3, 2))
        arms = list(summary["arms"])
        for arm, colour in zip(arms, METHOD_COLOURS, strict=False):
            values = np.sort([r["ttft_ms"] / 1e3 for r in per_request if r["arm"] == arm])
            share = np.arange(1, len(values) + 1) / len(values) * PERCENT
            left.plot(values, share, color=colour, label=arm)
        left.set(xlabel="TTFT from arrival (s)", ylabel="requests (%)", title="Time to first token")
        left.legend(frameon=False)
        means = [summary["arms"][arm]["utilisation"] for arm in arms]
        at = np.arange(len(arms))
        right.bar(at, [PERCENT * m["mean"] for m in means], color=METHOD_COLOURS[: len(arms)])
        for x, m in zip(at, means, strict=True):
            right.plot([x, x], [PERCENT * m["low"], PERCENT * m["high"]], color="black", lw=1)
        right.set_xticks(at, arms)
        right.set(ylabel="token slots of held pages in use (%)", title="Utilisation", ylim=(0, 105))
    return drawn


def print_table(summary: Mapping[str, Any]) -> None:
    for arm, found in summary["arms"].items():
        cells = (
            f"{key} {e['mean']:.3g} [{e['low']:.3g}, {e['high']:.3g}]"
            for key, e in found.items()
            if isinstance(e, dict)
        )
        print(f"{arm}: {'; '.join(cells)}")
    for name, found in summary["ratios"].items():
        cells = (f"{k} {e['mean']:.2f} [{e['low']:.2f}, {e['high']:.2f}]" for k, e in found.items())
        print(f"{name}: {'; '.join(cells)}")


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(cfg: DictConfig) -> None:
    attempt(perform, cfg)


def perform(cfg: DictConfig) -> None:
    unknown = [arm for arm in cfg.arms if arm not in ARMS]
    if unknown or len(cfg.arms) < 2:
        raise SettingError("arms", list(cfg.arms), f"two or more of {', '.join(ARMS)}")
    keep_memory()
    torch.set_num_threads(cfg.threads)
    lm = load(cfg.model, packaged=True)
    per_request, per_run = measure(cfg, lm)
    summary = summarise(per_request, per_run, list(cfg.arms))
    folder = record(
        cfg,
        [*per_request, *per_run],
        summary,
        {"pooling": figure(per_request, summary)},
        model=lm.name,
    )
    print_table(summary)
    print(f"study: {folder}")


if __name__ == "__main__":
    sys.exit(entry(main))
