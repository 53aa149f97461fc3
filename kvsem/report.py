"""A run's HTML page and terminal table: no quality without cost, no mean without n and interval."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from kvsem.plots import FIGURES, is_empty, svg
from kvsem.results import RunData, RunDir, load_run, write_atomic
from kvsem.summary import BASELINES, CONTROLS

NLL = "quality/answer_nll_nats"
FEW_DOCUMENTS = 10


@dataclass(frozen=True)
class Column:
    """``key`` of an arm's summary, or of its paired difference to exact."""

    key: str
    title: str
    unit: str
    to_exact: bool = False
    in_terminal: bool = True


COLUMNS = (
    Column("quality/kl_first_nats", "KL first", "nats"),
    Column("quality/kl_nats", "KL 16", "nats, 16 tokens", in_terminal=False),
    Column("quality/top1_agreement", "top-1", "agreement"),
    Column("quality/f1", "F1", "answers"),
    Column(NLL, "Δ NLL", "nats per token, arm − exact", to_exact=True),
    Column("cost/flop_ratio", "FLOP ratio", "arm ÷ exact"),
    Column("cost/ttft_speedup", "speed-up", "of TTFT, ×"),
    Column("reuse/hit_rate", "hit rate", "of cacheable", in_terminal=False),
    Column("reuse/recomputed_tokens", "recomputed", "tokens", in_terminal=False),
)
# of kvsem's own metrics: in the rows and the summary only, so that the table fits
NOT_SHOWN = (
    "quality/perplexity_ratio",
    "quality/exact_match_greedy",
    "quality/f1_exact_arm",
    "quality/kv_error_rel",
)
EXPLAINED = {
    "exact": "computes the whole prompt; every other arm is compared with it.",
    "exact_again": "exact once more: what it differs by is noise.",
    "zero_kv": "reused keys and values are zero: what survives this did not need the cache.",
    "random_kv": "reused keys and values are noise of the right size: the worst that reuse can do.",
    "filler_kv": "reused keys and values come from unrelated text of the same length.",
    "substitute": "the donor itself stands in the prompt: what reading it instead costs.",
    "no_context": "the question without its passages: what the model knows anyway.",
    "none": "reuses everything that matches and recomputes nothing.",
    "all": "matches, then recomputes everything: must agree with exact, and cost as much.",
    "random": "recomputes tokens drawn at random: what a choice of tokens has to beat.",
    "epic": "recomputes the first tokens of every chunk.",
    "cacheblend": "recomputes two layers, and above them the tokens whose values deviated most.",
    "prefix": "reuses exact prefix pages only.",
}
COUNTS = {
    "reuse/refused": ("Refused candidates", "No candidate was refused."),
    "reuse/missed": ("What was not found, and why", "Everything was found."),
    "memory/evicted": ("Evictions", "Nothing was evicted."),
}
GAUGES = (
    "memory/pages_free",
    "memory/pages_active",
    "memory/pages_cached",
    "memory/utilisation",
    "memory/pool_utilisation",
)
CAPTIONS = {
    "quality_against_cost": "Distance from exact against cost, counted (left) and timed (right).",
    "kl_per_request": "The same requests under every arm, in the order of their means.",
    "provenance": "Where each prompt token's keys and values came from.",
    "kv_error_per_layer": "How far keys and values are from exact's, through the layers.",
}


def write_report(run: RunDir | Path | str) -> Path:
    """Write ``report.html`` into the run directory: one file, no script, nothing from outside."""
    data = load_run(run.path if isinstance(run, RunDir) else run)
    source = files("kvsem").joinpath("report.html.j2").read_text(encoding="utf-8")
    page = _jinja().from_string(source).render(**_content(data))
    write_atomic(data.path / "report.html", page)
    return data.path / "report.html"


def columns_of(*summaries: Mapping[str, Any]) -> list[Column]:
    """The columns that any arm has a value for; a metric of one's own stands behind kvsem's."""
    keys = dict.fromkeys(key for s in summaries for found in s["arms"].values() for key in found)
    named = {column.key for column in COLUMNS} | {*NOT_SHOWN}
    own = [key for key in keys if key.startswith("quality/") and key not in named]
    columns = [column for column in COLUMNS if column.key in keys]
    at = sum(column.key.startswith("quality/") for column in columns)
    columns[at:at] = [Column(key, key.partition("/")[2], "own metric") for key in own]
    return columns


