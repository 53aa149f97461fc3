"""Granularity of exact prefix reuse: page sizes and whole segments, on real requests.

python experiments/granularity/run.py --help
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HYDRA_FULL_ERROR"] = "1"  # errors arrive here whole, and leave as one line
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hydra
import numpy as np
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoConfig, AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from experiments.granularity import figures  # noqa: E402
from experiments.granularity.estimate import REFERENCE, estimates  # noqa: E402
from experiments.granularity.measure import (  # noqa: E402
    PARTS,
    SEGMENT_PAGE,
    Arm,
    Measured,
    PageArm,
    SegmentArm,
    distinct,
    measure,
)
from experiments.granularity.workloads import Served, Workload, load  # noqa: E402
from experiments.study import attempt, check_keys, entry, record  # noqa: E402
from kvsem.errors import DataError, SettingError  # noqa: E402
from kvsem.memory.prefix import MAX_PAGE_SIZE  # noqa: E402
from kvsem.packaged import packaged_path  # noqa: E402

WORKLOADS = ("service", "rag", "chat")


def check(cfg: DictConfig) -> None:
    """Raise `SettingError` for a setting that is unknown or out of range."""
    known = OmegaConf.to_container(OmegaConf.load(HERE / "config.yaml"))
    check_keys(cfg, dict.fromkeys(map(str, known or ())))
    check_keys(cfg.sizes, dict.fromkeys(WORKLOADS))
    for name in ("sessions", "repetitions"):
        _whole(name, cfg[name], 1)
    _whole("seed", cfg.seed, 0)
    for name in WORKLOADS:
        _whole(f"sizes.{name}", cfg.sizes[name], 1)
    if cfg.limit is not None:
        _whole("limit", cfg.limit, 1)
    _each("workloads", cfg.workloads, lambda w: w in WORKLOADS, ", ".join(WORKLOADS))
    _each("page_sizes", cfg.page_sizes, _is_size, f"whole numbers from 1 to {MAX_PAGE_SIZE}")
    if 16 not in cfg.page_sizes:
        raise SettingError("page_sizes", list(cfg.page_sizes), "16 among them")
    shares = cfg.pool_shares if len(cfg.pool_shares) else [0.5]
    _each("pool_shares", shares, _is_share, "shares above 0 and below 1")


def _whole(name: str, value: Any, low: int) -> None:
    if type(value) is not int or value < low:
        raise SettingError(name, value, f"a whole number from {low} up")


def _each(name: str, values: Any, fits: Callable[[Any], bool], allowed: str) -> None:
    listed = list(values) if OmegaConf.is_list(values) or isinstance(values, list) else []
    if not listed or len(set(listed)) < len(listed) or not all(map(fits, listed)):
        shown = listed if OmegaConf.is_list(values) else values
        raise SettingError(name, shown, f"a list out of {allowed}, each once")


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_PAGE_SIZE


def _is_share(value: Any) -> bool:
    return type(value) is float and 0 < value < 1


def arms_of(cfg: DictConfig, budgets: Mapping[str, int | None]) -> dict[str, Callable[[], Arm]]:
    """Arms by name and pool, each made anew by a call. With pages of one token no match can end
    inside one, so that there is one arm of them."""
    arms: dict[str, Callable[[], Arm]] = {}
    for pool, budget in budgets.items():
        for size in sorted(cfg.page_sizes):
            arms[f"page_{size}/{pool}"] = partial(PageArm, size, False, budget)
            if size > 1:
                arms[f"page_{size}_partial/{pool}"] = partial(PageArm, size, True, budget)
        arms[f"segment/{pool}"] = partial(SegmentArm, budget)
    return arms


def pools(cfg: DictConfig, requests: Sequence[Served], n_distinct: int) -> dict[str, int | None]:
    """Tokens of each pool, None without limit; never less than what any one request needs."""
    longest = max(len(r.ids) + SEGMENT_PAGE * len(r.ends) for r in requests)
    floor = longest + 2 * max(cfg.page_sizes)
    budgets: dict[str, int | None] = {"unlimited": None}
    for share in cfg.pool_shares:
        budgets[f"pool_{100 * share:g}"] = max(int(share * n_distinct), floor)
    return budgets


def study(cfg: DictConfig, console: Console) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary by workload, and one row by workload and arm with what its pool held at the end."""
    folder = packaged_path("smollm2")
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    token_nbytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    summary: dict[str, Any] = {"kv_bytes_per_token": token_nbytes, "workloads": {}}
    rows: list[dict[str, Any]] = []
    for name in cfg.workloads:
        with console.status(f"{name}: rendering"):
            workload = load(name, cfg, tokenizer)
        if not workload.requests:
            raise DataError(f"{name}: no request fits the model's context")
        found, ends = _one(name, workload, cfg, console)
        summary["workloads"][name] = found
        rows += [{"workload": name, **end} for end in ends]
    for row in rows:
        row["kv_bytes"] = row["held_slots"] * token_nbytes
        row["empty_kv_bytes"] = (row["held_slots"] - row["held_tokens"]) * token_nbytes
    return summary, rows


