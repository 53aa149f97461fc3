"""One selective forward: which rows flow, what they may see, and where their KV goes.

Pure torch. Rows are absolute token positions, ascending; masks are made from them, so that a
recomputed token in the middle sees exactly the tokens before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvsem.errors import KvsemError, ModelError, SettingError

# From so many keys on, rows attend in groups: a group skips the keys behind its last row.
GROUP_KEYS = 512
GROUP_ROWS = 32
MAX_GROUPS = 16

Rows = slice | torch.Tensor  # token positions: a stretch, or int64 on the CPU, ascending
Select = Callable[[int], torch.Tensor]  # layer -> bool [n_tokens] on the CPU
Arrived = Callable[[int, torch.Tensor, torch.Tensor], None]


class KV(Protocol):
    """KV of one prompt under work. The first ``length`` tokens are valid, up to ``n_shared`` of
    them also belong to others; there is room for ``capacity``."""

    length: int

    @property
    def capacity(self) -> int: ...

    def read(self, layer: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first ``n`` tokens, ``[1, kv_heads, n, head_dim]``."""
        ...

    def write(self, layer: int, rows: Rows, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put ``[1, kv_heads, rows, head_dim]`` at the positions ``rows``."""
        ...

    def truncate_to(self, n: int) -> None:
        """Keep the first ``n`` tokens."""
        ...


@dataclass
class Watch:
    """Who looks at what: attention weights of the rows from position ``start`` on, mean over
    heads and rows. ``seen[l]``: fp32 ``[n_tokens]`` on the model's device, once layer l has run."""

    start: int = 0
    seen: list[torch.Tensor] = field(default_factory=list)


class Job(NamedTuple):
    """A prompt to prefill: ``ids`` int64 ``[n]``, its KV, and what is computed of it.

    ``arrived(layer, keys, values)`` is called with the K and V of a layer's rows, ``[1, kv_heads,
    rows, head_dim]``, just before they take their place in ``kv``, which it may change.
    """

    ids: np.ndarray
    kv: KV
    select: Select
    arrived: Arrived | None = None
    watch: Watch | None = None


@dataclass
class KVBuffer:
    """KV in one piece: per layer ``[1, kv_heads, capacity, head_dim]``."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    length: int = 0

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[-2]

    def truncate_to(self, n: int) -> None:
        """Keep the first ``n`` tokens; raises outside 0 … length."""
        if not 0 <= n <= self.length:
            raise SettingError("n", n, f"0 to the buffer's length {self.length}")
        self.length = n

    def read(self, layer: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first ``n`` tokens."""
        return self.keys[layer][:, :, :n], self.values[layer][:, :, :n]

    def write(self, layer: int, rows: Rows, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put ``[1, kv_heads, rows, head_dim]`` at the positions ``rows``."""
        for buffer, new in ((self.keys[layer], keys), (self.values[layer], values)):
            if isinstance(rows, slice):
                buffer[:, :, rows] = new
            else:
                buffer.index_copy_(2, rows.to(buffer.device), new)

    def cut(
        self, start: int, end: int
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Tokens ``[start, end)``, to look at: per layer ``[kv_heads, tokens, head_dim]``."""
        return (
            tuple(keys[0, :, start:end] for keys in self.keys),
            tuple(values[0, :, start:end] for values in self.values),
        )


@dataclass(frozen=True)
class LayerShape:
    """Read from the tensors of a real forward, never from the configuration.

    ``kv_heads``, ``key_dim``, ``value_dim``: of what is cached. Where that is expanded before
    the rows attend over it (MLA), ``pair_dim`` is the sum of both dims afterwards, and
    ``per_key`` the multiplications that expanding one cached token takes.
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    pair_dim: int | None = None
    per_key: int = 0

    @property
    def per_pair(self) -> int:
        """Multiplications that one query-key pair takes, over all heads."""
        return self.query_heads * (self.pair_dim or self.key_dim + self.value_dim)


def multiplications(
    shapes: Sequence[LayerShape], weights: Sequence[int], computed: np.ndarray
) -> int:
    """Of the layers over ``computed`` (bool ``[layers, n]``), each with so many linear weights.

    Each causal (and windowed) query-key pair counts once for scores and once for values.
    ``weights`` leave out what runs for every cached token instead (`LayerShape.per_key`).
    """
    total = 0
    positions = np.arange(computed.shape[1], dtype=np.int64) + 1
    for shape, linear, mask in zip(shapes, weights, computed, strict=True):
        seen = positions if shape.window is None else np.minimum(positions, shape.window)
        total += int(mask.sum()) * linear + int(seen[mask].sum()) * shape.per_pair
        total += computed.shape[1] * shape.per_key if mask.any() else 0
    return total


def attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 ``[b, heads, rows, keys]``; ``mask`` is added to the scores.

    ``softcap`` bounds the scores (Gemma 2, arXiv 2408.00118); ``sinks`` ``[heads]`` stand in
    every row's softmax beside the keys and take their share (GPT-OSS).
    """
    b, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(b, kv_heads, heads // kv_heads * rows, dim)
    scores = (grouped @ key.transpose(-1, -2)).float().reshape(b, heads, rows, -1) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.float().reshape(1, -1, 1, 1).expand(b, -1, rows, 1)
    return torch.cat([scores, beside], dim=-1).softmax(-1)[..., :-1]


def explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention that torch's own function has no argument for; like ``query``."""
    weights = attention_weights(query, key, mask, scaling, softcap, sinks).to(value.dtype)
    b, heads, rows, n = weights.shape
    kv_heads = value.shape[1]
    grouped = weights.reshape(b, kv_heads, heads // kv_heads * rows, n)
    return (grouped @ value).reshape(b, heads, rows, value.shape[-1])


@dataclass
class Forward:
    """One selective forward in flight."""

    n_keys: int
    at: torch.Tensor  # int64 on the CPU, absolute positions of the tokens that flow, ascending
    n_layers: int
    device: torch.device
    kv: KV | None = None  # None: K and V are handed through, none are kept
    probing: bool = False
    arrived: Arrived | None = None
    watch: Watch | None = None
    layer: int = 0
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    _span: tuple[int, int] | None = None
    _written: Rows = field(default_factory=lambda: slice(0, 0))
    _keep: torch.Tensor | None = None  # the set of the layer before
    _groups: dict[int | None, list[tuple[slice, slice, torch.Tensor | None]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.computed = np.zeros((self.n_layers, self.n_keys), dtype=bool)
        self._go_on_with(self.at)

    def _go_on_with(self, at: torch.Tensor) -> None:
        self.at, self.rows = at, at.to(self.device)
        first, last = int(at[0]), int(at[-1]) + 1
        self._span = (first, last) if last - first == len(at) else None
        self._written = slice(first, last) if self._span else at
        self._groups.clear()

    def put(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the computed ``k`` and ``v`` of the present layer at their rows; returns the keys
        and values that the rows attend over."""
        self.write(k, v)
        return self.read()

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """The first half of `put`."""
        if not k.shape[-2] == v.shape[-2] == len(self.at):
            raise ModelError(
                f"layer {self.layer} computed {k.shape[-2]} tokens, asked for {len(self.at)}"
            )
        assert self.kv is not None
        if self.arrived is not None:
            self.arrived(self.layer, k, v)
        self.kv.write(self.layer, self._written, k, v)
        self.computed[self.layer, self.at.numpy()] = True

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the rows attend over, ``[1, kv_heads, n_keys, head_dim]``."""
        assert self.kv is not None
        return self.kv.read(self.layer, self.n_keys)

    def narrow(self, keep: torch.Tensor) -> torch.Tensor | None:
        """Go on with ``keep`` (bool ``[n_keys]``, CPU) only: indices into the rows so far, or
        None where nothing changes. Raises where ``keep`` is no subset."""
        if keep is self._keep:
            return None
        self._keep = keep
        kept = keep[self.at]
        if int(kept.sum()) != int(keep.sum()):
            raise KvsemError("a recompute rule asked for tokens that the layer before left out")
        if bool(kept.all()):
            return None
        self._go_on_with(self.at[kept])
        return kept.nonzero()[:, 0].to(self.device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[1, heads, rows, dim]`` over ``[1, kv_heads, n_keys, dim]``: like ``query``."""
        self._look(query, key, value, window, scaling, softcap, sinks)
        if softcap is not None or sinks is not None:
            parts = [
                explicit_attention(
                    query[:, :, r], key[:, :, k], value[:, :, k], mask, scaling, softcap, sinks
                )
                for r, k, mask in self._groups_of(window, query.dtype)
            ]
            return torch.cat(parts, dim=2)
        gqa = query.shape[1] != key.shape[1]
        if self._span == (0, self.n_keys) and (window is None or window >= self.n_keys):
            return scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa
            )
        if gqa and query.is_cuda:  # CUDA's fast kernels take a mask or grouped heads, not both
            repeats = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
            gqa = False
        parts = [
            scaled_dot_product_attention(
                query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=gqa,
            )
            for rows, keys, mask in self._groups_of(window, query.dtype)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _groups_of(
        self, window: int | None, dtype: torch.dtype
    ) -> list[tuple[slice, slice, torch.Tensor | None]]:
        """Made once for each set of rows and window."""
        if window not in self._groups:
            self._groups[window] = list(self._make_groups(window, dtype))
        return self._groups[window]

    def _make_groups(
        self, window: int | None, dtype: torch.dtype
    ) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
        n = len(self.at)
        n_groups = min(MAX_GROUPS, max(1, n // GROUP_ROWS)) if self.n_keys >= GROUP_KEYS else 1
        edges = [n * g // n_groups for g in range(n_groups + 1)]
        for start, end in itertools.pairwise(edges):
            rows, first, last = self.rows[start:end], int(self.at[start]), int(self.at[end - 1])
            low = 0 if window is None else max(0, first - window + 1)
            keys = torch.arange(low, last + 1, device=rows.device)
            hidden = keys[None] > rows[:, None]
            if window is not None:
                hidden |= keys[None] <= rows[:, None] - window
            mask = None
            if end - start > 1:
                mask = torch.zeros(hidden.shape, dtype=dtype, device=rows.device)
                mask = mask.masked_fill_(hidden, float("-inf"))[None, None]
            yield slice(start, end), slice(low, last + 1), mask

    def _look(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        if self.probing:
            heads = query.shape[1], key.shape[1]
            self.shapes[self.layer] = LayerShape(*heads, key.shape[-1], value.shape[-1], window)
        if self.watch is not None:
            first = int(torch.searchsorted(self.at, self.watch.start))
            rows, positions = self.rows[first:], torch.arange(self.n_keys, device=query.device)
            hidden = positions[None] > rows[:, None]
            if window is not None:
                hidden |= positions[None] <= rows[:, None] - window
            mask = torch.zeros(hidden.shape, device=query.device)
            mask = mask.masked_fill_(hidden, float("-inf"))
            looking = query[:, :, first:].float()
            weights = attention_weights(looking, key.float(), mask, scaling, softcap, sinks)
            self.watch.seen.append(weights.mean(dim=(0, 1, 2)))


@dataclass
class Step:
    """One token each of several requests in flight: their rows share every linear layer, and each
    attends over its own KV."""

    kvs: Sequence[KV]
    device: torch.device
    layer: int = 0

    def __post_init__(self) -> None:
        self.at = [kv.length for kv in self.kvs]
        self.rows = torch.tensor(self.at, device=self.device)
        self._written = [slice(n, n + 1) for n in self.at]

    def put(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write row i behind the valid tokens of request i."""
        for i, (kv, rows) in enumerate(zip(self.kvs, self._written, strict=True)):
            kv.write(self.layer, rows, k[:, :, i : i + 1], v[:, :, i : i + 1])
        return k, v

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[1, heads, requests, dim]``, row i over the KV of request i: like ``query``."""
        parts = []
        for i, (kv, n) in enumerate(zip(self.kvs, self.at, strict=True)):
            keys, values = kv.read(self.layer, n + 1)
            low = 0 if window is None else max(0, n + 1 - window)
            row, keys, values = query[:, :, i : i + 1], keys[:, :, low:], values[:, :, low:]
            if softcap is not None or sinks is not None:
                part = explicit_attention(row, keys, values, None, scaling, softcap, sinks)
            else:
                gqa = query.shape[1] != keys.shape[1]
                part = scaled_dot_product_attention(
                    row, keys, values, scale=scaling, enable_gqa=gqa
                )
            parts.append(part)
        return torch.cat(parts, dim=2)
