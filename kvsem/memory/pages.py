"""The tensors behind the pool: one K and one V per layer, cut into pages of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import overload

import numpy as np
import torch

from kvsem.errors import KvsemError, SettingError
from kvsem.forward import LayerShape, Rows

FEW = 16  # from so many stretches on, one indexed copy beats copying stretch by stretch


Place = list[slice] | torch.Tensor  # stretches of slots, or int64 on the device


class Pages:
    """Keys and values of every page: per layer ``[kv_heads, slots, head_dim]``.

    Slot p x page_size + i is token i of page p. Nothing is zeroed: a page holds what its last
    owner left until it is written.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        page_size: int,
        n_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shapes, self.page_size, self.n_pages = list(shapes), page_size, 0
        self.dtype, self.device = dtype, device
        self.keys = [self._empty(s.kv_heads, 0, s.key_dim) for s in shapes]
        self.values = [self._empty(s.kv_heads, 0, s.value_dim) for s in shapes]
        self.grow(n_pages)

    @property
    def token_nbytes(self) -> int:
        """Bytes that the KV of one token takes."""
        floats = sum(s.kv_heads * (s.key_dim + s.value_dim) for s in self.shapes)
        return floats * self.dtype.itemsize

    def grow(self, n_pages: int) -> None:
        """Room for ``n_pages``; what is there keeps its slots. One layer is copied at a time."""
        if n_pages <= self.n_pages:
            return
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = self._empty(old.shape[0], n_pages * self.page_size, old.shape[2])
                new[:, : old.shape[1]] = old
                tensors[layer] = new
        self.n_pages = n_pages

    def slots(self, pages: Sequence[int]) -> np.ndarray:
        """int64 ``[pages x page_size]``."""
        starts = np.asarray(pages, dtype=np.int64) * self.page_size
        return (starts[:, None] + np.arange(self.page_size)).ravel()

    def copy(self, source: int, target: int, n: int) -> None:
        """The first ``n`` tokens of one page into another."""
        here, there = target * self.page_size, source * self.page_size
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[:, here : here + n] = tensor[:, there : there + n]

    def _empty(self, heads: int, slots: int, dim: int) -> torch.Tensor:
        return torch.empty(heads, slots, dim, dtype=self.dtype, device=self.device)


