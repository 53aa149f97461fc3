"""The experiment: several arms on the same requests, next to exact computation.

python experiments/run.py --help
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HYDRA_FULL_ERROR"] = "1"  # errors arrive here whole, and leave as one line

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from experiments.compose import (  # noqa: E402
    ALWAYS,
    MISTAKES,
    arm_config,
    check,
    config_text,
    describe_part,
    make,
    memory_settings,
    one_line,
)
from experiments.sweep import attempt  # noqa: E402
from kvsem.baselines import Baselines  # noqa: E402
from kvsem.diagnose import turn_notes  # noqa: E402
from kvsem.engine import Admit, Engine  # noqa: E402
from kvsem.environment import describe, keep_memory, versions  # noqa: E402
from kvsem.errors import DataError, SettingError  # noqa: E402
from kvsem.harness import Arm, Harness  # noqa: E402
from kvsem.packaged import cache_root  # noqa: E402
from kvsem.plots import write_plots  # noqa: E402
from kvsem.report import terminal_table, write_report  # noqa: E402
from kvsem.results import RunDir, summarise  # noqa: E402
from kvsem.tracking import track  # noqa: E402
from kvsem.types import Request  # noqa: E402

NEWS_S = 30.0  # between two lines of progress where there is no terminal
FLAGS = ("--multirun", "-m", "--help", "-h")
PARTS = ("chunker", "embedder", "index", "gate", "aligner", "recompute", "context")


class Experiment:
    """One run: everything that its configuration names, made and put together."""

    def __init__(self, cfg: DictConfig, console: Console) -> None:
        check(cfg)
        torch.set_num_threads(cfg.threads)
        self.cfg, self.console = cfg, console
        self.workload = make(cfg.workload, "workload")
        self.requests: list[Request] = list(self.workload)
        if not self.requests:
            raise DataError("the workload has no requests")
        self.configs = {name: arm_config(name, cfg) for name in cfg.arms if name not in ALWAYS}
        for arm in self.configs.values():
            memory_settings(arm.memory)  # a mistake is told before a model is loaded
        self._shared: dict[str, Any] = {}
        self.warned: list[str] = []  # while passages were ingested
        self.lm = make(cfg.model, "model")
        self.arms = [self._arm(name, arm) for name, arm in self.configs.items()]
        self.harness = self._harness()
        for request in self.requests:  # before anything is computed or written
            self.harness.check(request)
            if request.donors and not self.workload.ingest:
                raise SettingError("workload.ingest", False, "true: a donor has to be ingested")
        for context in (arm.engine.context for arm in self.arms):
            if self.workload.ingest:
                context.donors((), cfg.seed)  # one that nothing is ingested for says so here
            elif context.name == "filler_kv":
                raise SettingError("workload.ingest", False, "true: filler has to be ingested")

    def _arm(self, name: str, arm: DictConfig) -> Arm:
        parts = {part: self._part(part, arm[part]) for part in PARTS}
        admit: Admit = "none" if self.workload.ingest else arm.admit
        engine = Engine(
            self.lm,
            **parts,
            admit=admit,
            reuse=arm.reuse,
            memory=memory_settings(arm.memory),
            n_candidates=arm.n_candidates,
            surface_score=arm.surface_score,
            seed=self.cfg.seed,
        )
        settings = {part: describe_part(arm[part]) for part in PARTS}
        settings |= {"reuse": ", ".join(arm.reuse), "admit": admit}
        kept = {key: value for key, value in arm.memory.items() if key != "salt"}
        settings |= {f"memory.{key}": str(value) for key, value in kept.items()}
        return Arm(name, engine, tuple(arm.drop), settings, substitute=arm.substitute)

    def _part(self, name: str, cfg: DictConfig | None) -> Any:
        """Parts are made once per configuration: a model is loaded once for all arms."""
        key = f"{name}:{OmegaConf.to_yaml(cfg) if cfg is not None else None}"
        if key not in self._shared:
            self._shared[key] = make(cfg, name) if cfg is not None else None
        return self._shared[key]

    def _harness(self) -> Harness:
        metrics = [make(_metric(name), f"metric/{name}") for name in self.cfg.metrics]
        keep = self.cfg.baselines == "reuse"
        settings = {
            "model": self.lm.name,
            "namespace": self.lm.namespace()[:16],
            "dtype": str(self.lm.dtype).removeprefix("torch."),
            "device": str(self.lm.device),
            "threads": self.cfg.threads,
            "seed": self.cfg.seed,
            "ingest": self.workload.ingest,
            "versions": " ".join(f"{name} {number}" for name, number in versions().items()),
        }
        return Harness(
            self.lm,
            Engine(self.lm, reuse=(), admit="none"),
            self.arms,
            metrics,
            Baselines(cache_root() / "baselines") if keep else None,
            settings,
        )

    def digests(self) -> dict[str, Any]:
        """What identifies the model and the embedders by their bytes."""
        embedders = {arm.engine.vectors.embedder for arm in self.arms}
        identities = sorted(e.identity for e in embedders if e is not None)
        return {"model": self.lm.name, "namespace": self.lm.namespace(), "embedders": identities}

    # -- the run --------------------------------------------------------------------------------

    def run(self, run: RunDir) -> dict[str, Any]:
        """Rows, summary, plots and page into ``run``; returns the summary."""
        names = [*(a.name for a in self.harness.exact), *(a.name for a in self.arms)]
        finished = run.finished()
        left = [r for r in self.requests if any((r.id, n) not in finished for n in names)]
        if finished and not self.workload.ingest and left:
            raise SettingError(
                "out", str(run.path), "a new folder: a cache that fills cannot resume"
            )
        for arm in self.arms:
            arm.engine.vectors.warm_up()  # a model's first use is nobody's build or store time
        with _progress(self.console) as progress:
            if self.workload.ingest and left:
                with _kept(self.warned):
                    self._ingest(progress)
            if left:
                self.harness.warm_up(self.requests[0])
                task = progress.add_task("requests", total=len(left))
            news = time.monotonic()
            with _settled():
                for done, rows in enumerate(self.harness.run(left), start=1):
                    for row in rows:
                        if (row["request"], row["arm"]) not in finished:
                            run.append(row)
                    progress.advance(task)
                    if not self.console.is_terminal and time.monotonic() - news > NEWS_S:
                        news = time.monotonic()
                        self.console.print(f"request {done} of {len(left)}")
        build_ms, notes = self._build_ms(), self.warned
        if not left:
            build_ms, notes = _before(run.path)
        rows = list(run.rows())
        status = self._status(rows)
        status["notes"] = list(dict.fromkeys([*notes, *status["notes"]]))
        summary = summarise(rows, build_ms, self._support(), status)
        run.write_summary(summary)
        return summary

    def _ingest(self, progress: Progress) -> None:
        """Each different way of building is built once; arms that agree share the entries."""
        built: dict[str, Arm] = {}
        for arm in self.arms:
            config = self.configs[arm.name]
            same = ("chunker", "embedder", "index", "context", "memory", "reuse")
            key = OmegaConf.to_yaml(OmegaConf.masked_copy(config, list(same)))
            if key in built and config.memory.pool_tokens is None:
                arm.engine.share(built[key].engine)
                arm.build_ms = built[key].build_ms
                continue
            start = time.perf_counter()
            for tenant in dict.fromkeys(r.tenant for r in self.requests):
                mine = [r for r in self.requests if r.tenant == tenant]
                name = f"ingest ({arm.engine.context.name})"
                arm.engine.ingest(mine, track=partial(progress.track, description=name))
            arm.build_ms = (time.perf_counter() - start) * 1e3
            built[key] = arm

    def _build_ms(self) -> dict[str, float]:
        return {arm.name: arm.build_ms for arm in self.arms if arm.build_ms}

    def _support(self) -> dict[str, dict[str, Any]]:
        return {n: {"ok": ok, "reason": reason} for n, (ok, reason) in self.lm.support.items()}

    def _status(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        notes = []
        for arm in self.arms:
            own = [row for row in rows if row["arm"] == arm.name]
            if own and not any(row["reuse/matched_tokens"] for row in own):
                notes.append(f"{arm.name} reused nothing: its rows are exact computation")
        if len({row["group"] or row["request"] for row in rows}) < 2:
            notes.append("all rows come from one document: the intervals say nothing")
        notes += turn_notes(self.lm.tokenizer, self.requests)
        n_earlier = sum(
            row["arm"] == "exact" and row.get("from_earlier_run", False) for row in rows
        )
        if n_earlier:
            notes.append(
                f"exact's answers and times of {n_earlier} requests come from an "
                "earlier run on this machine (baselines=measure measures them anew, interleaved)"
            )
        for arm in self.arms:
            broken = arm.engine.store.n_not_finite + arm.engine.memory.n_not_finite
            if broken:
                notes.append(f"{arm.name}: KV of {broken} entries or prompts was not finite")
        off = [name for name in ("moved_chunk", "blend") if not self.lm.support[name][0]]
        for name in off:
            notes.append(f"{name} is off: {self.lm.support[name][1]}; only exact prefix is reused")
        return {"state": "finished", "n_requests": len(self.requests), "notes": notes}


def _before(run: Path) -> tuple[dict[str, float], list[str]]:
    """Build times and notes of a run that is summarised again with nothing left to do."""
    key = "cost/build_ms"
    try:
        found = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        built = {name: keys[key]["mean"] for name, keys in found["arms"].items() if key in keys}
        return built, list(found["status"]["notes"])
    except (OSError, ValueError, KeyError):
        return {}, []


@contextmanager
def _settled() -> Iterator[None]:
    """What is there by now is left out of garbage collections: a full one takes as long as a
    selective prefill, and would fall on whichever arm is at work."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _kept(notes: list[str]) -> Iterator[None]:
    """Warnings are shown, and kept in ``notes`` for the record."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def keep(message: Warning | str, *more: Any, **named: Any) -> None:
            notes.append(str(message))
            show(message, *more, **named)

        warnings.showwarning = keep
        yield


def _metric(name: str) -> DictConfig:
    metric: DictConfig = hydra.compose(f"metric/{name}").metric
    return metric


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)


def _folder(cfg: DictConfig, experiment: Experiment) -> RunDir:
    """The run's folder, with what the run is made of: configuration and environment."""
    out = Path(cfg.out) if cfg.out is not None else None
    env = describe(ROOT, seed=cfg.seed, **experiment.digests())
    try:
        return RunDir.create(out, ROOT / "runs", "run", config=config_text(cfg), env=env)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingError("out", str(out), f"a folder that can be written ({reason})") from error


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="run")
def main(cfg: DictConfig) -> None:
    if HydraConfig.get().mode == RunMode.MULTIRUN and cfg.out is not None:
        attempt(perform, cfg)
        return
    try:
        perform(cfg)
    except MISTAKES as error:  # caught here too: Hydra prints its own lines about a failed job
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


