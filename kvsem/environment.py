"""What a run was made with: versions, machine, revision."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "kvsem",
    "torch",
    "transformers",
    "faiss-cpu",
    "faiss-gpu-cu12",
    "sentence-transformers",
    "numpy",
    "hydra-core",
)
EXACT_CODE = ("lm", "forward", "prompt", "engine", "observe", "harness")


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on, and Python's."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe(folder: Path, **more: Any) -> dict[str, Any]:
    """The contents of ``env.json``; ``more`` is added (seeds, digests)."""
    return {
        "versions": versions(),
        "cpu": cpu(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "git_revision": _revision(folder),
        **more,
    }


def source_digest() -> str:
    """SHA-256 of the code that exact's answers and their comparison depend on."""
    folder = Path(__file__).parent
    files = [folder / f"{name}.py" for name in EXACT_CODE] + sorted(folder.glob("metrics/*.py"))
    sha = hashlib.sha256()
    for file in files:
        sha.update(file.read_bytes())
    return sha.hexdigest()


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def keep_memory() -> None:
    """Let the process keep the memory it frees (glibc only; elsewhere nothing happens).

    By default freed tensors go back to the system, and the page faults of getting memory anew
    fall on whichever arm comes after a smaller one: about a tenth of exact's time, unevenly.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX: large tensors from the heap too
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap does not shrink


def device_name(device: torch.device) -> str:
    """``cpu``, or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _revision(folder: Path) -> str | None:
    """The commit of ``folder``, with ``+`` where files were changed; None outside a checkout."""
    try:
        run = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12"]
        done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