class PagedKV:
    """KV of one prompt (or chunk) in pages: what `kvsem.forward.KV` asks for.

    The first ``length`` tokens are valid; the first ``n_shared`` lie in pages that others read
    too and are never written. Not usable any more once closed.
    """

    def __init__(
        self, pages: Pages, held: Sequence[int], length: int = 0, n_shared: int = 0
    ) -> None:
        self._pages, self.length, self.n_shared = pages, length, n_shared
        self.pages: list[int] = []
        self.borrowed: list[int] = []  # of entries that it is put together from
        self.closed = False
        self._runs: list[tuple[int, int, int]] = []  # first token, first slot, tokens
        self._known: dict[tuple[int, int], Place] = {}  # of stretches
        self._scattered: tuple[Rows | None, Place] = (None, [])
        self.append(held)

    @property
    def capacity(self) -> int:
        return len(self.pages) * self._pages.page_size

    @property
    def n_layers(self) -> int:
        return len(self._pages.shapes)

    @property
    def nbytes(self) -> int:
        """Of the valid tokens."""
        return self.length * self._pages.token_nbytes

    @property
    def keys(self) -> Layers:
        """Per layer ``[1, kv_heads, length, head_dim]``, to look at."""
        return Layers(self.n_layers, lambda layer: self.read(layer, self.length)[0])

    @property
    def values(self) -> Layers:
        return Layers(self.n_layers, lambda layer: self.read(layer, self.length)[1])

    def append(self, pages: Sequence[int]) -> None:
        """More room, behind what there is."""
        size = self._pages.page_size
        for page in pages:
            token, slot, n = self._runs[-1] if self._runs else (0, -1, 0)
            if slot + n == page * size and self._runs:
                self._runs[-1] = (token, slot, n + size)
            else:
                self._runs.append((token + n, page * size, size))
            self.pages.append(page)
        self._known.clear()

    def close(self) -> list[int]:
        """The pages it held; raises where that was asked before."""
        self._check()
        self.closed = True
        return self.pages

    def truncate_to(self, n: int) -> None:
        """Keep the first ``n`` tokens; raises outside what it shares … its length."""
        if not self.n_shared <= n <= self.length:
            raise SettingError("n", n, f"{self.n_shared} to the length {self.length}")
        self.length = n

    def read(self, layer: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first ``n`` tokens, ``[1, kv_heads, n, head_dim]``: views where
        they lie in one stretch, else copies."""
        self._check()
        place = self._place(slice(0, n))
        keys, values = self._pages.keys[layer], self._pages.values[layer]
        return _take(keys, place)[None], _take(values, place)[None]

    def write(self, layer: int, rows: Rows, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put ``[1, kv_heads, rows, head_dim]`` at the positions ``rows``."""
        self._check()
        first = rows.start if isinstance(rows, slice) else int(rows[0])
        if first < self.n_shared:
            raise KvsemError(f"token {first} is shared with others and cannot be written")
        place = self._place(rows)
        _put(self._pages.keys[layer], place, keys[0])
        _put(self._pages.values[layer], place, values[0])

    def cut(
        self, start: int, end: int
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Tokens ``[start, end)``, to look at: per layer ``[kv_heads, tokens, head_dim]``."""
        self._check()
        place = self._place(slice(start, end))
        return (
            tuple(_take(keys, place) for keys in self._pages.keys),
            tuple(_take(values, place) for values in self._pages.values),
        )

    def is_finite(self, start: int, end: int) -> bool:
        """Whether the KV of tokens ``[start, end)`` holds neither NaN nor infinity."""
        self._check()
        place = self._place(slice(start, end))
        return finite(_take(t, place) for t in (*self._pages.keys, *self._pages.values))

    def _check(self) -> None:
        if self.closed:
            raise KvsemError("this KV was given back to the pool")

    def _place(self, rows: Rows) -> Place:
        """Where ``rows`` lie; the layers of one forward ask for the same."""
        if isinstance(rows, slice):
            key = rows.start, rows.stop
            if key not in self._known:
                if len(self._known) > FEW:
                    self._known.clear()
                self._known[key] = self._stretches(rows)
            return self._known[key]
        if self._scattered[0] is not rows:
            self._scattered = rows, self._index(rows)
        return self._scattered[1]

    def _stretches(self, rows: slice) -> Place:
        within = [run for run in self._runs if run[0] < rows.stop and sum(run[::2]) > rows.start]
        if len(within) > FEW:
            return self._index(rows)
        return [
            slice(slot + max(rows.start - token, 0), slot + min(rows.stop - token, n))
            for token, slot, n in within
        ]

    def _index(self, rows: Rows) -> torch.Tensor:
        slots = torch.from_numpy(self._pages.slots(self.pages))
        return slots[rows].to(self._pages.device)


class Layers(Sequence[torch.Tensor]):
    """One tensor per layer, read when it is asked for."""

    def __init__(self, n_layers: int, read: Callable[[int], torch.Tensor]) -> None:
        self._n_layers, self._read = n_layers, read

    def __len__(self) -> int:
        return self._n_layers

    @overload
    def __getitem__(self, layer: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, layer: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, layer: int | slice) -> torch.Tensor | list[torch.Tensor]:
        wanted = range(self._n_layers)[layer]
        return self._read(wanted) if isinstance(wanted, int) else [self._read(i) for i in wanted]


def finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether there is neither NaN nor infinity in any of ``tensors``: both outlive a sum."""
    return bool(torch.stack([t.sum(dtype=torch.float32) for t in tensors]).isfinite().all())


def _take(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """``[heads, tokens, dim]``; a view of one stretch."""
    if isinstance(place, torch.Tensor):
        return tensor.index_select(1, place)
    if len(place) == 1:
        return tensor[:, place[0]]
    return torch.cat([tensor[:, span] for span in place], dim=1) if place else tensor[:, :0]


def _put(tensor: torch.Tensor, place: Place, new: torch.Tensor) -> None:
    if isinstance(place, torch.Tensor):
        tensor.index_copy_(1, place, new)
        return
    at = 0
    for span in place:
        n = span.stop - span.start
        tensor[:, span] = new[:, at : at + n]
        at += n
