"""Study: TTFT of a second request with an identical long prefix, against cold, paired.

python experiments/prefix/run.py --help
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ["HYDRA_FULL_ERROR"] = "1"

import hydra
import numpy as np
import torch
from omegaconf import DictConfig
from rich.progress import track

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.study import attempt, entry, record  # noqa: E402
from kvsem.engine import Engine  # noqa: E402
from kvsem.environment import keep_memory  # noqa: E402
from kvsem.errors import KvsemError, SettingError  # noqa: E402
from kvsem.lm import LM, load  # noqa: E402
from kvsem.memory.memory import MemorySettings  # noqa: E402
from kvsem.memory.prefix import MAX_PAGE_SIZE  # noqa: E402
from kvsem.summary import bootstrap  # noqa: E402
from kvsem.types import Request  # noqa: E402

QUESTIONS = ("What is described here?", "Which rules are named?")
POOL = 4  # prefixes that a pool has room for: one that grows would do so in somebody's TTFT
MAX_DIFFERENCE = 1e-3  # of logits in fp32: more would not be the same computation

Row = dict[str, Any]
Measured = tuple[Row, torch.Tensor]


def prefixes(cfg: DictConfig, lm: LM) -> list[str]:
    """Texts of ``prefix_tokens`` tokens each, out of Python's language reference."""
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    if cfg.n_pairs * cfg.prefix_tokens > len(ids):
        raise SettingError("n_pairs", cfg.n_pairs, f"at most {len(ids) // cfg.prefix_tokens}")
    order = np.random.default_rng(cfg.seed).permutation(len(ids) // cfg.prefix_tokens)
    starts = [int(i) * cfg.prefix_tokens for i in order[: cfg.n_pairs]]
    return [lm.tokenizer.decode(ids[start : start + cfg.prefix_tokens]) for start in starts]


def measure(cfg: DictConfig, lm: LM) -> list[Row]:
    """Per pair: the second request by every page size, by a crop of a plain cache, and cold."""
    budget = POOL * cfg.prefix_tokens // MAX_PAGE_SIZE * MAX_PAGE_SIZE
    engines = {
        f"pages_{size}": Engine(lm, reuse=("prefix",), memory=MemorySettings(size, budget))
        for size in cfg.page_sizes
    }
    cold = Engine(lm, reuse=(), admit="none")
    rows: list[Row] = []
    for i, text in enumerate(track(prefixes(cfg, lm), description="pairs")):
        first, second = (
            Request.rag(f"{i}-{j}", [], question, system=text, max_new_tokens=1)
            for j, question in enumerate(QUESTIONS)
        )
        for engine in engines.values():
            engine.leave(engine.prefill(first))
        jobs: list[tuple[str, Callable[[], Measured]]] = [("cold", lambda: _prefill(cold, second))]  # noqa: B023
        jobs += [(n, lambda e=e: _prefill(e, second)) for n, e in engines.items()]  # type: ignore[misc] # noqa: B023
        jobs.append(("crop", lambda: _crop(lm, cold, first, second)))  # noqa: B023
        turn = i % len(jobs)
        found = {name: job() for name, job in jobs[turn:] + jobs[:turn]}
        exact = found["cold"][1]
        for name, (row, logits) in found.items():
            difference = float((logits - exact).abs().max())
            if difference > MAX_DIFFERENCE:
                raise KvsemError(f"{name}: logits differ from cold by {difference}")
            rows.append({"pair": i, "arm": name, "difference": difference} | row)
    return rows


def _prefill(engine: Engine, request: Request) -> Measured:
    done = engine.prefill(request)
    engine.drop(done)
    row: Row = {k: getattr(done.cost, k) for k in ("ttft_ms", "plan_ms", "load_ms", "prefill_ms")}
    return row | {"tokens": done.plan.n_tokens, "reused": done.plan.n_paged}, done.logits


def _crop(lm: LM, engine: Engine, first: Request, second: Request) -> Measured:
    """What a cache that is simply cut where the prompts part would take: the limit of reuse."""
    ids = engine.render(first).ids
    kv = lm.buffer(2 * len(ids))
    lm.extend(ids.tolist(), kv)
    start = time.perf_counter()
    wanted = engine.render(second).ids
    n = min(len(ids), len(wanted) - 1)
    same = int(np.argmin(np.append(ids[:n] == wanted[:n], False)))
    kv.truncate_to(same)
    logits = lm.extend(wanted[same:].tolist(), kv)[-1]
    int(logits.argmax())
    ttft = (time.perf_counter() - start) * 1e3
    return {"ttft_ms": ttft, "tokens": len(wanted), "reused": same}, logits


def summarise(rows: Sequence[Row]) -> Row:
    """Median and mean of cold ÷ arm, pair by pair, with the 95 % interval of the mean."""
    cold = {row["pair"]: row["ttft_ms"] for row in rows if row["arm"] == "cold"}
    summary: Row = {"arms": {}}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        ratios = np.array([cold[row["pair"]] / row["ttft_ms"] for row in own])
        low, high = bootstrap(ratios[:, None], [str(row["pair"]) for row in own])
        found: Row = {
            "cold_over_arm": {
                "mean": float(ratios.mean()),
                "median": float(np.median(ratios)),
                "low": float(low[0]),
                "high": float(high[0]),
                "least": float(ratios.min()),
                "n": len(ratios),
            },
            "largest_logit_difference": max(row["difference"] for row in own),
        }
        for key in ("tokens", "reused", "ttft_ms", "plan_ms", "load_ms", "prefill_ms"):
            if key in own[0]:
                found[key] = float(np.median([row[key] for row in own]))
        summary["arms"][arm] = found
    return summary


def print_table(summary: Mapping[str, Any]) -> None:
    for arm, found in summary["arms"].items():
        e = found["cold_over_arm"]
        print(
            f"{arm}: {e['mean']:.2f} x faster than cold [{e['low']:.2f}, {e['high']:.2f}], median "
            f"{e['median']:.2f}, n {e['n']}; {found['reused']:.0f} of {found['tokens']:.0f} tokens"
        )


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(cfg: DictConfig) -> None:
    attempt(perform, cfg)


def perform(cfg: DictConfig) -> None:
    keep_memory()
    torch.set_num_threads(cfg.threads)
    lm = load(cfg.model, packaged=True)
    rows = measure(cfg, lm)
    summary = summarise(rows)
    folder = record(cfg, rows, summary, {}, model=lm.name)
    print_table(summary)
    print(f"study: {folder}")


if __name__ == "__main__":
    sys.exit(entry(main))
