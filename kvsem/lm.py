"""The model adapter: selective prefill on any causal LM of transformers that passes the self-check.

The only file that touches transformers' model and cache internals. A cache handed to the
model writes the K and V of the computed tokens into full-length buffers at their absolute
positions and returns the whole buffers; one registered attention function builds its mask
from absolute positions; hooks at the decoder layers narrow the token set by depth.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, sdpa_mask

from kvsem import fingerprint, rope
from kvsem.batch import Packed
from kvsem.errors import KvsemError, ModelError, SettingError, one_line
from kvsem.forward import (
    KV,
    Forward,
    Job,
    KVBuffer,
    LayerShape,
    Select,
    Step,
    Watch,
    explicit_attention,
    multiplications,
)
from kvsem.model import FirstLayers

ATTENTION = "kvsem"  # name of our attention function in transformers' registry
# what transformers calls the cache that a forward is given; `past_key_values` until 5.23
_NAMES = inspect.signature(create_causal_mask).parameters
CACHE = "cache" if "cache" in _NAMES else "past_key_values"
KV_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # transformers' caches of nothing else
EXPANDING = "kv_b_proj"  # runs for every cached token: latent attention keeps less than K and V
NARROWED = {"position_ids": -1, "position_embeddings": -2}  # layer inputs with a token axis

GREEDY: dict[str, Any] = {  # also where a model's generation_config.json says otherwise
    "cache_implementation": "dynamic",
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}

UNFIT = (  # what a model raises that is used as it was not meant to be
    KvsemError,
    RuntimeError,
    TypeError,
    ValueError,
    AssertionError,
    AttributeError,
    LookupError,
)

_ACTIVE: ContextVar[Forward | Packed | Step | None] = ContextVar("kvsem_forward", default=None)


class _Enough(Exception):  # noqa: N818
    """No error: the layers that were asked for have run."""


class _KVLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Hands K and V to the forward in flight; keeps nothing itself."""

    def __init__(self, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer, self.is_initialized = layer, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to make."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        forward = _ACTIVE.get()
        assert forward is not None
        forward.layer = self.layer
        return forward.put(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _ProbeLayer(_KVLayer):  # type: ignore[no-untyped-call]
    """Hands K and V through and keeps them: the first look at a model's shapes."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        forward = _ACTIVE.get()
        assert forward is not None
        forward.layer = self.layer
        self.keys, self.values = key_states, value_states
        return key_states, value_states


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Our attention function: transformers' sdpa outside a selective forward.

    ``softcap`` and ``s_aux`` (sinks), which sdpa does not know, are computed from the scores.
    """
    forward = _ACTIVE.get()
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    special = softcap is not None or s_aux is not None
    if forward is None and special:
        mask = _added(attention_mask, query, key)
        out = explicit_attention(query, key, value, mask, scale, softcap, s_aux)
        return out.transpose(1, 2).contiguous(), None
    if forward is None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    if kwargs.get("position_bias") is not None:
        raise ModelError("attention with position_bias is not supported")
    out = forward.attend(query, key, value, sliding_window, scale, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _added(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``mask`` of a plain forward as what is added to fp32 scores; None means causal there."""
    if mask is not None and mask.dtype != torch.bool:
        return mask[..., : key.shape[-2]]
    if mask is None:
        n, n_keys = query.shape[-2], key.shape[-2]
        mask = torch.ones(n, n_keys, dtype=torch.bool, device=query.device).tril(n_keys - n)
    least = torch.finfo(torch.float32).min
    return torch.zeros(mask.shape, device=query.device).masked_fill_(~mask, least)


@contextmanager
def _active(forward: Forward | Packed | Step) -> Iterator[None]:
    token = _ACTIVE.set(forward)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def _chosen(select: Select, layer: int, n: int) -> torch.Tensor:
    """What ``select`` gives for ``layer``; raises where that can be no token set."""
    keep = select(layer)
    if keep.dtype != torch.bool or keep.shape != (n,) or not bool(keep[-1]):
        raise KvsemError(
            f"layer {layer} needs bool [{n}] with the last token in it, "
            f"got {str(keep.dtype).removeprefix('torch.')} {list(keep.shape)}"
        )
    return keep


def _stop(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    raise _Enough(output[0] if isinstance(output, tuple) else output)


def _sizes(layer: Any) -> tuple[int, int, int]:
    """Heads, key dim and value dim of what a cache layer holds: ``[1, heads, tokens, dim]``."""
    keys, values = layer.keys, layer.values
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ModelError(f"the cache holds {list(keys.shape)} and {list(values.shape)}")
    return keys.shape[1], keys.shape[-1], values.shape[-1]


class LM:
    """A causal LM and its tokenizer, with selective prefill.

    ``shapes``: per layer, from a real forward. ``support`` is filled by `kvsem.selfcheck`:
    capability → (ok, reason). ``tokenizer`` must be a fast one (offsets).
    """

    def __init__(self, model: Any, tokenizer: Any, name: str = "") -> None:
        AttentionInterface.register(ATTENTION, attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self.name = name or type(model).__name__
        self.config = model.config.get_text_config()
        self.n_layers = int(self.config.num_hidden_layers)
        self.layers = self._find_layers()
        self.rotary = next(
            (m for n, m in model.named_modules() if n.split(".")[-1] == "rotary_emb"), None
        )
        self.layer_types: list[str | None] = list(
            getattr(self.config, "layer_types", None) or [None] * self.n_layers
        )
        self._signature = inspect.signature(self.layers[0].forward)
        self.pairs = ["half"] * self.n_layers  # which dims turn together; the self-check finds out
        self.steady_tokens = rope.steady_tokens(self.config, self.layer_types)
        self.support: dict[str, tuple[bool, str]] = {}
        self.hooked = ""  # why selective prefill is off; empty where it works
        self.resumes = False  # without it: prefix pages may still be handed to plain transformers
        self.shapes: list[LayerShape] = []
        try:
            self._check_cache()
            self._hook_attention()
            self.shapes = self._probe()
        except UNFIT as error:
            self.switch_off(one_line(error))
        self._fingerprint = fingerprint.Fingerprint(model, tokenizer)

    def switch_off(self, reason: str) -> None:
        """Give the model back to plain transformers: selective prefill does not work on it."""
        self.hooked = f"selective prefill: {reason}"
        self.model.set_attn_implementation("sdpa" if self.model._supports_sdpa else "eager")
        try:
            self._check_cache()
            self.shapes = self._plain_shapes()
        except UNFIT:
            self.shapes = []
        self.resumes = bool(self.shapes)

    # -- what the model is ------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype  # type: ignore[no-any-return]

    @property
    def max_tokens(self) -> int:
        """The model's context in tokens."""
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 30)

    def namespace(self, tenant: str = "", salt: str = "") -> str:
        """Key of everything that makes KV of this model (and tenant) what it is now.

        Changed weights and switched adapters give another one. ``salt``: from configuration.
        """
        return fingerprint.of_tenant(self._fingerprint.current(), tenant, salt)

    def weights_changed(self) -> None:
        """Say so where `namespace` cannot see it: a few elements written through ``.data``."""
        self._fingerprint.forget()

    def _find_layers(self) -> torch.nn.ModuleList:
        for module in self.model.modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) == self.n_layers:
                return module
        raise ModelError(f"{self.name}: no list of {self.n_layers} decoder layers found")

    def _hook_attention(self) -> None:
        self.model.set_attn_implementation(ATTENTION)
        if self.config._attn_implementation != ATTENTION:
            raise ModelError("the architecture does not take another attention function")

    @torch.no_grad()
    def _probe(self) -> list[LayerShape]:
        forward = self._forward(2, torch.arange(2), probing=True)
        layers: list[Any] = [_ProbeLayer(i) for i in range(self.n_layers)]
        self._run(forward, np.arange(2), Cache(layers=layers))
        if len(forward.shapes) != self.n_layers:
            raise ModelError(
                f"{len(forward.shapes)} of {self.n_layers} layers use the attention function"
            )
        return [self._as_cached(forward.shapes[i], layers[i]) for i in range(self.n_layers)]

    def _as_cached(self, seen: LayerShape, layer: Any) -> LayerShape:
        """``seen`` by the attention function, with the sizes of what the cache was given."""
        heads, key_dim, value_dim = _sizes(layer)
        if (heads, key_dim, value_dim) == (seen.kv_heads, seen.key_dim, seen.value_dim):
            return seen
        expands = [m for n, m in self.layers[layer.layer].named_modules() if n.endswith(EXPANDING)]
        return LayerShape(
            seen.query_heads,
            heads,
            key_dim,
            value_dim,
            seen.window,
            pair_dim=seen.key_dim + seen.value_dim,
            per_key=sum(m.weight.numel() for m in expands),
        )

    def _check_cache(self) -> None:
        """Raise where a layer keeps more than the KV of each token."""
        layers = DynamicCache(config=self.model.config).layers
        if others := {type(layer).__name__ for layer in layers} - KV_LAYERS:
            names = ", ".join(sorted(others))
            raise ModelError(f"layers keep a recurrent state, which is no KV of tokens ({names})")

    @torch.no_grad()
    def _plain_shapes(self) -> list[LayerShape]:
        """What plain transformers caches of two tokens."""
        cache = DynamicCache()
        ids = torch.arange(2, device=self.device)[None]
        self.model(input_ids=ids, use_cache=True, **{CACHE: cache})
        heads = int(self.config.num_attention_heads)
        found = [LayerShape(heads, *_sizes(layer), None) for layer in cache.layers]
        if len(found) != self.n_layers or cache.get_seq_length() != 2:
            raise ModelError("the layers do not all cache the KV of each token")
        return found

    @torch.no_grad()
    def alone(
        self, ids: np.ndarray, position: int
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """K and V of ``ids`` computed with nothing else, the first token at ``position``.

        Per layer ``[kv_heads, tokens, head_dim]``: the reference for moved keys.
        """
        forward = self._forward(len(ids), torch.arange(len(ids)))
        layers: list[Any] = [_ProbeLayer(i) for i in range(self.n_layers)]
        self._run(forward, ids, Cache(layers=layers), offset=position)
        keys = [layer.keys for layer in layers if layer.keys is not None]
        values = [layer.values for layer in layers if layer.values is not None]
        return tuple(k[0] for k in keys), tuple(v[0] for v in values)

    def multiplications(self, computed: np.ndarray, n_logits: int = 1) -> int:
        """Multiplications of one forward over ``computed`` (bool ``[layers, n_tokens]``).

        Linear layers per computed token, each causal (and windowed) query-key pair once for
        scores and once for values, lm_head for ``n_logits`` rows. Norms, softmax and moving keys,
        all below 1 %, are not counted.
        """
        head = int(self.model.get_output_embeddings().weight.numel())
        return n_logits * head + multiplications(self.shapes, self._linear_weights, computed)

    @property
    def _linear_weights(self) -> list[int]:
        """Weights that one token is multiplied by, by layer: of experts, those it is routed to."""
        n_experts = int(getattr(self.config, "num_experts_per_tok", None) or 1)
        found = []
        for layer, shape in zip_longest(self.layers, self.shapes):
            weights = [p for n, p in layer.named_parameters() if not n.endswith("bias")]
            total = sum(p.numel() for p in weights if p.dim() == 2)
            total += sum(p[0].numel() * n_experts for p in weights if p.dim() == 3)
            found.append(total - (shape.per_key if shape else 0))
        return found

    def cost_of(self, start: int, end: int) -> float:
        """Multiplications that computing tokens ``[start, end)`` of a prompt takes, without the
        head."""
        seen = (end * (end + 1) - start * (start + 1)) / 2
        per_pair = sum(s.per_pair for s in self.shapes)
        per_key = end * sum(s.per_key for s in self.shapes)
        return (end - start) * sum(self._linear_weights) + per_key + seen * per_pair

    # -- for parts that read the model (`kvsem.model.Model`) -----------------------------------

    @property
    def hidden_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[1])

    @property
    def key_sizes(self) -> list[tuple[int, int]]:
        """Per layer: KV heads, and numbers a key has in each."""
        return [(s.kv_heads, s.key_dim) for s in self.shapes]

    @property
    def value_sizes(self) -> list[tuple[int, int]]:
        """Per layer: KV heads, and numbers a value has in each."""
        return [(s.kv_heads, s.value_dim) for s in self.shapes]

    @torch.no_grad()
    def embeddings(self, ids: np.ndarray) -> torch.Tensor:
        """Rows of the embedding table, fp32 ``[tokens, hidden size]`` on the CPU."""
        at = torch.from_numpy(np.array(ids, dtype=np.int64)).to(self.device)
        return self.model.get_input_embeddings().weight[at].float().cpu()  # type: ignore[no-any-return]

    @torch.no_grad()
    def first_layers(self, ids: np.ndarray, n: int) -> FirstLayers:
        """Plain transformers over ``ids`` int64 ``[batch, tokens]``, up to layer ``n`` - 1.

        Raises `ModelError` for another number of layers than the model has, and where they keep
        anything else than KV.
        """
        if not 1 <= n <= self.n_layers:
            raise ModelError(f"{self.name} has {self.n_layers} layers, asked for the first {n}")
        self._check_cache()
        self.check_prompt(ids.shape[1])
        cache = DynamicCache()
        handle = self.layers[n - 1].register_forward_hook(_stop)
        try:
            self.model(
                input_ids=torch.from_numpy(ids).to(self.device), use_cache=True, **{CACHE: cache}
            )
        except _Enough as done:
            layers: list[Any] = cache.layers[:n]
            keys, values = zip(*((layer.keys, layer.values) for layer in layers), strict=True)
            return FirstLayers(done.args[0], keys, values)
        finally:
            handle.remove()
        raise ModelError(f"{self.name}: layer {n - 1} did not run")

    # -- buffers ------------------------------------------------------------------------------

    def buffer(self, capacity: int) -> KVBuffer:
        """Uninitialised KV for ``capacity`` tokens on the model's device."""

        def empty(heads: int, dim: int) -> torch.Tensor:
            return torch.empty(1, heads, capacity, dim, dtype=self.dtype, device=self.device)

        return KVBuffer(
            [empty(s.kv_heads, s.key_dim) for s in self.shapes],
            [empty(s.kv_heads, s.value_dim) for s in self.shapes],
        )

    def angles(self, deltas: Sequence[int]) -> dict[str | None, tuple[torch.Tensor, torch.Tensor]]:
        """cos and sin ``[deltas, pairs]`` by layer type, for `rope.shift`."""
        assert self.rotary is not None
        at = torch.tensor(list(deltas), dtype=torch.long, device=self.device)
        return {t: rope.angles(self.rotary, at, t) for t in dict.fromkeys(self.layer_types)}

    def to_cache(self, kv: KV) -> DynamicCache:
        """A transformers cache with copies of the valid tokens, for ``model.generate(ids, …)``.

        Sliding layers keep their full length. The cache must stay shorter than the prompt.
        """
        cache = DynamicCache()
        for layer in range(self.n_layers if kv.length else 0):
            keys, values = kv.read(layer, kv.length)
            cache.update(keys.clone(), values.clone(), layer)
        if cache.get_seq_length() != kv.length:
            raise ModelError(f"cache reports {cache.get_seq_length()} of {kv.length} tokens")
        return cache

    # -- forwards -------------------------------------------------------------------------------

    def _cache(self) -> Cache:
        return Cache(layers=[_KVLayer(i) for i in range(self.n_layers)])

    def _forward(self, n_keys: int, at: torch.Tensor, **more: Any) -> Forward:
        return Forward(n_keys, at, self.n_layers, self.device, **more)

    def _run(
        self,
        forward: Forward | Packed | Step,
        ids: np.ndarray,
        cache: Cache,
        keep: int | torch.Tensor = 1,
        offset: int = 0,
    ) -> torch.Tensor:
        """``ids``: of the rows at layer 0, which stand at their positions plus ``offset``."""
        ignored = torch.zeros(1, 1, 1, 1, device=self.device)  # a 4D mask passes untouched
        with _active(forward):
            out = self.model(
                input_ids=torch.from_numpy(ids).to(self.device)[None],
                position_ids=forward.rows[None] + offset,
                attention_mask=ignored,
                use_cache=True,
                logits_to_keep=keep,
                **{CACHE: cache},
            )
        return out.logits[0].float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def prefill(self, ids: np.ndarray, kv: KV, select: Select) -> tuple[torch.Tensor, np.ndarray]:
        """Compute the selected tokens of the whole prompt ``ids`` over what ``kv`` already holds.

        ``select(layer)`` is asked before each layer, in order, and gives the tokens computed
        there: bool ``[n]``, a subset of the layer before, with the last token always in it.
        Returns fp32 logits ``[vocab]`` at the last position, and bool ``[layers, n]``: what ran.
        """
        return self.prefill_many([Job(ids, kv, select)])[0]

    @torch.no_grad()
    def prefill_many(self, jobs: Sequence[Job]) -> list[tuple[torch.Tensor, np.ndarray]]:
        """`prefill` of several prompts in one forward: their rows share every linear layer, each
        attends over its own ``kv``; one result per job. Prompts of a padded batch: `batch.unpad`.
        """
        if not jobs:
            return []
        for job in jobs:
            self._check_prompt_ids(job.ids)
            self._check_length(len(job.ids), job.kv, self.resumes)
        if len(jobs) > 1 and not self._together([len(job.ids) for job in jobs]):
            return [self.prefill_many([job])[0] for job in jobs]
        sets = [_chosen(job.select, 0, len(job.ids)) for job in jobs]
        if self.hooked:
            return [self._resume_selected(jobs[0].ids, jobs[0].kv, sets[0])]
        packed = Packed(
            [
                self._forward(
                    len(job.ids),
                    keep.nonzero()[:, 0],
                    kv=job.kv,
                    arrived=job.arrived,
                    watch=job.watch,
                )
                for job, keep in zip(jobs, sets, strict=True)
            ]
        )
        rows = [job.ids[keep.numpy()] for job, keep in zip(jobs, sets, strict=True)]
        with self._narrowing([job.select for job in jobs]):
            keep = 1 if len(jobs) == 1 else packed.last
            logits = self._run(packed, np.concatenate(rows), self._cache(), keep)
        for job in jobs:
            job.kv.length = len(job.ids)
        return list(zip(logits, (part.computed for part in packed.parts), strict=True))

    def _together(self, lengths: Sequence[int]) -> bool:
        """Whether prompts of so many tokens may share a forward: it has one set of frequencies,
        and latent attention expands what it is given, which is one prompt's."""
        beyond = {n > self.steady_tokens for n in lengths}
        return not self.hooked and len(beyond) == 1 and not any(s.pair_dim for s in self.shapes)

    @contextmanager
    def _narrowing(self, selects: Sequence[Select]) -> Iterator[None]:
        names = [p for p in self._signature.parameters if p != "self"]

        def hook(layer: int) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
            def narrow(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                forward = _ACTIVE.get()
                assert isinstance(forward, Packed)
                asked = zip(selects, forward.parts, strict=True)
                index = forward.narrow([_chosen(s, layer, part.n_keys) for s, part in asked])
                hidden = args[0] if index is None else args[0].index_select(-2, index)
                named = dict(zip(names[1:], args[1:], strict=False)) | kwargs
                for name, dim in NARROWED.items():
                    if name in named:
                        named[name] = forward.narrowed(named[name], dim)
                return (hidden,), named

            return narrow

        handles = [
            layer.register_forward_pre_hook(hook(i), with_kwargs=True)
            for i, layer in enumerate(self.layers)
            if i > 0
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _resume_selected(
        self, ids: np.ndarray, kv: KV, computed: torch.Tensor
    ) -> tuple[torch.Tensor, np.ndarray]:
        start = len(ids) - int(computed.sum())
        if not bool(computed[start:].all()):
            raise ModelError(f"only what follows an exact prefix can be computed: {self.hooked}")
        kv.length = start
        return self._resume(ids[start:], kv, 1)[-1], computed.numpy()[None].repeat(self.n_layers, 0)

    def _resume(self, ids: np.ndarray, kv: KV, keep: int) -> torch.Tensor:
        """Plain transformers on ``ids`` behind the valid tokens: fp32 logits ``[keep, vocab]``."""
        start, n = kv.length, kv.length + len(ids)
        cache = self.to_cache(kv)
        tokens = torch.from_numpy(ids).to(self.device)[None]
        out = self.model(
            input_ids=tokens,
            attention_mask=torch.ones(1, n, dtype=torch.long, device=self.device),
            use_cache=True,
            logits_to_keep=keep,
            **{CACHE: cache},
        )
        layers: list[Any] = cache.layers
        for i, layer in enumerate(layers):
            kv.write(i, slice(start, n), layer.keys[:, :, start:], layer.values[:, :, start:])
        kv.length = n
        return out.logits[0].float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def extend(self, ids: Sequence[int], kv: KV) -> torch.Tensor:
        """Append ``ids`` behind the valid tokens; fp32 logits ``[len(ids), vocab]``, one per id."""
        n, m = kv.length, len(ids)
        self._check_length(n + m, kv, self.resumes)
        if self.hooked:
            return self._resume(np.asarray(ids, dtype=np.int64), kv, m)
        forward = self._forward(n + m, torch.arange(n, n + m), kv=kv)
        logits = self._run(forward, np.asarray(ids, dtype=np.int64), self._cache(), keep=m)
        kv.length = n + m
        return logits

    @torch.no_grad()
    def question_attention(
        self, ids: np.ndarray, kv: KV, rows: np.ndarray, start: int = 0
    ) -> torch.Tensor:
        """How much the tokens from position ``start`` on look at each token of the assembled cache.

        The tokens at ``rows`` run once over ``kv`` (which must hold every other token); attention
        weights of those from ``start`` on, mean over heads and rows: fp32 ``[layers, n]`` on the
        CPU.
        """
        self._check_length(len(ids), kv)
        watch = Watch(start)
        forward = self._forward(len(ids), torch.from_numpy(rows), kv=kv, watch=watch)
        self._run(forward, ids[rows], self._cache())
        return torch.stack(watch.seen).cpu()

    @torch.no_grad()
    def step(self, ids: Sequence[int], kvs: Sequence[KV]) -> torch.Tensor:
        """One token behind the valid ones of each of several KVs, in one forward; fp32 logits
        ``[len(kvs), vocab]``."""
        for kv in kvs:
            self._check_length(kv.length + 1, kv)
        if not self._together([kv.length + 1 for kv in kvs]):
            return torch.cat([self.extend([i], kv) for i, kv in zip(ids, kvs, strict=True)])
        step = Step(kvs, self.device)
        logits = self._run(step, np.asarray(ids, dtype=np.int64), self._cache(), keep=len(kvs))
        for kv in kvs:
            kv.length += 1
        return logits

    def decode(
        self, first: int, kv: KV, steps: int, stop: frozenset[int] = frozenset()
    ) -> list[int]:
        """Greedy tokens, ``first`` included, up to ``steps`` of them or a token in ``stop``."""
        tokens = [first]
        while len(tokens) < steps and tokens[-1] not in stop:
            tokens.append(int(self.extend([tokens[-1]], kv)[-1].argmax()))
        return tokens

    @torch.no_grad()
    def plain(self, ids: np.ndarray) -> torch.Tensor:
        """A plain transformers forward (sdpa, no mask, one logits row): fp32 ``[vocab]``."""
        tokens = torch.from_numpy(ids).to(self.device)[None]
        out = self.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
        return out.logits[0, -1].float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def plain_decode(self, ids: np.ndarray, steps: int) -> list[int]:
        """Greedy tokens of transformers' own ``generate``."""
        given = torch.from_numpy(ids).to(self.device)[None]
        stop = sorted(self.stop_tokens)
        out = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=steps,
            do_sample=False,
            pad_token_id=stop[0] if stop else 0,
            **GREEDY,
        )
        return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Ids that end an answer."""
        found: set[int] = set()
        for config in (self.model.generation_config, self.config):
            ids = getattr(config, "eos_token_id", None)
            found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
        return frozenset(found)

    def wait(self) -> None:
        """Until the device has done what was asked of it: for clocks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check_prompt(self, n: int, new: int = 0, what: str = "the prompt") -> None:
        """Raise `ModelError` where a prompt of ``n`` tokens and ``new`` more do not fit."""
        if n + new > self.max_tokens:
            more = f" and {new} new ones" if new else ""
            raise ModelError(
                f"{what} has {n} tokens{more}, more than the model's context of {self.max_tokens}"
            )

    def _check_prompt_ids(self, ids: np.ndarray) -> None:
        if ids.ndim != 1 or not len(ids):
            raise ModelError(
                f"a prompt is int64 [tokens], got {[*ids.shape]}: kvsem.batch.unpad takes a padded "
                "batch apart"
            )

    def _check_length(self, n: int, kv: KV, resumes: bool = False) -> None:
        if self.hooked and not resumes:
            raise ModelError(self.hooked)
        self.check_prompt(n)
        if n > kv.capacity:
            raise ModelError(f"{n} tokens do not fit a buffer of {kv.capacity}")


def load(name: str, packaged: bool = False, device: str = "auto", dtype: str = "float32") -> LM:
    """A model from the user's packages (``packaged``), a local folder or the hub, self-checked.

    ``device``: auto, cpu, cuda, cuda:1 …; ``dtype``: float32 or bfloat16. A tokenizer without a
    chat template is fine: the parts of a prompt are then joined by blank lines.
    """
    from kvsem.packaged import packaged_path
    from kvsem.pretrained import read
    from kvsem.selfcheck import check

    if dtype not in ("float32", "bfloat16"):
        raise SettingError("dtype", dtype, "float32 or bfloat16")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    source = str(packaged_path(name)) if packaged else os.path.expanduser(name)
    model, tokenizer = read(name, source, device, getattr(torch, dtype))
    lm = LM(model, tokenizer, name)
    lm.support = check(lm)
    for capability in ("exact_prefix", "moved_chunk", "blend"):
        ok, reason = lm.support[capability]
        if not ok:
            warnings.warn(f"{name}: {capability} is off, exact instead: {reason}", stacklevel=2)
    return lm
