"""What a part may ask of the language model that its engine runs: an optional protocol.

A part that has ``use`` is given the model before anything else is asked of it. It may be shared
by the engines of one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from kvsem.errors import ModelError


class FirstLayers(NamedTuple):
    """What the first layers make of a batch of token rows, each alone and from position 0."""

    hidden: torch.Tensor  # [batch, tokens, hidden size], behind the last of them
    keys: tuple[torch.Tensor, ...]  # per layer [batch, kv_heads, tokens, head_dim], rotated
    values: tuple[torch.Tensor, ...]


class Model(Protocol):
    """The part of `kvsem.lm.LM` that parts see."""

    name: str
    tokenizer: Any
    n_layers: int
    layer_types: list[str | None]
    pairs: list[str]
    support: dict[str, tuple[bool, str]]

    @property
    def max_tokens(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def key_sizes(self) -> list[tuple[int, int]]:
        """Per layer: KV heads, and numbers a key has in each."""
        ...

    @property
    def value_sizes(self) -> list[tuple[int, int]]: ...

    def namespace(self) -> str:
        """Key of everything that makes KV of this model what it is now."""
        ...

    def embeddings(self, ids: np.ndarray) -> torch.Tensor:
        """Rows of the embedding table, fp32 ``[tokens, hidden size]`` on the CPU."""
        ...

    def first_layers(self, ids: np.ndarray, n: int) -> FirstLayers:
        """A plain forward over ``ids`` int64 ``[batch, tokens]`` that ends behind ``n`` layers."""
        ...

    def angles(
        self, deltas: Sequence[int]
    ) -> dict[str | None, tuple[torch.Tensor, torch.Tensor]]: ...


T = TypeVar("T")


@runtime_checkable
class UsesModel(Protocol):
    def use(self, model: Model) -> None:
        """Take ``model`` from now on; raises `ModelError` where another one is in use."""
        ...


def hand(part: object, model: Model) -> None:
    """Give ``model`` to ``part``, where it wants one."""
    if isinstance(part, UsesModel):
        part.use(model)


def taken(mine: Model | None, given: Model, part: str) -> Model:
    """What ``part`` goes on with; raises `ModelError` where that would be two models."""
    if mine is not None and mine is not given:
        raise ModelError(f"{part} belongs to the model {mine.name!r}: {given.name!r} needs its own")
    return given


def needed(mine: T | None, part: str) -> T:
    """What `use` has set; raises `ModelError` where it was not called."""
    if mine is None:
        raise ModelError(f"{part} reads the language model: give it to an engine, or call use(lm)")
    return mine
