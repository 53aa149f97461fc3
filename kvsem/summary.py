"""From rows to means with intervals: per arm, and of the paired difference of every two arms."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsem.errors import DataError
from kvsem.intervals import Floats, bootstrap
from kvsem.pgr import gap_recovered

__all__ = ["Floats", "Row", "bootstrap", "cluster", "comparable", "summarise"]

Row = dict[str, Any]

EXACT_ONLY = ("cost/plain_ms", "cost/exact_over_plain")  # no other arm has them
BASELINES = ("exact", "exact_again")
CONTROLS = ("zero_kv", "random_kv", "filler_kv", "substitute", "no_context")
BUILD = "cost/build_ms"


def summarise(
    rows: Iterable[Row],
    build_ms: Mapping[str, float],
    support: Mapping[str, Any],
    status: Mapping[str, Any],
) -> dict[str, Any]:
    """Means with 95 % intervals per arm, and of the paired difference of every two arms; PGR where
    the run has both ends of it.

    Missing and non-finite values are left out and counted in ``status``, which also says which
    settings are equal in all arms and which differ.
    """
    rows = list(rows)
    table = _Table.of(rows)
    arms = {arm: _estimates(table.values[:, a], table) for a, arm in enumerate(table.arms)}
    for arm, value in build_ms.items():
        if arm in arms and math.isfinite(value):
            arms[arm][BUILD] = {"mean": value, "median": value, "low": value, "high": value, "n": 1}
    for arm, counted in _counted(rows).items():
        arms[arm].update(counted)
    pgr, doubts = gap_recovered(table.values, table.arms, table.keys, table.groups)
    if doubts:
        status = {**status, "notes": [*status.get("notes", []), *doubts]}
    return {
        "arms": arms,
        "pairs": _pairs(table),
        **({"pgr": pgr} if {"exact", "no_context"} <= {*table.arms} else {}),
        "memory": {arm: _hits([r for r in rows if r["arm"] == arm]) for arm in table.arms},
        "support": dict(support),
        "status": {**status, **table.gaps(), "settings": comparable(rows)},
    }


def comparable(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Settings of the arms: ``equal`` {name: value}, ``differ`` {name: {arm: value}}.

    ``mixed`` {name: {arm: [values]}} holds those that are not even equal within one arm. A
    setting that exact has no value for (it reuses nothing) is compared among the other arms.
    """
    seen: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    arms: dict[str, None] = {}
    for row in rows:
        arms[row["arm"]] = None
        for name, value in (row.get("settings") or {}).items():
            seen[name][row["arm"]][json.dumps(value, sort_keys=True, default=str)] = value
    found: dict[str, dict[str, Any]] = {"equal": {}, "differ": {}, "mixed": {}}
    for name, by_arm in seen.items():
        absent = [arm for arm in BASELINES if arm not in by_arm]
        values = {a: list(by_arm[a].values()) or [None] for a in arms if a not in absent}
        if any(len(several) > 1 for several in values.values()):
            found["mixed"][name] = values
        elif all(several == next(iter(values.values())) for several in values.values()):
            found["equal"][name] = next(iter(values.values()))[0]
        else:
            found["differ"][name] = {arm: several[0] for arm, several in values.items()}
    return found


@dataclass(frozen=True)
class _Table:
    """The numbers of a run: ``values [requests, arms, keys]``, NaN where missing or not finite."""

    requests: list[str]
    groups: list[str]
    arms: list[str]
    keys: list[str]
    values: Floats
    present: npt.NDArray[np.bool_]  # [requests, arms]: has a row
    broken: npt.NDArray[np.bool_]  # [requests, arms, keys]: a value that is not finite

    @classmethod
    def of(cls, rows: Sequence[Row]) -> _Table:
        requests = sorted({row["request"] for row in rows})  # not the order of arrival
        group = {row["request"]: cluster(row["request"], row.get("group")) for row in rows}
        seen = dict.fromkeys(row["arm"] for row in rows)
        arms = [*(a for a in BASELINES if a in seen), *(a for a in seen if a not in BASELINES)]
        keys = list(dict.fromkeys(key for row in rows for key in _numbers(row)))
        shape = (len(requests), len(arms), len(keys))
        values = np.full(shape, np.nan)
        present, broken = np.zeros(shape[:2], bool), np.zeros(shape, bool)
        at = {name: i for i, name in enumerate(requests)}
        for row in rows:
            cell = (at[row["request"]], arms.index(row["arm"]))
            if present[cell]:
                raise DataError(f"request {row['request']!r} of arm {row['arm']!r} appears twice")
            present[cell] = True
            for key, value in _numbers(row).items():
                finite = math.isfinite(value)
                values[(*cell, keys.index(key))] = value if finite else np.nan
                broken[(*cell, keys.index(key))] = not finite
        return cls(requests, [group[r] for r in requests], arms, keys, values, present, broken)

    def gaps(self) -> dict[str, Any]:
        """What is not in the means: ``missing`` and ``non_finite``, {arm: {key: rows}}."""
        missing = self.present[:, :, None] & np.isnan(self.values) & ~self.broken
        return {
            "n_clusters": len(set(self.groups)),
            "missing": self._count(missing),
            "non_finite": self._count(self.broken),
        }

    def _count(self, flags: npt.NDArray[np.bool_]) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {}
        for a, k in np.argwhere(flags.any(axis=0)):
            if self.keys[k] in EXACT_ONLY:
                continue
            counts.setdefault(self.arms[a], {})[self.keys[k]] = int(flags[:, a, k].sum())
        return counts


