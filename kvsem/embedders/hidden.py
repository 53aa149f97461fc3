"""The mean hidden state of a chunk behind one of the model's layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvsem.embedders.base import (
    REFERENCE,
    TokenMeans,
    check_windows,
    units_of,
)
from kvsem.errors import SettingError, check_count
from kvsem.model import Model, needed, taken

_VERSION = 1  # raise it when what is pooled changes
NAME = "the embedder hidden"


class HiddenEmbedder:
    """The hidden state behind ``n_layers`` layers, computed of the text alone and averaged over
    its tokens and, where it is longer than ``window`` tokens, over windows: no text is truncated.
    Only these layers run.

    ``standardised``: less the mean of texts of many kinds and divided by their spread, without
    which a few large numbers make all texts alike. Vectors are of one model: the identity holds
    its namespace. Windows are batched with windows of their own length only.
    """

    def __init__(
        self, n_layers: int = 2, window: int = 512, batch_size: int = 8, standardised: bool = True
    ) -> None:
        check_windows(window, batch_size)
        check_count("n_layers", n_layers, 1)
        self.n_layers, self.window, self.batch_size = n_layers, window, batch_size
        self.standardised = standardised
        self._model: Model | None = None
        self._pool: TokenMeans | None = None

    def use(self, model: Model) -> None:
        """Take ``model``; raises where it has fewer layers."""
        if self.n_layers > model.n_layers:
            raise SettingError("n_layers", self.n_layers, f"a number from 1 to {model.n_layers}")
        self._model = taken(self._model, model, NAME)
        pool = TokenMeans(model, self._per_token, self.dim, self.window, self.batch_size)
        self._pool = self._pool or pool

    @property
    def dim(self) -> int:
        return needed(self._model, NAME).hidden_size

    @property
    def identity(self) -> str:
        scale = f"common/{REFERENCE}" if self.standardised else "none"
        return (
            f"hidden/{_VERSION} {needed(self._model, NAME).namespace()} n_layers={self.n_layers} "
            f"dim={self.dim} scale={scale} normalise=l2 window={self.window}"
        )

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32 ``[n, dim]``, rows of length 1, or 0 for a text without tokens."""
        pool = needed(self._pool, NAME)
        return units_of([pool.standardised(texts) if self.standardised else pool.of(texts)])

    def _per_token(self, ids: np.ndarray) -> torch.Tensor:
        """``[batch, tokens, dim]``"""
        return needed(self._model, NAME).first_layers(ids, self.n_layers).hidden
