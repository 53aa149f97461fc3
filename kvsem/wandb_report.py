"""A W&B Report of runs: means with intervals from their files, panels over their W&B runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvsem.errors import KvsemError, SettingError, one_line
from kvsem.report import Column, columns_of, number, short
from kvsem.results import RunData
from kvsem.summary import BASELINES
from kvsem.tracking import has_key

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import Report

MAX_TITLE = 128  # W&B's own limit
KL, FLOPS = "quality/kl_first_nats", "cost/flop_ratio"
INTRODUCTION = (
    "Every arm ran on the same requests as exact computation. Means with 95 % bootstrap intervals; "
    "quality is the distance from exact, never without its cost. The tables below come from the "
    "runs' own files; the panels show what was mirrored to W&B."
)


def build(
    runs: Sequence[RunData], project: str, entity: str | None = None, title: str | None = None
) -> Report:
    """The report, not sent: nothing here asks a network unless ``entity`` is None.

    The runs must be mirrored (``tracking=wandb``) into the same ``project``, under their folders'
    names. Raises `KvsemError` without wandb-workspaces, `SettingError` for a title too long.
    """
    wr = _library()
    if title and len(title) > MAX_TITLE:
        raise SettingError("--title", title, f"at most {MAX_TITLE} characters")
    title = title or f"kvsem: {', '.join(run.path.name for run in runs)}"[:MAX_TITLE]
    where = {"project": project} | ({} if entity is None else {"entity": entity})
    runset = wr.Runset(name="kvsem runs", filters=_named([run.path.name for run in runs]))
    report: Report = wr.Report(
        **where,
        title=title,
        description=", ".join(_model_of(run) for run in runs)[:200],
        width="fluid",
        blocks=[
            wr.TableOfContents(),
            wr.MarkdownBlock(text=INTRODUCTION),
            *(block for run in runs for block in _of_run(wr, run)),
            wr.H1(text="Panels"),
            wr.PanelGrid(runsets=[runset], panels=list(_panels(wr, runs))),
            wr.H1(text="Settings"),
            wr.PanelGrid(runsets=[runset], panels=[wr.RunComparer(diff_only=True)]),
        ],
    )
    return report


def specification(report: Report) -> dict[str, Any]:
    """What `send` would send, as plain data."""
    model = report._to_model()  # type: ignore[no-untyped-call]
    spec: dict[str, Any] = json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True))
    return {
        "entity": report.entity,
        "project": report.project,
        "title": report.title,
        "description": report.description,
        "spec": spec,
    }


def send(report: Report) -> str:
    """Save it at W&B; returns its address. Raises `KvsemError` in one line, and never asks for a
    login."""
    check_key()
    try:
        report.save()
        return str(report.url)
    except Exception as error:  # network, rights, version
        raise KvsemError(f"W&B did not take the report: {one_line(error)}") from error


def check_key() -> None:
    if not has_key():
        raise KvsemError(
            "no W&B API key: set WANDB_API_KEY or run `wandb login` once (--dry-run needs none)"
        )


def _library() -> Any:
    with warnings.catch_warnings():  # it still uses pydantic's old validators
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            import wandb_workspaces.reports.v2 as wr
        except ImportError as error:
            raise KvsemError("wandb-workspaces is missing: pip install 'kvsem[report]'") from error
    return wr


def _named(names: Sequence[str]) -> str:
    """A filter for W&B runs of these names.

    The library rewrites ``=``, ``<`` and ``>`` even inside quotes, and folders are called such
    as ``ratio=0.3``: everything but plain characters is written as an escape.
    """

    def quoted(name: str) -> str:
        plain = (c if c.isascii() and (c.isalnum() or c in "-_.") else _escape(c) for c in name)
        return f"'{''.join(plain)}'"

    return f"Metric('Name') in [{', '.join(map(quoted, names))}]"


def _escape(character: str) -> str:
    return f"\\U{ord(character):08x}"


# Blocks ---------------------------------------------------------------------------------------


def _of_run(wr: Any, run: RunData) -> Iterator[Any]:
    """Heading, what was run on what, the table of arms, and the run's own notes."""
    yield wr.H1(text=run.path.name)
    hardware = run.env.get("gpu") or run.env.get("cpu") or "unknown hardware"
    n = run.summary.get("status", {}).get("n_requests", "?")
    yield wr.P(text=f"{_model_of(run)}, {n} requests, {hardware}, {run.env.get('threads')} threads")
    yield wr.MarkdownBlock(text=markdown(run.summary))
    notes = run.summary.get("status", {}).get("notes", [])
    support = run.summary.get("support", {})
    notes = [*notes, *(f"{k} is off: {v['reason']}" for k, v in support.items() if not v["ok"])]
    if notes:
        yield wr.UnorderedList(items=[str(note) for note in notes])


def _model_of(run: RunData) -> str:
    model, workload = run.config.get("model"), run.config.get("workload")
    name = model.get("name") if isinstance(model, dict) else model
    target = str(workload.get("_target_", "")) if isinstance(workload, dict) else str(workload)
    return f"{name} on {target.rpartition('.')[2] or 'an unnamed workload'}"


def markdown(summary: Mapping[str, Any]) -> str:
    """One row per arm: n, then mean (low … high) of each column that any arm has."""
    arms = list(summary["arms"])
    columns = columns_of(summary)
    head = ["arm", "n", *(f"{column.title} ({column.unit})" for column in columns)]
    lines = [_row(head), _row(["---"] * len(head))]
    for arm in arms:
        cells = [_cell(summary, arm, column) for column in columns]
        n = max((cell["n"] for cell in cells if cell), default=0)
        lines.append(_row([f"`{arm}`", str(n), *(_text(cell, n) for cell in cells)]))
    return "\n".join(lines)


def _cell(summary: Mapping[str, Any], arm: str, column: Column) -> Mapping[str, Any] | None:
    source = summary["pairs"].get(f"{arm}-exact", {}) if column.to_exact else summary["arms"][arm]
    cell: Mapping[str, Any] | None = source.get(column.key)
    return cell


def _text(cell: Mapping[str, Any] | None, n: int) -> str:
    if not cell:
        return "–"
    own = f", n={cell['n']}" if cell["n"] != n else ""
    return f"{number(cell['mean'])} ({short(cell['low'])} … {short(cell['high'])}{own})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# Panels ---------------------------------------------------------------------------------------


def _panels(wr: Any, runs: Sequence[RunData]) -> Iterator[Any]:
    """Bars of every arm for each key; distance against cost of every arm over the runs."""
    arms = list(dict.fromkeys(arm for run in runs for arm in run.arms))
    summaries = [run.summary for run in runs]
    keys = {key for summary in summaries for found in summary["arms"].values() for key in found}
    for column in (column for column in columns_of(*summaries) if not column.to_exact):
        metrics = [f"{arm}/{column.key}" for arm in arms]
        title = f"{column.title} ({column.unit})"
        yield wr.BarPlot(title=title, metrics=metrics, layout=wr.Layout(w=12, h=8))
    for arm in (arm for arm in arms if arm not in BASELINES and {KL, FLOPS} <= keys):
        x, y = (wr.SummaryMetric(name=f"{arm}/{key}") for key in (FLOPS, KL))
        yield wr.ScatterPlot(title=f"{arm}: KL first against FLOP ratio", x=x, y=y)
    yield wr.WeavePanelSummaryTable(table_name="samples", layout=wr.Layout(w=24, h=10))
