"""Several prompts in one forward, and the prompts of a padded batch.

Rows of all prompts stand one behind the other along the token axis, without padding: linear
layers see them as one prompt, and each attends over the KV of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvsem.errors import DataError, KvsemError, ModelError
from kvsem.forward import Forward


@dataclass
class Packed:
    """Selective forwards in one: part i narrows, is masked and is counted as it is alone.

    ``last``: int64 ``[parts]``, where each part's last row stands; kept up to date in place, so
    that a model which is given it beforehand finds the rows that are there at the end.
    """

    parts: Sequence[Forward]
    layer: int = 0

    def __post_init__(self) -> None:
        if len({id(part.kv) for part in self.parts}) < len(self.parts):
            raise KvsemError("two prompts of a batch cannot share one KV")
        self.rows = torch.cat([part.rows for part in self.parts])
        self.last = torch.empty(len(self.parts), dtype=torch.long, device=self.rows.device)
        self._relative: torch.Tensor | None = None  # rows as indices into those of layer 0
        self._narrowed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._handed: torch.Tensor | None = None
        self._measure()

    def _measure(self) -> None:
        self.sizes = [len(part.at) for part in self.parts]
        ends = torch.tensor(self.sizes, device=self.last.device).cumsum(0)
        self.last.copy_(ends - 1)

    def put(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each part's rows into its own KV."""
        for part in self.parts:
            part.layer = self.layer
        if len(self.parts) == 1:
            return self.parts[0].put(k, v)
        if not k.shape[-2] == v.shape[-2] == sum(self.sizes):
            raise ModelError(
                f"layer {self.layer} computed {k.shape[-2]} tokens, asked for {sum(self.sizes)}"
            )
        keys, values = (t.split_with_sizes(self.sizes, dim=-2) for t in (k, v))
        for part, own_keys, own_values in zip(self.parts, keys, values, strict=True):
            part.write(own_keys, own_values)
        self._handed = k
        return k, v

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any
    ) -> torch.Tensor:
        """``[1, heads, rows, dim]``, each row over the KV of its own prompt: like ``query``."""
        if len(self.parts) == 1:
            return self.parts[0].attend(query, key, value, *more)
        if key is not self._handed:
            raise ModelError(
                "the architecture works on keys behind its cache: one prompt at a time"
            )
        queries = query.split_with_sizes(self.sizes, dim=-2)
        return torch.cat(
            [p.attend(q, *p.read(), *more) for p, q in zip(self.parts, queries, strict=True)],
            dim=-2,
        )

    def narrow(self, keeps: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Go on with ``keeps[i]`` (bool ``[n_keys]``, CPU) of part i only: indices into the rows
        so far, or None where nothing changes. Raises where one is no subset."""
        sizes, found = self.sizes, []
        kept = [part.narrow(keep) for part, keep in zip(self.parts, keeps, strict=True)]
        if all(index is None for index in kept):
            return None
        start = 0
        for size, index in zip(sizes, kept, strict=True):
            whole = torch.arange(size, device=self.last.device)
            found.append(start + (whole if index is None else index))
            start += size
        rows = torch.cat(found)
        self._relative = rows if self._relative is None else self._relative[rows]
        self._narrowed.clear()
        self._measure()
        return rows

    def narrowed(self, value: Any, dim: int) -> Any:
        """A layer input that arrives at its original length, cut down to the present rows."""
        if isinstance(value, tuple):
            return tuple(self.narrowed(v, dim) for v in value)
        if not isinstance(value, torch.Tensor) or self._relative is None:
            return value
        if id(value) not in self._narrowed:  # the original is kept, so that its id stays taken
            self._narrowed[id(value)] = (value, value.index_select(dim, self._relative))
        return self._narrowed[id(value)][1]


def unpad(input_ids: Any, attention_mask: Any = None) -> list[np.ndarray]:
    """The prompts of a padded batch: per row its token ids, int64 ``[tokens]``.

    ``input_ids`` and ``attention_mask`` (1 = token, 0 = padding; None: no padding) ``[rows, n]``,
    as tokenizers give them, padded on the left or on the right. What is prefilled afterwards
    stands at positions 0 … tokens - 1, as it would alone. Raises `DataError` for anything else.
    """
    ids = _integers("input_ids", input_ids)
    mask = (
        np.ones_like(ids) if attention_mask is None else _integers("attention_mask", attention_mask)
    )
    if ids.ndim != 2 or mask.shape != ids.shape:
        raise DataError(
            f"a batch is input_ids and attention_mask [rows, n], got {[*ids.shape]} and "
            f"{[*mask.shape]}"
        )
    if not np.isin(mask, (0, 1)).all():
        raise DataError("attention_mask: expected 1 for a token and 0 for padding")
    prompts = []
    for row, (tokens, there) in enumerate(zip(ids, mask, strict=True)):
        at = np.flatnonzero(there)
        if not len(at):
            raise DataError(f"attention_mask: row {row} has no token")
        if at[-1] - at[0] + 1 != len(at):
            raise DataError(f"attention_mask: row {row} has padding between its tokens")
        prompts.append(tokens[at[0] : at[-1] + 1].astype(np.int64))
    return prompts


def _integers(name: str, value: Any) -> np.ndarray:
    array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype.kind not in "biu":
        raise DataError(f"{name}: expected whole numbers, got {array.dtype}")
    return array