def _estimates(values: Floats, table: _Table, with_median: bool = True) -> dict[str, Any]:
    """{key: estimate} of ``values [requests, keys]``; keys without a value are left out."""
    low, high = bootstrap(values, table.groups)
    found: dict[str, Any] = {}
    for k, key in enumerate(table.keys):
        column = values[np.isfinite(values[:, k]), k]
        if not len(column):
            continue
        mean, a, b = float(column.mean()), float(low[k]), float(high[k])
        # Rounding may put the ends of a constant's interval one bit on the wrong side.
        found[key] = {"mean": mean, "low": min(a, mean), "high": max(b, mean), "n": len(column)}
        if with_median:
            found[key]["median"] = float(np.median(column))
    return found


def _pairs(table: _Table) -> dict[str, Any]:
    """Both directions of every two arms, so that a reader finds either name."""
    pairs: dict[str, Any] = {f"{a}-{b}": {} for a, b in permutations(table.arms, 2)}
    for i, a in enumerate(table.arms):
        for j in range(i + 1, len(table.arms)):
            found = _estimates(table.values[:, i] - table.values[:, j], table, with_median=False)
            pairs[f"{a}-{table.arms[j]}"] = found
            pairs[f"{table.arms[j]}-{a}"] = {key: _negated(e) for key, e in found.items()}
    return pairs


def _negated(estimate: dict[str, Any]) -> dict[str, Any]:
    mean, low, high = 0.0 - estimate["mean"], 0.0 - estimate["high"], 0.0 - estimate["low"]
    return {"mean": mean, "low": low, "high": high, "n": estimate["n"]}


def _counted(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, int]]]:
    """{arm: {key: totals}} of the keys that hold counts by reason (``reuse/refused`` …)."""
    totals: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for row in rows:
        for key, value in row.items():
            if "/" in key and isinstance(value, Mapping):
                totals[row["arm"]][key].update(value)
    return {a: {key: dict(c) for key, c in counted.items()} for a, counted in totals.items()}


def _hits(rows: Sequence[Row]) -> dict[str, float]:
    """Hit rates over all requests of an arm: by requests, by tokens, and these by provenance."""
    cacheable = sum(row.get("reuse/cacheable_tokens", 0) for row in rows)
    found = {"hit_rate_by_requests": sum(row.get("reuse/hit", 0) for row in rows) / len(rows)}
    for name in ("matched", "prefix", "chunk", "semantic", "recomputed"):
        tokens = sum(row.get(f"reuse/{name}_tokens", 0) for row in rows)
        rate = "hit_rate_by_tokens" if name == "matched" else f"hit_rate_by_tokens/{name}"
        found[rate] = tokens / cacheable if cacheable else 0.0
    return found


def cluster(request: str, group: str | None) -> str:
    """What the bootstrap draws: the document, or the request itself where it shares none."""
    return f"request {request}" if group is None else f"group {group}"


def _numbers(row: Row) -> dict[str, float]:
    """Values under the stable keys; those set aside by `RunDir.append` are NaN."""
    numbers = {
        key: float(value)
        for key, value in row.items()
        if "/" in key and isinstance(value, int | float | np.number | np.bool_)
    }
    return numbers | {key: math.nan for key in row.get("non_finite", {}) if "/" in key}
