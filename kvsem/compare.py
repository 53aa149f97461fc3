"""Two runs on the same requests: paired differences, and what else differs between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from kvsem.errors import DataError, SettingError
from kvsem.report import columns_of, number, short
from kvsem.results import RunDir, load_run
from kvsem.summary import Row, bootstrap, cluster, comparable

MODEL = ("model", "namespace", "dtype")  # one factor: none of them changes alone
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """A run's rows by (request, arm), and the facts that hold for all of them."""

    path: str
    rows: Mapping[tuple[str, str], Row]
    facts: Mapping[str, Any]

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(arm for _, arm in self.rows))

    def requests(self, arm: str) -> set[str]:
        return {request for request, of in self.rows if of == arm}


@dataclass(frozen=True)
class Difference:
    """One key of one arm: means over the pairs, and ``difference`` = B − A with its interval."""

    arm: str
    key: str
    a: float
    b: float
    difference: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Comparison:
    """``differ`` {setting: {arm: [A's value, B's]}}, ``equal`` {setting: {arm: value}}."""

    a: str
    b: str
    n_shared: int
    n_only: tuple[int, int]
    n_clusters: int
    differences: tuple[Difference, ...]
    equal: Mapping[str, Mapping[str, Any]]
    differ: Mapping[str, Mapping[str, Sequence[Any]]]
    notes: tuple[str, ...]


def compare(
    a: Run,
    b: Run,
    arms: Sequence[str] = (),
    keys: Sequence[str] = (),
    anyway: bool = False,
) -> Comparison:
    """Arm by arm over the requests that both runs hold; no ``arms``: all that both have.

    Raises `DataError` where nothing is shared, and unless ``anyway`` where the models are not the
    same or the same ids stand for other prompts; `SettingError` for an unknown arm or key.
    """
    shared_arms = _shared_arms(a, b, arms)
    requests = _shared_requests(a, b, shared_arms)
    if not anyway:
        _check_same(a, b, shared_arms, requests)
    known = sorted(
        {k for row in a.rows.values() for k in row if "/" in k and isinstance(row[k], int | float)}
    )
    for key in keys:
        if key not in known:
            raise SettingError("--key", key, f"one of {', '.join(known)}")
    chosen = list(keys) or _default_keys(known)
    differences = [d for arm in shared_arms for d in _paired(a, b, arm, requests, chosen)]
    equal, differ = _settings(a, b, shared_arms)
    n_only = tuple(len({r for r, _ in run.rows} - set(requests)) for run in (a, b))
    return Comparison(
        a.path,
        b.path,
        len(requests),
        (n_only[0], n_only[1]),
        len(set(_groups(a, shared_arms[0], requests))),
        tuple(differences),
        equal,
        differ,
        tuple(_notes(a, b, shared_arms, requests, differ)),
    )


def read(path: str) -> Run:
    """A run's folder, to be compared; raises `DataError` where it holds no rows."""
    rows = {(row["request"], row["arm"]): row for row in RunDir.open(path).rows()}
    if not rows:
        raise DataError(f"{path}: no rows to pair (samples.jsonl is missing or empty)")
    data = load_run(path)
    workload = data.config.get("workload")
    if isinstance(workload, dict):  # how many of it, and when they were ingested, is in the rows
        workload = {k: v for k, v in workload.items() if k not in ("limit", "ingest")}
    facts = {
        "workload": workload,
        "hardware": data.env.get("gpu") or data.env.get("cpu"),
        "git_revision": data.env.get("git_revision"),
    }
    return Run(path, rows, {name: value for name, value in facts.items() if value is not None})


def _shared_arms(a: Run, b: Run, asked: Sequence[str]) -> list[str]:
    shared = [arm for arm in a.arms if arm in b.arms]
    if not shared:
        raise DataError(
            f"no arm is in both runs: {a.path} has {', '.join(a.arms)}; "
            f"{b.path} has {', '.join(b.arms)}"
        )
    for arm in asked:
        if arm not in shared:
            raise SettingError("--arm", arm, f"an arm of both runs: {', '.join(shared)}")
    return list(dict.fromkeys(asked)) or shared


def _shared_requests(a: Run, b: Run, arms: Sequence[str]) -> list[str]:
    """Requests that every compared arm of both runs has answered."""
    shared = set.intersection(*(run.requests(arm) for run in (a, b) for arm in arms))
    if not shared:
        raise DataError(f"{a.path} and {b.path} share no request: nothing can be paired")
    return sorted(shared)


def _check_same(a: Run, b: Run, arms: Sequence[str], requests: Sequence[str]) -> None:
    """The same model on the same prompts, or `DataError`."""
    for name in ("model", "namespace"):
        ours, theirs = (_values(run, arms, name) for run in (a, b))
        if ours and theirs and ours != theirs:  # old runs record no namespace
            found = f"{name} {', '.join(sorted(ours))} and {', '.join(sorted(theirs))}"
            raise DataError(f"the models differ ({found}); --anyway compares them all the same")
    for request in requests:
        lengths = [run.rows.get((request, "exact"), {}).get("n_tokens") for run in (a, b)]
        if None not in lengths and lengths[0] != lengths[1]:
            raise DataError(
                f"request {request!r} has {lengths[0]} tokens in {a.path} and {lengths[1]} in "
                f"{b.path}: the same id, another prompt; --anyway compares them all the same"
            )