def terminal_table(summary: Mapping[str, Any]) -> Table:
    """Mean and interval of each arm, within 100 columns."""
    columns = [column for column in columns_of(summary) if column.in_terminal]
    table = Table(box=None, pad_edge=False, collapse_padding=True, caption_justify="left")
    table.add_column("arm", overflow="fold", max_width=14)
    table.add_column("n", justify="right")
    for column in columns:
        table.add_column(Text(column.title), justify="right", overflow="fold")
    for arm in summary["arms"]:
        n, cells = _n(summary, arm), _cells(summary, arm, columns)
        table.add_row(Text(arm), str(n), *(_two_lines(cell, n) for cell in cells))
    table.caption = "mean over n requests; below it its 95 % bootstrap interval"
    return table


def _two_lines(estimate: Mapping[str, Any] | None, n: int) -> Text:
    if estimate is None:
        return Text("–\n")
    own = f" n={estimate['n']}" if estimate["n"] != n else ""
    interval = f"{short(estimate['low'])}..{short(estimate['high'])}"
    return Text.assemble(number(estimate["mean"]), own, "\n", (interval, "dim"))


def number(value: float) -> str:
    """Three significant digits, without a padded exponent."""
    return _digits(value, 3)


def short(value: float) -> str:
    """Two significant digits, one where it takes an exponent: an interval has two of these."""
    return _digits(value, 2 if abs(value) >= 1e-4 else 1)


def _digits(value: float, digits: int) -> str:
    if abs(value) >= 10**digits:
        return f"{value:.0f}"
    return re.sub(r"e-0*", "e-", f"{value:.{digits}g}")


def _n(summary: Mapping[str, Any], arm: str) -> int:
    """Requests of the arm: the most that any of its means covers."""
    estimates = (e for key, e in summary["arms"][arm].items() if "n" in e)
    return max((int(e["n"]) for e in estimates), default=0)


def _cells(
    summary: Mapping[str, Any], arm: str, columns: list[Column]
) -> list[Mapping[str, Any] | None]:
    pair = summary["pairs"].get(f"{arm}-exact", {})
    own = summary["arms"][arm]
    return [(pair if column.to_exact else own).get(column.key) for column in columns]


def _content(run: RunData) -> dict[str, Any]:
    """Everything that the page shows."""
    summary, status = run.summary, run.summary["status"]
    settings = status.get("settings") or {}
    documents, n = status.get("n_clusters"), run.samples["request"].nunique() if run.arms else 0
    return {
        "title": f"kvsem run {run.path.resolve().name}",
        "lead": _lead(run, n),
        "state": status.get("state", "finished"),
        "notes": [*status.get("notes", []), *_few(documents)],
        "facts": list(_facts(run, settings.get("equal", {}))),
        "arms": run.arms,
        "columns": columns_of(summary),
        "sections": _sections(summary),
        "recovered": _recovered(summary),
        "clustered": f", clustered by {documents} documents" if documents not in (None, n) else "",
        "explained": [(arm, EXPLAINED[arm]) for arm in run.arms if arm in EXPLAINED],
        "figures": _figures(run) if run.arms else [],
        "differ": list(settings.get("differ", {}).items()),
        "mixed": list(settings.get("mixed", {}).items()),
        "equal": list(settings.get("equal", {}).items()),
        "support": list(summary["support"].items()),
        "memory": _memory(summary),
        "counts": [_counts(summary, key, *texts) for key, texts in COUNTS.items()],
        "gaps": list(_gaps(status)),
        "env": list(_flat(run.env)),
        "config": list(_flat(run.config)),
    }


def _few(documents: int | None) -> list[str]:
    """A bootstrap over few clusters understates the spread; over one it has no width at all."""
    if documents is None or documents >= FEW_DOCUMENTS:
        return []
    return [f"Intervals are drawn over only {documents} documents, so they are too narrow."]


def _lead(run: RunData, n: int) -> str:
    methods = [arm for arm in run.arms if arm not in (*BASELINES, *CONTROLS)]
    model, workload = _named(run.config.get("model")), _named(run.config.get("workload"))
    return f"{', '.join(methods) or 'exact'} on {workload}, {n} requests, with {model}."


