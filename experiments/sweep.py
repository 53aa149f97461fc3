"""Sweeps: one folder a job, named after what is swept, so that the same command goes on.

Hydra calls `hydra_plugins.resume_sweeper`; a job is an ordinary run with a status beside it.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from experiments.compose import MISTAKES, config_text, one_line
from kvsem.errors import SettingError
from kvsem.results import REUSABLE, read_status, unique_folder, write_status

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 120  # characters of a job's name; a file system takes 255 bytes
SECRET = "memory.salt"


@dataclass(frozen=True)
class Job:
    """One point of a sweep: its folder, every override but that, and those that are swept."""

    path: Path
    overrides: tuple[str, ...]
    swept: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        """The overrides of this job's run, which resumes where its folder holds one."""
        quoted = str(self.path).replace("\\", "\\\\").replace("'", "\\'")
        return [*self.overrides, f"out='{quoted}'"]


def job_name(swept: Mapping[str, str]) -> str:
    """``recompute_ratio=0.05,seed=1``; with a digest where a value cannot stand in a file name."""
    plain = ",".join(f"{key}={swept[key]}" for key in sorted(swept)) or "job"
    safe = re.sub(r"[^\w.,=+@-]+", "-", re.sub(r"[][{}'\"]", "", plain), flags=re.ASCII)
    if safe == plain and len(plain) <= LONGEST:
        return plain
    return f"{safe[:LONGEST]}-{sha256(plain.encode()).hexdigest()[:8]}"


def jobs_of(overrides: Sequence[Override], folder: Path) -> list[Job]:
    """Every job of the sweep, in Hydra's order; the same point twice is one job."""
    last = {str(override.get_key_element()): override for override in overrides}
    swept = {key.lstrip("+"): key for key, override in last.items() if override.is_sweep_override()}
    for key in (SECRET, "out"):
        if key in swept:
            raise SettingError(key, "…", "one value in a sweep")
    kept = [override for override in overrides if override.key_or_group != "out"]
    (points,) = BasicSweeper.split_arguments(kept, None)
    jobs: dict[Path, Job] = {}
    for point in points:
        values = dict(item.partition("=")[::2] for item in point)
        own = {name: values[key] for name, key in swept.items()}
        path = folder / job_name(own)
        jobs.setdefault(path, Job(path, tuple(point), tuple(f"{k}={v}" for k, v in own.items())))
    return list(jobs.values())


def sweep_folder(out: str | None) -> Path:
    """``out``, or a new folder under runs/. Raises `SettingError` where it cannot be one."""
    try:
        if out is None:
            return unique_folder(ROOT / "runs", "sweep")
        path = Path(out).absolute()
        if path.exists() and not path.is_dir():
            raise SettingError("out", out, "a folder")
        if (path / "config.yaml").exists():
            raise SettingError("out", out, "the folder of a sweep; this one is a run's")
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingError("out", out, f"a folder that can be written ({reason})") from error
    return path


def is_finished(job: Job, cfg: DictConfig) -> bool:
    """Whether nothing is left of it. Raises `SettingError` where its folder holds another run."""
    known = job.path / "config.yaml"
    if not known.is_file():
        return False
    if known.read_text(encoding="utf-8") != config_text(cfg):
        raise SettingError("out", str(job.path), REUSABLE)
    return bool(read_status(job.path).get("state") == "finished")


def attempt(perform: Callable[[DictConfig], None], cfg: DictConfig) -> None:
    """One job: ``perform(cfg)`` with its status beside it; its failure does not end the others."""
    path, overrides = Path(cfg.out), [str(o) for o in HydraConfig.get().overrides.task]
    shown = [hidden(o) for o in overrides if not o.startswith("out=")]
    write_status(path, "running", shown)
    print(f"job {path.name}", flush=True)
    try:
        perform(cfg)
    except MISTAKES as error:
        write_status(path, "failed", shown, error=one_line(error))
    except Exception as error:  # a mistake of ours, or memory: the traceback is kept, too
        line = f"{type(error).__name__}: {one_line(error)}"
        write_status(path, "failed", shown, error=line, traceback=traceback.format_exc())
    else:
        write_status(path, "finished", shown)
        return
    print(f"failed: {path.name} (the sweep goes on)", file=sys.stderr)


def hidden(override: str) -> str:
    """The override as a record may hold it."""
    key = override.partition("=")[0].lstrip("+")
    return f"{key}=set" if key == SECRET else override


def failures(jobs: Sequence[Job], refused: Mapping[Job, str]) -> list[str]:
    """One line for every job that is not finished: what is swept, and its error."""
    lines = []
    for job in jobs:
        status = read_status(job.path)
        if job in refused or status.get("state") != "finished":
            silent = "it ended without a word (killed?)" if status else "it was not started"
            error = refused.get(job) or status.get("error") or silent
            lines.append(f"{' '.join(job.swept) or job.path.name}: {error}")
    return lines