def _values(run: Run, arms: Sequence[str], name: str) -> set[str]:
    found = (row.get("settings") or {} for (_, arm), row in run.rows.items() if arm in arms)
    return {str(settings[name]) for settings in found if name in settings}


# Differences ----------------------------------------------------------------------------------


def _paired(
    a: Run, b: Run, arm: str, requests: Sequence[str], keys: Sequence[str]
) -> Iterator[Difference]:
    """Only pairs with a value on both sides count, in the means too."""
    ours, theirs = (
        np.array([[_value(run.rows[request, arm], key) for key in keys] for request in requests])
        for run in (a, b)
    )
    change = theirs - ours
    low, high = bootstrap(change, _groups(a, arm, requests))
    for k, key in enumerate(keys):
        there = np.isfinite(change[:, k])
        if not there.any():
            continue
        mean = float(change[there, k].mean())
        yield Difference(
            arm,
            key,
            float(ours[there, k].mean()),
            float(theirs[there, k].mean()),
            mean,
            min(float(low[k]), mean),  # rounding, as in a summary
            max(float(high[k]), mean),
            int(there.sum()),
        )


def _groups(run: Run, arm: str, requests: Sequence[str]) -> list[str]:
    return [cluster(request, run.rows[request, arm].get("group")) for request in requests]


def _value(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else float("nan")


# Settings -------------------------------------------------------------------------------------


def _default_keys(known: Sequence[str]) -> list[str]:
    """Keys of the report's table: kvsem's own, then of metrics that it does not know."""
    return [c.key for c in columns_of({"arms": {"": dict.fromkeys(known)}})]


def _settings(
    a: Run, b: Run, arms: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, list[Any]]]]:
    """What is equal and what differs between the runs, arm by arm."""
    equal: dict[str, dict[str, Any]] = {}
    differ: dict[str, dict[str, list[Any]]] = {}
    for arm in arms:
        rows = [
            {"arm": side, "settings": {**run.facts, **(row.get("settings") or {})}}
            for side, run in (("A", a), ("B", b))
            for (_, of), row in run.rows.items()
            if of == arm
        ]
        found = comparable(rows)
        for name, value in found["equal"].items():
            equal.setdefault(name, {})[arm] = value
        for name, sides in (found["differ"] | found["mixed"]).items():
            differ.setdefault(name, {})[arm] = [sides["A"], sides["B"]]
    return equal, differ


def factors(differ: Mapping[str, Mapping[str, Any]], arm: str) -> list[str]:
    """The settings of ``arm`` that differ, the model's own counted as one; not those that one of
    the runs, being older, does not record."""
    names = [name for name, by_arm in differ.items() if arm in by_arm and None not in by_arm[arm]]
    return list(dict.fromkeys("model" if name in MODEL else name for name in names))


def _notes(
    a: Run,
    b: Run,
    arms: Sequence[str],
    requests: Sequence[str],
    differ: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    by_factors: dict[tuple[str, ...], list[str]] = {}
    for arm in arms:
        by_factors.setdefault(tuple(factors(differ, arm)), []).append(arm)
    for names, of in by_factors.items():
        if len(names) > 1:
            yield (
                f"{', '.join(of)}: {len(names)} settings differ ({', '.join(names)}), so that a "
                "difference has no single cause"
            )
    documents = len(set(_groups(a, arms[0], requests)))
    if documents < 2:
        yield "all pairs come from one document: the intervals say nothing"
    if {"threads", "hardware", "device"} & differ.keys():
        yield "times (cost/…_ms, cost/ttft_speedup) come from other machines or threads"
    for run in (a, b):
        if left := len({r for r, _ in run.rows} - set(requests)):
            yield f"{run.path}: {left} requests have no partner and are left out"


# Tables ---------------------------------------------------------------------------------------


def tables(found: Comparison) -> list[Table]:
    """The paired differences, and the settings that differ."""
    means = Table(box=None, pad_edge=False, title_justify="left")
    for name in ("arm", "key"):
        means.add_column(name, overflow="fold")
    for name in ("A", "B", "B − A", "95 % interval", "n"):
        means.add_column(name, justify="right")
    last = ""
    for d in found.differences:
        interval = f"{short(d.low)} … {short(d.high)}"
        values = (number(d.a), number(d.b), number(d.difference), interval, str(d.n))
        means.add_row(Text(d.arm if d.arm != last else ""), d.key, *values)
        last = d.arm
    means.caption = (
        f"paired over {found.n_shared} requests ({found.n_clusters} documents or requests drawn)"
    )
    means.caption_justify = "left"
    settings = Table(box=None, pad_edge=False)
    for name in ("differs", "arms", "A", "B"):
        settings.add_column(name, overflow="fold")
    for setting, by_arm in found.differ.items():
        for (of_a, of_b), arms in _grouped(by_arm):
            settings.add_row(setting, Text(", ".join(arms)), Text(of_a), Text(of_b))
    return [means, *([settings] if found.differ else [])]


def _grouped(by_arm: Mapping[str, Sequence[Any]]) -> list[tuple[tuple[str, str], list[str]]]:
    """Arms that differ in the same way, together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for arm, (of_a, of_b) in by_arm.items():
        groups.setdefault((_shown(of_a), _shown(of_b)), []).append(arm)
    return list(groups.items())


def _shown(value: Any) -> str:
    return "–" if value is None else str(value)
