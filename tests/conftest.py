"""No network, one thread, and the tiny models once a session."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported
os.environ.setdefault("WANDB_MODE", "offline")

from typing import Any

import pytest
import torch
from hypothesis import settings

from kvsem.lm import LM
from tests.tiny import KINDS, tiny_lm, tiny_model

# CI runs the same examples every time; elsewhere each run looks for new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def lm(kind: str) -> LM:
    """A tiny model of each architecture, with selective prefill; tests leave it as it is."""
    return tiny_lm(kind)


@pytest.fixture(scope="session")
def plain(kind: str) -> Any:
    """The same weights as `lm`, in a plain transformers model that kvsem never touched."""
    return tiny_model(kind)


@pytest.fixture(scope="session")
def llama() -> LM:
    """One architecture, where the others would test nothing more."""
    return tiny_lm("llama")
