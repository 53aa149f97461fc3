"""Files first; Weights & Biases as a mirror of a run that has been written."""

from __future__ import annotations

import json
import logging
import netrc
import numbers
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args
from urllib.parse import urlsplit

from kvsem.errors import SettingError
from kvsem.results import STATUS, RunData, RunDir, load_run

if TYPE_CHECKING:
    import wandb

Mode = Literal["online", "offline", "disabled"]
MODES: tuple[Mode, ...] = get_args(Mode)
log = logging.getLogger(__name__)


class Tracking(Protocol):
    def mirror(self, run: RunData) -> None:
        """Send a finished run elsewhere; may raise anything, `track` makes it one warning."""
        ...


@dataclass(frozen=True)
class NoTracking:
    """The run's folder is all there is."""

    def mirror(self, run: RunData) -> None:
        return None


@dataclass(frozen=True)
class WandbTracking:
    """One W&B run per run directory: summary, samples table, and the folder as an artifact.

    ``mode`` None: what WANDB_MODE says, else online with an API key and offline without one (sync
    later with ``wandb sync``). It never asks for a login. Offline files lie in ``<run>/wandb``.
    ``group`` None: the jobs of a sweep are a group of the sweep folder's name.
    """

    project: str = "kvsem"
    entity: str | None = None
    mode: Mode | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    init_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in MODES:
            raise SettingError("tracking.mode", self.mode, "online, offline, disabled or null")

    def mirror(self, run: RunData) -> None:
        remote = self._start(run)
        try:
            remote.summary.update(scalars(run.summary))
            remote.log({"samples": _table(run)})
            remote.log_artifact(_artifact(run))
        finally:
            remote.finish()

    def _start(self, run: RunData) -> wandb.Run:
        import wandb

        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_machine_info=True,
            init_timeout=self.init_timeout_s,
        )
        return wandb.init(
            project=self.project,
            entity=self.entity,
            name=run.path.name,
            dir=run.path,
            config={"config": run.config, "env": run.env},
            group=self.group or _sweep(run.path),
            tags=list(self.tags),
            mode=_mode(self.mode),
            reinit="create_new",  # a sweep's runs stay apart, also in one process
            settings=quiet,
        )


def track(run: RunDir | Path | str, tracking: Tracking) -> None:
    """Mirror a run whose files are written. A failure is one warning: the files are the record."""
    data = load_run(run.path if isinstance(run, RunDir) else run)
    try:
        tracking.mirror(data)
    except Exception as error:  # network, login, version: nothing of it concerns the run
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("tracking failed (%s); the run is complete in %s", reason, data.path)


def scalars(summary: Mapping[str, Any]) -> dict[str, float]:
    """The summary flat: ``epic/quality/kl_first_nats`` is the mean, ``…/low`` a bound of it."""
    flat: dict[str, float] = {}
    for arm, keys in summary["arms"].items():
        for key, entry in keys.items():
            for part, value in entry.items():
                name = f"{arm}/{key}" if part == "mean" else f"{arm}/{key}/{part}"
                flat[name] = value
    for arm, rates in summary.get("memory", {}).items():
        flat |= {f"{arm}/memory/{name}": rate for name, rate in rates.items()}
    return flat


def state() -> tuple[bool, str]:
    """Whether a run with ``tracking=wandb`` could start here, and how; asks nobody."""
    try:
        mode = _mode(None)
    except LookupError as error:
        return False, f"cannot log in: {error}"
    said = "WANDB_MODE says so" if os.environ.get("WANDB_MODE") in MODES else ""
    key = "there is an API key" if has_key() else "there is no API key, and nobody is asked for one"
    return True, f"wandb {version('wandb')}, {mode}: {said or key}"


def _mode(asked: Mode | None) -> Mode:
    """Decided before wandb starts: left to itself it asks for a login."""
    mode = asked or os.environ.get("WANDB_MODE")
    if mode == "online" and not has_key():
        raise LookupError("no W&B API key: set WANDB_API_KEY or run `wandb login` once")
    for known in MODES:
        if mode == known:
            return known
    return "online" if has_key() else "offline"


def _sweep(run: Path) -> str | None:
    """The name of the sweep that ``run`` is a job of."""
    return run.absolute().parent.name if (run / STATUS).exists() else None


def has_key() -> bool:
    """Whether W&B could log in without asking."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _table(run: RunData) -> wandb.Table:
    import wandb

    columns: list[str | int] = [str(column) for column in run.samples.columns]
    rows = run.samples.itertuples(index=False, name=None)
    cells: list[Iterable[Any]] = [[_cell(value) for value in row] for row in rows]
    return wandb.Table(columns=columns, data=cells, allow_mixed_types=True)


def _cell(value: Any) -> float | str | bool | None:
    if isinstance(value, dict | list):
        return json.dumps(value, default=str)
    if isinstance(value, str | bool):
        return value
    # pandas reads null as NaN
    return float(value) if isinstance(value, numbers.Real) and value == value else None


def _artifact(run: RunData) -> wandb.Artifact:
    import wandb

    parts = filter(None, (_sweep(run.path), run.path.name))
    name = re.sub(r"[^\w.-]+", "-", ".".join(parts), flags=re.ASCII)  # what W&B takes as a name
    artifact = wandb.Artifact(name[-128:], type="run")
    for path in sorted(run.path.rglob("*")):
        inside = path.relative_to(run.path)
        if path.is_file() and inside.parts[0] not in ("wandb", STATUS):  # it is not finished yet
            artifact.add_file(str(path), name=inside.as_posix())
    return artifact
