"""How much of each target stands in a chunk that its donor has word for word; needs no model.

python experiments/chunkers/shares.py REQUESTS.jsonl [CHUNKER ...]

Prints, for every chunker (or those named), the share of the targets' characters and the number of
chunks a target. What is left may still be aligned from a similar chunk.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hydra.utils import instantiate
from omegaconf import OmegaConf

from experiments.compose import CONF
from kvsem.chunkers.base import Chunker


def chunks(chunker: Chunker, text: str) -> list[str]:
    return [text[span.start : span.end].strip() for span in chunker.split(text)]


def share(chunker: Chunker, donor: str, target: str) -> tuple[float, int]:
    """Share of the target's characters in chunks that the donor has too, and its chunks."""
    known, found = set(chunks(chunker, donor)), chunks(chunker, target)
    return sum(len(c) for c in found if c in known) / sum(map(len, found)), len(found)


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    records = [json.loads(line) for line in Path(arguments[0]).read_text("utf-8").splitlines()]
    names = arguments[1:] or sorted(path.stem for path in (CONF / "chunker").glob("*.yaml"))
    print("| chunker | identical | chunks |\n|---|---|---|")
    for name in names:
        chunker = instantiate(OmegaConf.load(CONF / "chunker" / f"{name}.yaml"))
        pairs = [share(chunker, each["donor"], each["target"]) for each in records]
        means = [sum(column) / len(records) for column in zip(*pairs, strict=True)]
        print(f"| `{name}` | {means[0]:.2f} | {means[1]:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
