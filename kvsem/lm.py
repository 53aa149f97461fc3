"""The model adapter: selective prefill on any causal LM of transformers that passes the self-check.

The only file that touches transformers' model and cache internals. A cache handed to the
model writes the K and V of the computed tokens into full-length buffers at their absolute
positions and returns the whole buffers; one registered attention function builds its mask
from absolute positions; hooks at the decoder layers narrow the token set by depth.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvsem import fingerprint, rope
from kvsem.errors import KvsemError, ModelError, SettingError, one_line
from kvsem.forward import KV, Forward, KVBuffer, LayerShape, Step, multiplications

ATTENTION = "kvsem"  # name of our attention function in transformers' registry
NARROWED = {"position_ids": -1, "position_embeddings": -2}  # layer inputs with a token axis

Select = Callable[[int], torch.Tensor]  # layer -> bool [n_tokens] on the CPU


_ACTIVE: ContextVar[Forward | Step | None] = ContextVar("kvsem_forward", default=None)


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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Our attention function: transformers' sdpa outside a selective forward."""
    forward = _ACTIVE.get()
    if forward is None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    for unknown in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(unknown) is not None:
            raise ModelError(f"attention with {unknown} is not supported")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = forward.attend(query, key, value, sliding_window, scale)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def _active(forward: Forward | Step) -> Iterator[None]:
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
        self.support: dict[str, tuple[bool, str]] = {}
        self.hooked = ""  # why selective prefill is off; empty where it works
        self.shapes: list[LayerShape] = []
        try:
            self._hook_attention()
            self.shapes = self._probe()
        except (KvsemError, RuntimeError, TypeError, ValueError, AssertionError, KeyError) as error:
            self.switch_off(one_line(error))
        self._fingerprint = fingerprint.Fingerprint(model, tokenizer)

    def switch_off(self, reason: str) -> None:
        """Give the model back to plain transformers: selective prefill does not work on it."""
        self.hooked = f"selective prefill: {reason}"
        self.model.set_attn_implementation("sdpa" if self.model._supports_sdpa else "eager")

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
        return [forward.shapes[i] for i in range(self.n_layers)]

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
        """Weights of the linear modules, by layer."""
        return [
            sum(m.weight.numel() for m in layer.modules() if isinstance(m, torch.nn.Linear))
            for layer in self.layers
        ]

    def cost_of(self, start: int, end: int) -> float:
        """Multiplications that computing tokens ``[start, end)`` of a prompt takes, without the
        head."""
        seen = (end * (end + 1) - start * (start + 1)) / 2
        per_pair = sum(s.query_heads * (s.key_dim + s.value_dim) for s in self.shapes)
        return (end - start) * sum(self._linear_weights) + seen * per_pair

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
        """cos and sin ``[deltas, head_dim]`` by layer type, for `rope.shift`."""
        assert self.rotary is not None
        at = torch.tensor(list(deltas), dtype=torch.long, device=self.device)
        return {t: rope.angles(self.rotary, at, t) for t in dict.fromkeys(self.layer_types)}

    def to_cache(self, kv: KV) -> DynamicCache:
        """A transformers cache with copies of the valid tokens, for ``model.generate(ids, …)``.

        Sliding layers keep their full length. The cache must stay shorter than the prompt.
        """
        cache = DynamicCache()
        for layer in range(self.n_layers):
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
        self, forward: Forward | Step, ids: np.ndarray, cache: Cache, keep: int = 1, offset: int = 0
    ) -> torch.Tensor:
        """``ids``: of the rows at layer 0, which stand at their positions plus ``offset``."""
        ignored = torch.zeros(1, 1, 1, 1, device=self.device)  # a 4D mask passes untouched
        with _active(forward):
            out = self.model(
                input_ids=torch.from_numpy(ids).to(self.device)[None],
                position_ids=forward.rows[None] + offset,
                attention_mask=ignored,
                cache=cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        return out.logits[0].float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def prefill(self, ids: np.ndarray, kv: KV, select: Select) -> tuple[torch.Tensor, np.ndarray]:
        """Compute the selected tokens of the whole prompt ``ids`` over what ``kv`` already holds.

        ``select(layer)`` is asked before each layer, in order, and gives the tokens computed
        there: bool ``[n]``, a subset of the layer before, with the last token always in it.
        Returns fp32 logits ``[vocab]`` at the last position, and bool ``[layers, n]``: what ran.
        """
        n = len(ids)
        self._check_length(n, kv)
        forward = self._forward(n, _chosen(select, 0, n).nonzero()[:, 0], kv=kv)
        with self._narrowing(select):
            logits = self._run(forward, ids[forward.at.numpy()], self._cache())[-1]
        kv.length = n
        return logits, forward.computed

    @contextmanager
    def _narrowing(self, select: Select) -> Iterator[None]:
        names = [p for p in self._signature.parameters if p != "self"]

        def hook(layer: int) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
            def narrow(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                forward = _ACTIVE.get()
                assert isinstance(forward, Forward)
                index = forward.narrow(_chosen(select, layer, forward.n_keys))
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

    @torch.no_grad()
    def extend(self, ids: Sequence[int], kv: KV) -> torch.Tensor:
        """Append ``ids`` behind the valid tokens; fp32 logits ``[len(ids), vocab]``, one per id."""
        n, m = kv.length, len(ids)
        self._check_length(n + m, kv)
        forward = self._forward(n + m, torch.arange(n, n + m), kv=kv)
        logits = self._run(forward, np.asarray(ids, dtype=np.int64), self._cache(), keep=m)
        kv.length = n + m
        return logits

    @torch.no_grad()
    def question_attention(self, ids: np.ndarray, kv: KV, rows: np.ndarray) -> torch.Tensor:
        """How much the tokens at ``rows`` look at each token of the assembled cache.

        They run once over ``kv`` (which must hold every other token); attention weights, mean
        over heads and rows: fp32 ``[layers, n]`` on the CPU.
        """
        self._check_length(len(ids), kv)
        forward = self._forward(len(ids), torch.from_numpy(rows), kv=kv, capture=[])
        self._run(forward, ids[rows], self._cache())
        assert forward.capture is not None
        return torch.stack(forward.capture).cpu()

    @torch.no_grad()
    def step(self, ids: Sequence[int], kvs: Sequence[KV]) -> torch.Tensor:
        """One token behind the valid ones of each of several KVs, in one forward; fp32 logits
        ``[len(kvs), vocab]``."""
        for kv in kvs:
            self._check_length(kv.length + 1, kv)
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

    def _check_length(self, n: int, kv: KV) -> None:
        if self.hooked:
            raise ModelError(self.hooked)
        self.check_prompt(n)
        if n > kv.capacity:
            raise ModelError(f"{n} tokens do not fit a buffer of {kv.capacity}")


def load(name: str, packaged: bool = False, device: str = "auto", dtype: str = "float32") -> LM:
    """A model from the user's packages (``packaged``), a local folder or the hub, self-checked.

    ``device``: auto, cpu, cuda, cuda:1 …; ``dtype``: float32 or bfloat16.
    """
    from kvsem.packaged import packaged_path
    from kvsem.selfcheck import check

    if dtype not in ("float32", "bfloat16"):
        raise SettingError("dtype", dtype, "float32 or bfloat16")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    source = str(packaged_path(name)) if packaged else name
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype)
        )
        model.to(torch.device(device))  # type: ignore[arg-type]
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        raise ModelError(
            f"model {name!r} cannot be loaded from {source}: {one_line(error)}"
        ) from error
    lm = LM(model, tokenizer, name)
    lm.support = check(lm)
    for capability in ("exact_prefix", "moved_chunk", "blend"):
        ok, reason = lm.support[capability]
        if not ok:
            warnings.warn(f"{name}: {capability} is off, exact instead: {reason}", stacklevel=2)
    return lm
