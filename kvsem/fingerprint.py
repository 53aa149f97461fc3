"""What makes a model's KV what it is, as one key: names and paths do not count, bytes do.

The key follows the model as it is now: weights that are changed in place, adapters that are
switched on, off, merged or loaded anew. peft is not imported; its layers are known by what
they carry (``adapter_layer_names``, ``active_adapters``, ``merged_adapters``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from kvsem.keys import LAYOUT, Field, digest

SAMPLES = 64  # elements of a tensor that the probe reads at most
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
WRAPPED = ("base_layer", "original_module")  # what peft's layers call the module they stand for
SCALARS = (str, int, float, bool)


def of_tenant(base: str, tenant: str, salt: str = "") -> str:
    """The namespace of one tenant; the nameless one without a salt has the model's own.

    ``salt`` comes from configuration, never from a request: who chooses it chooses whose KV
    is found.
    """
    if not tenant and not salt:
        return base
    return digest("tenant", base=base, tenant=tenant, salt=salt)


class Fingerprint:
    """Namespace of a model and its tokenizer, looked at again on every call of `current`.

    It covers every parameter and persistent buffer, active adapters with their scaling (not
    their names; several count in their order, as they are summed), dtype, layout, and
    configuration and tokenizer as the first call or `forget` found them. A merged adapter
    counts through the weights it was merged into, an inactive one not at all.

    A tensor is digested again where its storage, its version or a probe of 32 to 64 elements,
    spread over its rows and columns, says that it changed. Writing through ``.data`` (or a
    NumPy view) moves neither storage nor version: where such a write also misses every probed
    element of its tensor, nothing shows it, and `forget` has to say so.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.forget()

    def forget(self) -> None:
        """Digest everything anew on the next call."""
        self._settings = self._namespace = ""
        self._known: dict[int, _Known] = {}
        self._state: list[Any] = []
        self._probe = _Probe([])

    def current(self) -> str:
        """Hex key of the model as it is now."""
        if _state(self.model) != self._state or not self._probe.unchanged():
            self._look()
        return self._namespace

    def _look(self) -> None:
        parts = _parts(self.model)  # may unmerge, so the state comes after it
        state = _state(self.model)
        self._namespace = self._digest(parts)
        tensors = (part.value for part in parts if isinstance(part.value, torch.Tensor))
        self._probe = _Probe([self._known[id(tensor)].sample for tensor in tensors])
        self._state = state

    def _digest(self, parts: Sequence[_Part]) -> str:
        sha = hashlib.sha256()
        for part in parts:
            value = part.value
            if isinstance(value, torch.Tensor):
                value = self._of_tensor(value, part.merged)
            name = part.name.removeprefix("base_model.model.")  # peft's wrapper of a whole model
            sha.update(bytes.fromhex(digest("part", name=name, value=value)))
        self._prune(parts)
        self._settings = self._settings or _settings(self.model, self.tokenizer)
        dtype = str(next(self.model.parameters()).dtype)
        return digest(
            "namespace",
            weights=sha.hexdigest(),
            settings=self._settings,
            dtype=dtype,
            layout=LAYOUT,
        )

    def _of_tensor(self, tensor: torch.Tensor, merged: tuple[str, ...]) -> str:
        known, stamp = self._known.get(id(tensor)), (*_stamp(tensor), *merged)
        if known is None or known.stamp != stamp or known.sampled != _bytes(known.sample):
            known = self._known[id(tensor)] = _known(tensor, stamp)
        return known.digest

    def _prune(self, parts: Sequence[_Part]) -> None:
        """Let go of what left the model; inactive adapters stay known until they come back."""
        alive = {id(part.value) for part in parts}
        alive.update(map(id, self.model.parameters()))
        alive.update(map(id, self.model.buffers()))
        self._known = {key: known for key, known in self._known.items() if key in alive}


def _settings(model: Any, tokenizer: Any) -> str:
    """Configuration (rope and quantisation in it) and tokenizer."""
    config = model.config.get_text_config().to_dict()
    config = {k: v for k, v in config.items() if not k.endswith("_name_or_path")}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return digest(
        "settings",
        config=json.dumps(config, sort_keys=True, default=str),
        tokenizer=backend.to_str() if backend is not None else repr(tokenizer),
        template=str(getattr(tokenizer, "chat_template", None)),
    )


# One tensor ---------------------------------------------------------------------------------


class _Known(NamedTuple):
    """A digested tensor. The views keep its storage, so that no other one gets its address."""

    tensor: torch.Tensor
    stamp: tuple[Any, ...]
    sample: torch.Tensor
    sampled: bytes
    digest: str


