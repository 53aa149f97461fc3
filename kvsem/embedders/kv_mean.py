"""The mean key or value of a chunk: an embedding of the KV itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvsem import rope
from kvsem.embedders.base import (
    REFERENCE,
    TokenMeans,
    check_windows,
    units_of,
)
from kvsem.errors import ModelError, SettingError
from kvsem.model import Model, needed, taken

_VERSION = 1  # raise it when what is pooled changes
PARTS = ("values", "keys")
NAME = "the embedder kv_mean"


class KvMeanEmbedder:
    """``part`` (values or keys) of the chosen ``layers``, computed of the text alone and averaged
    over its tokens and, where it is longer than ``window`` tokens, over windows: no text is
    truncated. Keys are turned back to position 0 first. Only the layers up to the last one chosen
    run, and each counts alike.

    ``standardised``: less the mean of texts of many kinds and divided by their spread, without
    which a few large numbers make all texts alike. Vectors are of one model: the identity holds
    its namespace. Windows are batched with windows of their own length only.
    """

    def __init__(
        self,
        layers: Sequence[int] = (3,),
        part: str = "values",
        window: int = 512,
        batch_size: int = 8,
        standardised: bool = True,
    ) -> None:
        check_windows(window, batch_size)
        if part not in PARTS:
            raise SettingError("part", part, "values or keys")
        if not layers or any(type(layer) is not int or layer < 0 for layer in layers):
            raise SettingError("layers", layers, "a list of layer numbers from 0")
        self.layers, self.part = sorted(set(layers)), part
        self.window, self.batch_size, self.standardised = window, batch_size, standardised
        self._model: Model | None = None
        self._pool: TokenMeans | None = None

    def use(self, model: Model) -> None:
        """Take ``model``; raises where it lacks a layer, or its keys cannot be turned back."""
        if self.layers[-1] >= model.n_layers:
            raise SettingError("layers", self.layers, f"layers from 0 to {model.n_layers - 1}")
        ok, reason = model.support.get("moved_chunk", (False, "not checked"))
        if self.part == "keys" and not ok:
            raise ModelError(f"{NAME}: part=values only, keys cannot be turned back: {reason}")
        self._model = taken(self._model, model, NAME)
        pool = TokenMeans(model, self._per_token, self.dim, self.window, self.batch_size)
        self._pool = self._pool or pool

    @property
    def dim(self) -> int:
        return sum(self._sizes)

    @property
    def identity(self) -> str:
        layers = ",".join(map(str, self.layers))
        scale = f"common/{REFERENCE}" if self.standardised else "none"
        return (
            f"kv_mean/{_VERSION} {needed(self._model, NAME).namespace()} part={self.part} "
            f"layers={layers} dim={self.dim} scale={scale} normalise=l2 window={self.window}"
        )

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32 ``[n, dim]``, rows of length 1, or 0 for a text without tokens."""
        pool = needed(self._pool, NAME)
        rows = pool.standardised(texts) if self.standardised else pool.of(texts)
        return units_of(np.split(rows, np.cumsum(self._sizes)[:-1], axis=1))

    @property
    def _sizes(self) -> list[int]:
        model = needed(self._model, NAME)
        sizes = model.key_sizes if self.part == "keys" else model.value_sizes
        return [sizes[layer][0] * sizes[layer][1] for layer in self.layers]

    def _per_token(self, ids: np.ndarray) -> torch.Tensor:
        """``[batch, tokens, dim]``"""
        model = needed(self._model, NAME)
        found = model.first_layers(ids, self.layers[-1] + 1)
        if self.part == "values":
            chosen = [found.values[layer] for layer in self.layers]
        else:
            back = model.angles([-i for i in range(ids.shape[1])])
            chosen = [
                rope.shift(found.keys[i], *back[model.layer_types[i]], model.pairs[i])
                for i in self.layers
            ]
        return torch.cat([t.transpose(1, 2).flatten(2) for t in chosen], dim=2)
