"""Exact baselines kept on disk, so that a second run of other arms costs only those.

A baseline is found under a key of everything that could change it: weights, tokenizer and
dtype (the namespace), the prompt's ids, the continuation's length, answers, versions, device
and threads. One safetensors file each; anything unreadable is a miss.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvsem.metrics.base import Observation


@dataclass(frozen=True)
class Baseline:
    """What exact gave for one request: its observation, and the finished rows of both runs."""

    observation: Observation
    rows: tuple[dict[str, Any], ...]  # of exact and exact_again
    ttft_ms: float  # the faster of exact and a plain forward


class Baselines:
    """Files under ``folder``, at most ``max_gb`` of them (the longest unused go first)."""

    def __init__(self, folder: Path, max_gb: float = 4.0) -> None:
        self.folder, self.max_bytes = folder, int(max_gb * 1e9)

    def load(self, key: str) -> Baseline | None:
        path = self.folder / f"{key}.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                meta = json.loads(file.metadata()["kvsem"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            os.utime(path)
            n = meta["n_layers"]
            observation = Observation(
                tensors["logits"],
                tuple(meta["greedy"]),
                meta["text"],
                tuple(meta["answers"]),
                meta["answer_nll_nats"],
                tuple(tensors[f"k{i}"] for i in range(n)),
                tuple(tensors[f"v{i}"] for i in range(n)),
            )
            return Baseline(observation, tuple(meta["rows"]), float(meta["ttft_ms"]))
        except (OSError, SafetensorError, KeyError, ValueError, TypeError):
            return None

    def save(self, key: str, baseline: Baseline) -> None:
        """Write whole or not at all; where nothing can be written, one warning."""
        try:
            self._save(key, baseline)
        except (OSError, SafetensorError) as error:
            warnings.warn(f"exact baselines cannot be kept in {self.folder}: {error}", stacklevel=2)

    def _save(self, key: str, baseline: Baseline) -> None:
        seen = baseline.observation
        keys, values = seen.keys or (), seen.values or ()
        meta = {
            "n_layers": len(keys),
            "greedy": seen.greedy,
            "text": seen.text,
            "answers": seen.answers,
            "answer_nll_nats": seen.answer_nll_nats,
            "rows": baseline.rows,
            "ttft_ms": baseline.ttft_ms,
        }
        tensors = {"logits": seen.logits.cpu().contiguous()}
        tensors |= {f"k{i}": k.cpu().contiguous() for i, k in enumerate(keys)}
        tensors |= {f"v{i}": v.cpu().contiguous() for i, v in enumerate(values)}
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=self.folder, suffix=".part")
        os.close(handle)
        try:
            save_file(tensors, part, metadata={"kvsem": json.dumps(meta)})
            os.replace(part, self.folder / f"{key}.safetensors")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)

    def prune(self) -> None:
        """Drop the longest unused files beyond the limit."""
        files = sorted(self.folder.glob("*.safetensors"), key=lambda f: f.stat().st_mtime)
        excess = sum(f.stat().st_size for f in files) - self.max_bytes
        for file in files:
            if excess <= 0:
                return
            excess -= file.stat().st_size
            file.unlink(missing_ok=True)