def _stamp(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Moves with the storage and with every write that torch counts (not on inference tensors)."""
    return id(tensor), tensor.data_ptr(), _version(tensor)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _known(tensor: torch.Tensor, stamp: tuple[Any, ...]) -> _Known:
    sample = _sample(tensor)
    sampled = _bytes(sample)
    data = tensor.detach().contiguous().cpu()
    sha = hashlib.sha256(f"{tuple(data.shape)}{data.dtype}".encode())
    sha.update(data.view(-1).view(torch.uint8).numpy().data)
    return _Known(tensor, stamp, sample, sampled, sha.hexdigest())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `SAMPLES` elements, or half as many, as integers, all over rows and columns."""
    flat = tensor.data
    if flat.is_contiguous():
        flat = flat.view(-1)
    while flat.dim() > 1:  # strides with gaps or in another order: the diagonal is a view too
        flat = flat.diagonal(0, 0, 1)
    step, width = max(1, flat.numel() // SAMPLES), tensor.shape[-1] if tensor.dim() else 1
    if step >= width:  # a step of whole rows would read one column only
        step += (int(0.618 * width) - step) % width
    return flat.view(INTEGERS[tensor.element_size()])[::step][:SAMPLES]


def _bytes(sample: torch.Tensor) -> bytes:
    return sample.cpu().numpy().tobytes()


class _Probe:
    """Samples of many tensors read at once: one copy per device and width."""

    def __init__(self, samples: Sequence[torch.Tensor]) -> None:
        groups: dict[Any, list[Any]] = {}
        for sample in samples:
            on_cpu = sample.device.type == "cpu"
            group = groups.setdefault((sample.device, sample.dtype), [])
            group.append(sample.numpy() if on_cpu else sample)  # NumPy joins small views faster
        self._groups = list(groups.values())
        self._before = self._read()

    def _read(self) -> list[bytes]:
        return [_joined(group).tobytes() for group in self._groups]

    def unchanged(self) -> bool:
        return self._read() == self._before


def _joined(group: list[Any]) -> np.ndarray:
    if isinstance(group[0], np.ndarray):
        return np.concatenate(group)
    return torch.cat(group).cpu().numpy()


# The parts of a model -----------------------------------------------------------------------


def _state(model: nn.Module) -> list[Any]:
    """What moves when parts or counted writes do: no names and no bytes, as it is asked often."""
    state: list[Any] = []
    tensors: list[torch.Tensor | None] = []
    modules: list[Any] = [model]
    for module in modules:  # grows as it goes
        if module is not None:
            if _is_tuner(module):
                _state_of_tuner(module, state, tensors)
            tensors += module._parameters.values()
            tensors += module._buffers.values()
            modules += module._modules.values()
    held = [tensor for tensor in tensors if tensor is not None]
    state += map(id, held)
    state += [tensor.data_ptr() for tensor in held]
    state += map(_version, held)
    return state


def _state_of_tuner(tuner: Any, state: list[Any], tensors: list[torch.Tensor | None]) -> None:
    """Which adapters are on, and what the layer's dicts hold for each (scaling and the like)."""
    state += (tuner.disable_adapters, *tuner.active_adapters, "merged", *tuner.merged_adapters)
    for name, values in vars(tuner).items():
        if type(values) is dict and name[0] != "_":
            for value in values.values():
                if type(value) in SCALARS:
                    state.append(value)
                elif isinstance(value, torch.Tensor):
                    tensors.append(value)
                else:
                    state.append(id(value))


class _Part(NamedTuple):
    """Something that a forward computes with; ``merged``: adapters inside the tensor."""

    name: str
    value: torch.Tensor | Field
    merged: tuple[str, ...] = ()


def _parts(model: nn.Module) -> list[_Part]:
    """Parameters and persistent buffers of the model and of its active adapters, in order."""
    found: list[_Part] = []
    _visit(model, "", found)
    return found


def _visit(
    module: nn.Module,
    path: str,
    found: list[_Part],
    merged: tuple[str, ...] = (),
    every: bool = False,  # buffers that are not persistent too
) -> None:
    if _is_tuner(module):
        _visit_tuner(module, path, found)
        return
    skipped = set() if every else module._non_persistent_buffers_set
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in skipped:
            found.append(_Part(path + name, tensor, merged))
    for name, child in module._modules.items():
        if child is not None:
            _visit(child, f"{path}{name}.", found, merged, every)


def _is_tuner(module: Any) -> bool:
    """peft's layers; on the class, where a module looks up what it lacks quickly."""
    return hasattr(type(module), "adapter_layer_names")


def _visit_tuner(tuner: Any, path: str, found: list[_Part]) -> None:
    """What ``tuner`` stands for under the name it has without it, then its active adapters."""
    if tuner.disable_adapters and tuner.merged_adapters:
        tuner.unmerge()  # as its next forward would, behind the key's back
    merged = tuple(tuner.merged_adapters)
    own: dict[str, Any] = {}
    for name, value in (vars(tuner) | tuner._parameters | tuner._buffers | tuner._modules).items():
        if name in WRAPPED or _is_tuner(value):
            if value is not None:
                _visit(value, path, found, merged)
        elif name[0] != "_" and name not in ("training", "merged_adapters"):
            own[name] = value
    if not tuner.disable_adapters and not merged:
        for adapter in tuner.active_adapters:
            _visit_adapter(own, adapter, path, found)


def _visit_adapter(own: dict[str, Any], adapter: str, path: str, found: list[_Part]) -> None:
    """``own``: a layer's attributes; those with keys hold one value per adapter."""
    keyed = {name for name, value in own.items() if hasattr(value, "keys")}
    if not any(adapter in own[name] for name in keyed):
        return
    parts: list[_Part] = []
    for name, value in own.items():
        if name not in keyed:
            _add(value, name, parts)
        elif adapter in value:
            _add(value[adapter], name, parts)
    settings = [part[:2] for part in parts if not isinstance(part.value, torch.Tensor)]
    found.append(_Part(f"{path}adapter", repr(sorted(settings))))
    found += [_Part(path + p.name, p.value) for p in parts if isinstance(p.value, torch.Tensor)]


def _add(value: Any, path: str, found: list[_Part]) -> None:
    """``value`` and what is in it; of an object that is none of these, its class."""
    if value is None or isinstance(value, (torch.Tensor, *SCALARS)):
        found.append(_Part(path, value))
    elif isinstance(value, nn.Module):
        _visit(value, f"{path}.", found, every=True)
    elif isinstance(value, Mapping):
        for key in value:
            _add(value[key], f"{path}.{key}", found)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _add(item, f"{path}.{i}", found)
    else:
        found.append(_Part(path, type(value).__qualname__))
