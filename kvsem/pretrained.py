"""A model and its tokenizer from a local folder or the hub, and what is missing in one line."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError

from kvsem.errors import ModelError, one_line

UNREADABLE = (OSError, ValueError, RuntimeError, AssertionError, ImportError, SafetensorError)
PLAIN_TEXT = "The answer is 42."


def read(name: str, source: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer of ``source``, a folder or a name on the hub.

    Code in a model's repository is never run. Raises `ModelError`, about the model ``name``.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # the hub's library says every try; what failed is told once, below
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    _say_if_asked(source)
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
    if folder.is_dir() and not (folder / "config.json").is_file():
        return f"model {name!r} cannot be loaded from {source}: it has no config.json"
    if folder.is_dir():
        return f"model {name!r} cannot be loaded from {source}: {one_line(error)}"
    searched = f"model {name!r}: there is no folder {folder}"
    if source.startswith((".", "/", "~")) or source.count("/") > 1:  # no name on the hub
        return searched
    searched += f", it is not in the hub's cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        return f"{searched}, and the hub is not asked (HF_HUB_OFFLINE is set)"
    return f"{searched}, and from the hub: {one_line(error)}"


def _say_if_asked(source: str) -> None:
    """Where the hub does not answer, half a minute of tries must not pass in silence."""
    if Path(source).is_dir() or constants.HF_HUB_OFFLINE:
        return
    try:
        known = try_to_load_from_cache(source, "config.json")
    except HFValidationError:  # a path: no name on the hub, and it is not asked
        return
    if not isinstance(known, str):
        warnings.warn(f"asking the hub for {source!r}", stacklevel=3)


def _tokenizer(name: str, source: str) -> Any:
    """The tokenizer, which must be a fast one: chunks map to tokens by offsets."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(
            f"model {name!r}: no tokenizer can be read from {source} (a tokenizer.json is needed)"
            f"{_reason(error)}"
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


def _reason(error: BaseException) -> str:
    """What the library says, unless its first line is the head of a list."""
    line = one_line(error).rstrip()
    return "" if line.endswith(":") else f": {line}"
