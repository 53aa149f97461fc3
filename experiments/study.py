"""What every study does alike: check its settings, and write a small folder to be read later."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.compose import one_line
from kvsem.environment import describe
from kvsem.errors import DataError, KvsemError, SettingError
from kvsem.plots import svg
from kvsem.results import RunDir, write_atomic

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
MISTAKES = (KvsemError, HydraException, OmegaConfBaseException)


def data_file(cfg: DictConfig, name: str) -> Path:
    """``name`` in the folder ``data`` of the settings, which is relative to the repository.

    Raises `DataError` where it is missing.
    """
    path = ROOT / str(cfg.data) / name
    if not path.is_file():
        raise DataError(f"{path} is missing: data=FOLDER with the public files of the study")
    return path


def check_keys(cfg: DictConfig, known: Mapping[str, Any]) -> None:
    """Raise `SettingError` for a setting that the study does not have."""
    for key in cfg:
        if str(key) not in known:
            raise SettingError(str(key), cfg[key], f"one of {', '.join(sorted(known))}")


def record(
    cfg: DictConfig,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    figures: Mapping[str, Figure],
    **env: Any,
) -> Path:
    """Write config, environment, rows, summary and figures; returns the folder."""
    kept = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in ("out", "data")])
    out = Path(cfg.out) if cfg.out is not None else None
    known = describe(ROOT, seed=cfg.seed, **env)
    with RunDir.create(
        out, ROOT / "runs", "study", config=OmegaConf.to_yaml(kept), env=known
    ) as run:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomic(run.path / "rows.jsonl", "".join(lines))
        run.write_summary(summary)
        for name, figure in figures.items():
            write_atomic(run.path / f"{name}.svg", svg(figure, name))
        (run.path / "samples.jsonl").unlink(missing_ok=True)
        return run.path


def attempt(perform: Callable[[DictConfig], None], cfg: DictConfig) -> None:
    """``perform(cfg)`` inside Hydra, which would print lines of its own about a mistake."""
    try:
        perform(cfg)
    except MISTAKES as error:
        print(f"error: {_mistake(error)}", file=sys.stderr)
        sys.exit(2)


def entry(main: Callable[[], None]) -> int:
    """Run a study; a user's mistake becomes one line and exit code 2."""
    warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)
    try:
        main()
    except MISTAKES as error:
        print(f"error: {_mistake(error)}", file=sys.stderr)
        return 2
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _mistake(error: BaseException) -> str:
    strange = re.search(r"Could not override '([^']+)'", str(error))
    return f"{strange[1]}: no setting of this study (see --help)" if strange else one_line(error)
