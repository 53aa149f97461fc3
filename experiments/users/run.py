"""Study: 100 users at once of whom 30 share a system prompt or a context.

python experiments/users/run.py --help
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from kvsem.engine import Engine, Prefilled  # noqa: E402
from kvsem.environment import keep_memory  # noqa: E402
from kvsem.errors import KvsemError, SettingError  # noqa: E402
from kvsem.lm import LM, load  # noqa: E402
from kvsem.memory.memory import MemorySettings  # noqa: E402
from kvsem.plots import METHOD_COLOURS, STYLE  # noqa: E402
from kvsem.recompute.epic import EpicRecompute  # noqa: E402
from kvsem.serving.loop import Loop  # noqa: E402
from kvsem.summary import bootstrap  # noqa: E402
from kvsem.types import Request  # noqa: E402

ARMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "prefix": ("prefix",),
    "prefix_chunks": ("prefix", "chunk"),
}
GROUPS = ("policy", "context", "others")
SYSTEM = "Answer the question from the passages, in a few words."
KEYS = ("computed_tokens", "ttft_ms", "prefill_ms", "kl_first_nats")

Row = dict[str, Any]


def users_of(cfg: DictConfig, run: int) -> list[tuple[str, Request]]:
    """(group, request) of every user, in a seeded order of arrival."""
    rng = np.random.default_rng([cfg.seed, run])
    facts = list(read(data_file(cfg, "rag/nq_open_gold.jsonl.gz")))
    articles: dict[str, list[Row]] = defaultdict(list)
    for paragraph in read(data_file(cfg, "rag/xquad_en_zh_es.jsonl.gz")):
        articles[paragraph["article"]].append(paragraph)
    policy = next(read(data_file(cfg, "system_prompts/tau_bench_policies.jsonl")))["text"]
    policy = " ".join(policy.split()[: cfg.policy_words])
    own = iter(rng.permutation(len(facts)))
    shared = articles[sorted(articles)[int(rng.integers(len(articles)))]][:4]

    def asked(name: str, n: int, system: str) -> Request:
        mine = [facts[int(next(own))] for _ in range(n)]
        texts = [fact["text"] for fact in mine]
        return _request(name, texts, mine[0]["question"], system, cfg.answer_tokens)

    found = [("policy", asked(f"{run}-policy-{i}", 2, policy)) for i in range(cfg.n_policy)]
    for i in range(cfg.n_context):
        order = [shared[int(j)] for j in rng.permutation(len(shared))]
        question = order[0]["qas"][i % len(order[0]["qas"])]["question"]
        question = question["en"] if isinstance(question, dict) else question
        texts = [paragraph["context"]["en"] for paragraph in order]
        found.append(
            ("context", _request(f"{run}-context-{i}", texts, question, SYSTEM, cfg.answer_tokens))
        )
    for i in range(cfg.n_others):
        system = f"You are the assistant of desk {i}. {SYSTEM}"
        found.append(("others", asked(f"{run}-others-{i}", 3, system)))
    return [found[int(i)] for i in rng.permutation(len(found))]


def _request(name: str, texts: Sequence[str], question: str, system: str, n: int) -> Request:
    return Request.rag(name, texts, question, system=system, max_new_tokens=n)


def engine_of(cfg: DictConfig, lm: LM, arm: str) -> Engine:
    return Engine(
        lm,
        reuse=ARMS[arm],
        recompute=EpicRecompute(cfg.ratio) if "chunk" in ARMS[arm] else None,
        memory=MemorySettings(cfg.page_size),
        admit="all" if ARMS[arm] else "none",
        seed=cfg.seed,
    )


def measure(cfg: DictConfig, lm: LM) -> tuple[list[Row], list[Row]]:
    """One row per user and arm, and one per run and arm."""
    per_user: list[Row] = []
    per_run: list[Row] = []
    jobs = [
        (run, arm)
        for run in range(cfg.n_runs)
        for arm in (*list(ARMS)[run % len(ARMS) :], *list(ARMS)[: run % len(ARMS)])
    ]
    logits: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for run, arm in track(jobs, description="runs"):
        rows, totals = serve(cfg, lm, run, arm, logits)
        per_user += rows
        per_run.append(totals)
    for row in per_user:
        exact = logits[row["request"]]["none"].double().log_softmax(-1)
        there = logits[row["request"]][row["arm"]].double().log_softmax(-1)
        row["kl_first_nats"] = max(0.0, float((exact.exp() * (exact - there)).sum()))
    return per_user, per_run


def serve(
    cfg: DictConfig, lm: LM, run: int, arm: str, logits: dict[str, dict[str, torch.Tensor]]
) -> tuple[list[Row], Row]:
    """All users of a run arrive at once and are served in the order of the queue."""
    engine = engine_of(cfg, lm, arm)
    users = users_of(cfg, run)
    groups = {request.id: group for group, request in users}
    loop = Loop(engine, max_batch_tokens=1)
    engine.drop(engine.prefill(users[0][1]))  # unscored: the model's first use
    now = loop.clock()
    for _, request in users:
        loop.submit(request, now)
    rows, peak, unshared = [], 0, 0
    while loop.n_left:
        over = loop.step()
        peak = max(peak, engine.memory.pool.n_active)
        for served in over:
            done = served.prefilled
            if done is None or served.error:
                raise KvsemError(f"{served.request.id}: {served.error}")
            logits[served.request.id][arm] = done.logits
            unshared += len(done.kv.pages)
            rows.append(
                _row(run, arm, groups[served.request.id], done)
                | {"ttft_ms": round(served.ttft_ms, 1)}
            )
    page = engine.memory.pool.page_nbytes
    kept = engine.memory.pool.n_owned if ARMS[arm] else unshared
    return rows, {"run": run, "arm": arm, "peak_bytes": peak * page, "kept_bytes": kept * page}


def _row(run: int, arm: str, group: str, done: Prefilled) -> Row:
    return {
        "run": run,
        "arm": arm,
        "group": group,
        "request": done.request.id,
        "prompt_tokens": done.plan.n_tokens,
        "computed_tokens": round(float(done.computed.mean(axis=0).sum()), 2),
        "prefill_ms": round(done.cost.ttft_ms, 1),
    }


def summarise(per_user: Sequence[Row], per_run: Sequence[Row]) -> Row:
    """Means per user with 95 % intervals, of all and by group; ratios to no sharing, paired."""
    summary: Row = {"groups": {}, "runs": {}}
    for group in ("all", *GROUPS):
        table = {
            arm: {
                row["request"]: row
                for row in per_user
                if row["arm"] == arm and group in ("all", row["group"])
            }
            for arm in ARMS
        }
        requests = sorted(table["none"])
        found: Row = {}
        for arm, rows in table.items():
            values = np.array([[rows[r][key] for key in KEYS] for r in requests], dtype=float)
            base = np.array(
                [[table["none"][r][key] for key in KEYS] for r in requests], dtype=float
            )
            found[arm] = _estimates(KEYS, values, requests)
            ratio = values[:, :3] / base[:, :3]
            found[arm] |= _estimates([f"{k} ÷ none" for k in KEYS[:3]], ratio, requests)
        summary["groups"][group] = found
    for arm in ARMS:
        own = [row for row in per_run if row["arm"] == arm]
        summary["runs"][arm] = {
            key: [row[key] for row in own] for key in ("peak_bytes", "kept_bytes")
        }
    return summary


def _estimates(keys: Sequence[str], values: np.ndarray, requests: Sequence[str]) -> Row:
    low, high = bootstrap(values, requests)
    means = values.mean(axis=0)
    return {
        key: {"mean": float(m), "low": float(a), "high": float(b), "n": len(values)}
        for key, m, a, b in zip(keys, means, low, high, strict=True)
    }


def figure(summary: Mapping[str, Any]) -> Figure:
    """Computed tokens and TTFT of its own, by group, relative to no sharing."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(9, 3.4), layout="constrained")
        titles = {"computed_tokens ÷ none": "Computed tokens", "prefill_ms ÷ none": "Prefill time"}
        for axes, (key, title) in zip(
            drawn.subplots(1, 2, sharey=True), titles.items(), strict=True
        ):
            for i, arm in enumerate(list(ARMS)[1:]):
                found = [summary["groups"][group][arm][key] for group in ("all", *GROUPS)]
                at = np.arange(len(found)) + 0.38 * i
                axes.bar(at, [e["mean"] for e in found], 0.36, color=METHOD_COLOURS[i], label=arm)
                for x, e in zip(at, found, strict=True):
                    axes.plot([x, x], [e["low"], e["high"]], color="black", lw=1)
            axes.axhline(1, color="#6B6B6B", lw=0.8)
            axes.set_xticks(
                np.arange(4) + 0.19, ["all", "share\na policy", "share\na context", "others"]
            )
            axes.set(title=title, ylim=(0, 1.35))
        drawn.axes[0].set_ylabel("÷ no sharing")
        drawn.axes[0].legend(frameon=False, loc="upper left", ncols=2)
    return drawn


def print_table(summary: Mapping[str, Any]) -> None:
    for group, found in summary["groups"].items():
        for arm, cells in found.items():
            line = "; ".join(
                f"{key} {e['mean']:.3g} [{e['low']:.3g}, {e['high']:.3g}]"
                for key, e in cells.items()
            )
            print(f"{group} ({cells[KEYS[0]]['n']}), {arm}: {line}")
    for arm, totals in summary["runs"].items():
        print(f"{arm}: {totals}")


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(cfg: DictConfig) -> None:
    attempt(perform, cfg)


def perform(cfg: DictConfig) -> None:
    if cfg.n_runs < 1 or min(cfg.n_policy, cfg.n_context, cfg.n_others) < 1:
        raise SettingError("n_runs, n_policy, n_context, n_others", 0, "whole numbers from 1 up")
    keep_memory()
    torch.set_num_threads(cfg.threads)
    lm = load(cfg.model, packaged=True)
    per_user, per_run = measure(cfg, lm)
    summary = summarise(per_user, per_run)
    folder = record(cfg, [*per_user, *per_run], summary, {"users": figure(summary)}, model=lm.name)
    print_table(summary)
    print(f"study: {folder}")


if __name__ == "__main__":
    sys.exit(entry(main))