def _one(
    name: str, workload: Workload, cfg: DictConfig, console: Console
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    requests = workload.requests
    n_distinct = distinct(requests)
    budgets = pools(cfg, requests, n_distinct)
    arms = arms_of(cfg, budgets)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(f"{name}: requests", total=len(requests) * cfg.repetitions)
        measured = measure(requests, arms, cfg.repetitions, lambda: progress.advance(task))
    summary = {
        "n_requests": len(requests),
        "n_groups": len({request.group for request in requests}),
        "n_too_long": workload.n_too_long,
        "n_prompt_tokens": sum(request.n_prompt for request in requests),
        "n_tokens": sum(len(request.ids) for request in requests),
        "n_distinct_tokens": n_distinct,
        "pool_tokens": budgets,
        **estimates(measured, requests),
    }
    return summary, _rows(measured, requests)


def _rows(measured: Measured, requests: Sequence[Served]) -> list[dict[str, Any]]:
    """What each pool held; ``repeated_tokens``: held more than once (where nothing was evicted)."""
    rows = []
    n_prompt = sum(request.n_prompt for request in requests)  # times are of all of them together
    for a, arm in enumerate(measured.arms):
        name, _, pool = arm.partition("/")
        end = dict(measured.ends[arm])
        whole = name.startswith("page_") and not name.endswith("_partial")
        size = int(name.removeprefix("page_")) if whole else 1
        repeated = end["held_tokens"] - distinct(requests, size) if pool == "unlimited" else None
        hits = int(measured.counts[:, a, 0].sum())
        row: dict[str, Any] = {"arm": name, "pool": pool, **end, "repeated_tokens": repeated}
        row |= {"hit_tokens": hits, "hit_rate_by_tokens": round(hits / n_prompt, 5)}
        for part, seconds in zip(PARTS, measured.seconds[:, a].sum(axis=0), strict=True):
            row[f"{part}_us_per_1000_tokens"] = round(seconds * 1e9 / n_prompt, 2)
        quarters = np.array_split(measured.seconds[:, a, 0], 4)  # does it grow with what is held?
        row["match_us_by_quarter"] = [round(float(q.mean()) * 1e6, 2) for q in quarters if len(q)]
        rows.append(row)
    return rows


def table(summary: Mapping[str, Any]) -> list[str]:
    """A few lines for the terminal."""
    lines = []
    for name, found in summary["workloads"].items():
        lines.append(f"{name}: {found['n_requests']} requests, hit rate (95 % interval)")
        for arm, keys in found["arms"].items():
            hit, reference = keys["hit_rate"], f"{REFERENCE}/{arm.partition('/')[2]}"
            ratio = found["pairs"].get(f"{arm}-{reference}", {}).get("bookkeeping_ratio")
            text = f"  {arm:26} {hit['mean']:.3f} ({hit['low']:.3f} … {hit['high']:.3f})"
            lines.append(text + (f", {ratio['mean']:.2f} × bookkeeping" if ratio else ""))
    return lines


def perform(cfg: DictConfig) -> None:
    check(cfg)
    console = Console()
    summary, rows = study(cfg, console)
    drawn = {
        "hit_rate": figures.hit_rate(summary, cfg.page_sizes),
        "costs": figures.costs(summary, rows, cfg.page_sizes),
    }
    folder = record(cfg, rows, summary, drawn)
    for line in table(summary):
        console.print(line, highlight=False)
    console.print(f"written: {folder}", soft_wrap=True, highlight=False)


@hydra.main(version_base="1.3", config_path=str(HERE), config_name="config")
def main(cfg: DictConfig) -> None:
    attempt(perform, cfg)


if __name__ == "__main__":
    sys.exit(entry(main))
