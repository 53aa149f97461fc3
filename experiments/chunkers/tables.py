"""The sweeps of this study as one small file and one table for each kind of document.

python experiments/chunkers/tables.py KIND SWEEP [KIND SWEEP ...]

SWEEP is the folder of `run.py --multirun chunker=...` on the requests of KIND. Writes
results/KIND.json beside this file (every arm: means, intervals, n), and prints the tables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvsem.results import write_atomic

HERE = Path(__file__).resolve().parent
KEYS = (
    "reuse/hit_rate",
    "quality/kl_first_nats",
    "quality/kl_nats",
    "cost/flop_ratio",
    "cost/plan_ms",
)
HEADS = ("hit rate", "KL first", "KL 16", "FLOP ratio", "plan ms")


def cells(sweep: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Chunker -> arm -> key -> estimate."""
    found = {}
    for path in sorted(sweep.glob("chunker=*/summary.json")):
        arms = json.loads(path.read_text(encoding="utf-8"))["arms"]
        found[path.parent.name.partition("=")[2]] = {
            arm: {key: keys[key] for key in KEYS if key in keys}
            for arm, keys in arms.items()
            if not arm.startswith("exact")
        }
    return found


def table(kind: str, found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    lines = [f"**{kind}**", "", f"| chunker | arm | n | {' | '.join(HEADS)} |", "|---" * 8 + "|"]
    for chunker, arms in found.items():
        for arm, keys in arms.items():
            n = keys[KEYS[0]]["n"]
            shown = [_shown(keys.get(key)) for key in KEYS]
            lines.append(f"| `{chunker}` | `{arm}` | {n} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _shown(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "–"
    return "{mean:.3g} ({low:.3g} … {high:.3g})".format(**estimate)


def main(arguments: Sequence[str]) -> int:
    if not arguments or len(arguments) % 2:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    for kind, sweep in zip(arguments[::2], arguments[1::2], strict=True):
        found = cells(Path(sweep))
        if not found:
            print(f"error: {sweep}: no chunker=NAME/summary.json in it", file=sys.stderr)
            return 2
        out = HERE / "results" / f"{kind}.json"
        out.parent.mkdir(exist_ok=True)
        write_atomic(out, json.dumps(found, indent=1) + "\n")
        print(table(kind, found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
