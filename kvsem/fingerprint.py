"""What makes a model's KV what it is, as one key: names and paths do not count, bytes do."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from kvsem.keys import LAYOUT, digest


def namespace(model: Any, tokenizer: Any) -> str:
    """Key over weights, configuration (rope and quantisation in it), tokenizer, dtype, layout."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return digest(
        "namespace",
        weights=weights_digest(model),
        config=model.config.get_text_config().to_json_string(use_diff=False),
        tokenizer=backend.to_str() if backend is not None else repr(tokenizer),
        template=str(getattr(tokenizer, "chat_template", None)),
        dtype=str(next(model.parameters()).dtype),
        layout=LAYOUT,
    )


def of_tenant(base: str, tenant: str) -> str:
    """The namespace of one tenant; the nameless one has the model's own."""
    return digest("tenant", base=base, tenant=tenant) if tenant else base


def weights_digest(model: Any) -> str:
    """Hex SHA-256 over every parameter's name, shape, dtype and bytes."""
    sha = hashlib.sha256()
    for name, tensor in model.named_parameters():
        data = tensor.detach().contiguous().cpu()
        sha.update(f"{name}{tuple(data.shape)}{data.dtype}".encode())
        sha.update(data.view(torch.uint8).numpy().data)
    return sha.hexdigest()
