"""Hydra's basic sweeper, except that a sweep goes on where it was.

Hydra takes sweepers from the namespace `hydra_plugins` only; that is why it lies here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from experiments.sweep import Job, failures, is_finished, jobs_of, sweep_folder
from kvsem.errors import KvsemError, SettingError

EXTRAS = {"processes": "joblib", "slurm": "slurm", "ray_tasks": "ray"}  # of the launchers


class ResumeSweeper(BasicSweeper):
    """Every combination of what is swept is a job in a folder of its own.

    Finished jobs are skipped, half-finished ones resume, failed ones run again. A job that fails
    does not end the sweep: all failures are listed last, and the exit code is 1.
    """

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        target = config.hydra.launcher._target_
        known = Plugins.instance().discover(Launcher)
        if target not in {f"{found.__module__}.{found.__name__}" for found in known}:
            name = config.hydra.runtime.choices["hydra/launcher"]
            extra = EXTRAS.get(name, name)
            allowed = f"a launcher that is installed (pip install -e '.[{extra}]' for this one)"
            raise SettingError("hydra/launcher", name, allowed)
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None
        assert self.hydra_context is not None
        loader = self.hydra_context.config_loader
        parser = OverridesParser.create(config_loader=loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        folder = sweep_folder(self.config.out)
        jobs = jobs_of(overrides, folder)
        # all are composed before one runs: a mistake in a name ends the sweep here
        configs = [loader.load_sweep_config(self.config, job.arguments) for job in jobs]
        left, refused = _left(jobs, configs)
        n_before = len(jobs) - len(left) - len(refused)
        print(
            f"sweep {folder}: {len(jobs)} jobs, {n_before} finished before, {len(left)} to run",
            flush=True,
        )
        returns = self._launch(left)
        failed = failures(jobs, refused)
        for line in failed:
            print(f"failed: {line}", file=sys.stderr)
        print(f"sweep {folder}: {len(jobs) - len(failed)} of {len(jobs)} jobs finished")
        if failed:
            print(f"the same command with out={folder} runs what is left", file=sys.stderr)
            sys.exit(1)
        return returns

    def _launch(self, left: Sequence[Job]) -> list[Any]:
        assert self.launcher is not None
        returns: list[Any] = []
        size = self.max_batch_size or max(len(left), 1)
        try:
            for batch in self.split_overrides_to_chunks([job.arguments for job in left], size):
                returns += self.launcher.launch(batch, initial_job_idx=len(returns))
        except Exception as error:  # a launcher's own, such as a worker that was killed
            print(f"launcher: {type(error).__name__}: {error}", file=sys.stderr)
        return returns


def _left(jobs: Sequence[Job], configs: Sequence[DictConfig]) -> tuple[list[Job], dict[Job, str]]:
    """The jobs to run, and those whose folder holds something else, with the reason."""
    left: list[Job] = []
    refused: dict[Job, str] = {}
    for job, cfg in zip(jobs, configs, strict=True):
        try:
            if not is_finished(job, cfg):
                left.append(job)
        except SettingError as error:
            refused[job] = str(error)
        except KvsemError:  # an arm that is wrong: the job says so itself
            left.append(job)
    return left, refused