def _facts(run: RunData, equal: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a reader needs to place the numbers; whatever is not recorded is left out."""
    workload = run.config.get("workload")
    hardware = run.env.get("gpu") or run.env.get("cpu")
    versions = run.env.get("versions")
    found = {
        "model": equal.get("model") or _named(run.config.get("model")),
        "dtype": equal.get("dtype"),
        "workload": _listed(workload) if isinstance(workload, dict) else workload,
        "context": equal.get("context"),
        "hardware": _listed(hardware) if isinstance(hardware, dict) else hardware,
        "threads": run.env.get("threads", equal.get("threads")),
        "seed": equal.get("seed", run.config.get("seed")),
        "versions": _listed(versions) if isinstance(versions, dict) else versions,
    }
    return ((name, value) for name, value in found.items() if value is not None)


def _named(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value) if value is not None else "an unnamed one"
    return str(value.get("name") or value.get("_target_", "an unnamed one").rpartition(".")[2])


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {setting(value)}" for name, value in _flat(values) if name != "_target_"
    )


def _sections(summary: Mapping[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Exact, methods and controls apart, so that a control is never taken for a method."""
    kinds: dict[str, list[dict[str, Any]]] = {"exact": [], "methods": [], "controls": []}
    for arm in summary["arms"]:
        kind = "exact" if arm in BASELINES else "controls" if arm in CONTROLS else "methods"
        cells = _cells(summary, arm, columns_of(summary))
        kinds[kind].append({"name": arm, "n": _n(summary, arm), "cells": cells})
    return [(kind, members) for kind, members in kinds.items() if members]


def _recovered(summary: Mapping[str, Any]) -> dict[str, Any]:
    """PGR, a row for each arm and a column for each key; no rows where the run has none."""
    pgr = summary.get("pgr") or {}
    keys = list(dict.fromkeys(key for found in pgr.values() for key in found))
    rows = [(arm, _n(summary, arm), [pgr[arm].get(key) for key in keys]) for arm in pgr]
    titles = {column.key: column.title.removeprefix("Δ ") for column in COLUMNS}
    return {"titles": [titles.get(key, key) for key in keys], "rows": rows}


def _figures(run: RunData) -> list[dict[str, Any]]:
    """Figures with their captions; ``svg`` None where nothing is above zero to be drawn."""
    figures = []
    for name, draw in FIGURES.items():
        figure, caption = draw(run), CAPTIONS[name]
        picture = None if is_empty(figure) else Markup(inline(svg(figure, name), caption))
        figures.append({"svg": picture, "caption": caption})
    return figures


def inline(text: str, label: str) -> str:
    """An SVG file's text for use inside HTML: no prolog, metadata, namespaces or unused ids."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    used = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r'\sid="([^"]*)"', lambda m: m[0] if m[1] in used else "", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _counts(summary: Mapping[str, Any], key: str, title: str, none: str) -> dict[str, Any]:
    """Counts by reason, a row each, of the arms that have any."""
    by_arm = {arm: keys[key] for arm, keys in summary["arms"].items() if keys.get(key)}
    reasons = sorted({reason for counts in by_arm.values() for reason in counts})
    rows = [(r, {arm: counts.get(r, 0) for arm, counts in by_arm.items()}) for r in reasons]
    return {"title": title, "none": none, "arms": list(by_arm), "rows": rows}


def _memory(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Hit rates and the state of the pool, a row each, of the arms that reuse."""
    hits = {a: h for a, h in summary.get("memory", {}).items() if a not in BASELINES}
    rates = list(dict.fromkeys(name for found in hits.values() for name in found))
    rows = [
        (name.replace("_", " ").replace("/", ": "), {a: h[name] for a, h in hits.items()})
        for name in rates
    ]
    for key in GAUGES:
        means = {a: summary["arms"][a][key]["mean"] for a in hits if key in summary["arms"][a]}
        if means:
            rows.append((key.removeprefix("memory/").replace("_", " "), means))
    return {"arms": list(hits), "rows": rows}


def _gaps(status: Mapping[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    missing, broken = status.get("missing", {}), status.get("non_finite", {})
    for arm in {**missing, **broken}:
        for key in {**missing.get(arm, {}), **broken.get(arm, {})}:
            yield arm, key, missing.get(arm, {}).get(key, 0), broken.get(arm, {}).get(key, 0)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def setting(value: Any) -> str:
    return "–" if value is None else str(value)


def _jinja() -> Environment:
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    jinja.filters |= {"number": number, "short": short, "setting": setting}
    return jinja
