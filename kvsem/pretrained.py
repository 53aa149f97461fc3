"""A model and its tokenizer from a local folder or the hub, and what is missing in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from safetensors import SafetensorError

from kvsem.errors import ModelError, one_line

UNREADABLE = (OSError, ValueError, RuntimeError, AssertionError, ImportError, SafetensorError)
PLAIN_TEXT = "The answer is 42."


def read(name: str, source: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer of ``source``, a folder or a name on the hub.

    Code in a model's repository is never run. Raises `ModelError`, about the model ``name``.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except UNREADABLE as error:
        raise ModelError(_why_not(name, source, error)) from error
    tokenizer = _tokenizer(name, source)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=False
        )
        model.to(torch.device(device))  # type: ignore[arg-type]
    except UNREADABLE as error:
        raise ModelError(
            f"model {name!r} cannot be loaded from {source}: {one_line(error)}"
        ) from error
    return model, tokenizer


def _why_not(name: str, source: str, error: BaseException) -> str:
    folder = Path(source).absolute()
    if folder.is_dir():
        return f"model {name!r} cannot be loaded from {source}: {one_line(error)}"
    searched = f"model {name!r}: there is no folder {folder}"
    if source.startswith((".", "/", "~")) or source.count("/") > 1:  # no name on the hub
        return searched
    searched += f", it is not in the hub's cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        return f"{searched}, and the hub is not asked (HF_HUB_OFFLINE is set)"
    return f"{searched}, and from the hub: {one_line(error)}"


def _tokenizer(name: str, source: str) -> Any:
    """The tokenizer, which must be a fast one: chunks map to tokens by offsets."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(
            f"model {name!r}: no tokenizer can be read from {source} (a tokenizer.json is needed): "
            f"{one_line(error)}"
        ) from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"model {name!r}: {type(tokenizer).__name__} is a slow tokenizer without offsets; "
            "kvsem needs one with a tokenizer.json"
        )
    # where a folder has no tokenizer, some classes make one that knows its special tokens only
    ids = tokenizer(PLAIN_TEXT, add_special_tokens=False)["input_ids"]
    if set(ids) <= {tokenizer.unk_token_id}:
        raise ModelError(f"model {name!r}: no vocabulary in {source} (a tokenizer.json is needed)")
    return tokenizer