def perform(cfg: DictConfig) -> None:
    """One run, from its configuration to its page."""
    keep_memory()
    console = Console()
    if not console.is_terminal:
        console.width = 100
    tracking = make(cfg.tracking, "tracking")
    experiment = Experiment(cfg, console)
    with _folder(cfg, experiment) as run:
        summary = experiment.run(run)
        write_plots(run)
        page = write_report(run)
        track(run, tracking)
    console.print(terminal_table(summary))
    for note in summary["status"]["notes"]:
        if note not in experiment.warned:  # said when it happened
            console.print(f"note: {note}")
    console.print(f"report: {page}", soft_wrap=True)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"note: {message}", file=sys.stderr)


def entry(arguments: Sequence[str] | None = None) -> int:
    """Run, and turn a user's mistake into one line and exit code 2."""

    warnings.showwarning = _warn
    given = sys.argv[1:] if arguments is None else list(arguments)
    # Hydra takes a setting ahead of a flag, or behind it, but not both
    sys.argv[1:] = sorted(given, key=lambda argument: argument not in FLAGS)
    try:
        main()
    except MISTAKES as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except SystemExit as stop:
        return int(stop.code or 0)
    except KeyboardInterrupt:
        print("stopped; the same command with out=FOLDER goes on where it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(entry())
