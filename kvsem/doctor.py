"""What a user needs to know before the first run: does everything work here, with this model?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from rich.table import Table
from rich.text import Text

from kvsem.contexts.behind_system import BehindSystem
from kvsem.engine import Engine
from kvsem.environment import cpu, versions
from kvsem.errors import KvsemError, one_line
from kvsem.index.flat import FlatIndex
from kvsem.inputs import load_model
from kvsem.lm import LM
from kvsem.packaged import cache_root, packaged_path
from kvsem.recompute.all import AllRecompute
from kvsem.selfcheck import tolerance
from kvsem.tracking import state
from kvsem.types import Output, Request

State = Literal["ok", "note", "failed"]
SYSTEM = "Answer from the passages."
PASSAGES = (
    "The bridge over the river was opened in 1847 and closed in 1912.",
    "The museum of the island holds a letter that the painter wrote to the captain.",
)
QUESTION = "When was the bridge opened?"


@dataclass(frozen=True)
class Check:
    """One line of the doctor: ``failed`` makes the command fail, a ``note`` does not."""

    name: str
    state: State
    text: str


def examine(model: str) -> Iterator[Check]:
    """Every check, in order, each as soon as it is known."""
    yield from environment()
    yield faiss()
    yield embedder()
    can_track, wandb = state()
    yield Check("W&B", "ok" if can_track else "note", wandb)
    try:
        source, lm = load_model(model)
    except KvsemError as error:
        yield Check("model", "failed", one_line(error))
        return
    yield Check("model", "ok", f"{model} from {source}")
    yield Check("model", "ok", _described(lm))
    yield from support(lm)
    yield from serving(lm)


def environment() -> Iterator[Check]:
    """Versions and machine."""
    yield Check("versions", "ok", ", ".join(f"{n} {v}" for n, v in versions().items()))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    yield Check("machine", "ok", f"{cpu()}, {gpu}, {torch.get_num_threads()} torch threads")
    yield Check("cache", "ok", f"{cache_root()} (KVSEM_CACHE names another folder)")


def faiss() -> Check:
    """Which FAISS there is, and whether it finds a vector again."""
    try:
        index = FlatIndex(4, "doctor")
        import faiss as library
    except KvsemError as error:
        return Check("FAISS", "failed", one_line(error))
    index.add([7, 8], np.eye(4, dtype=np.float32)[:2])
    found = index.search(np.array([0.9, 0.1, 0, 0], dtype=np.float32), 1)
    build = "GPU build" if hasattr(library, "StandardGpuResources") else "CPU build"
    text = f"{library.__version__}, {build} ({' '.join(library.get_compile_options().split())})"
    if [id for id, _ in found] != [7]:
        return Check("FAISS", "failed", f"{text}: a search found {found}, not id 7")
    return Check("FAISS", "ok", text)


def embedder() -> Check:
    """Whether the default embedder is installed; nothing but similar chunks needs it."""
    try:
        return Check("embedder", "ok", f"minilm in {packaged_path('minilm')}")
    except KvsemError as error:
        return Check("embedder", "note", f"{one_line(error)} (or embedder=hashing)")


def support(lm: LM) -> Iterator[Check]:
    """The self-check's table; what is off is computed exactly instead, and said so."""
    for name, (ok, reason) in lm.support.items():
        text = "works" if ok else f"off: {reason}"
        yield Check(name, "ok" if ok else "note", text)


def _described(lm: LM) -> str:
    dtype = str(lm.dtype).removeprefix("torch.")
    heads = sorted({shape.kv_heads for shape in lm.shapes})
    kv = f", {'/'.join(map(str, heads))} KV heads" if heads else ""
    context = f"context of {lm.max_tokens} tokens"
    return f"{lm.n_layers} layers{kv}, {dtype} on {lm.device}, {context}"


# A served request -----------------------------------------------------------------------------


def serving(lm: LM) -> Iterator[Check]:
    """Requests served with reuse, compared with exact computation; the books of every pool."""
    request = Request.rag("doctor", PASSAGES[::-1], QUESTION, system=SYSTEM, max_new_tokens=4)
    exact = Engine(lm, reuse=(), admit="none").generate(request)
    for name, trial in (("prefix", _prefix), ("chunks", _chunks), ("recompute", _recompute)):
        yield _tried(name, trial, lm, request, exact)


Trial = Callable[[LM, Request, Output], str]


def _tried(name: str, trial: Trial, lm: LM, request: Request, exact: Output) -> Check:
    """What a trial says; off is no failure as long as something else is reused."""
    needs = "exact_prefix" if name == "prefix" else "moved_chunk"
    ok, reason = lm.support.get(needs, (False, "not checked"))
    if not ok:
        state: State = "failed" if needs == "exact_prefix" else "note"
        return Check(name, state, f"nothing is reused: {needs} is off: {reason}")
    try:
        return Check(name, "ok", trial(lm, request, exact))
    except (KvsemError, RuntimeError) as error:
        return Check(name, "failed", one_line(error))


def _prefix(lm: LM, request: Request, exact: Output) -> str:
    """The same request twice: the second time it is read from pages, and the answer is exact's."""
    engine = Engine(lm, reuse=("prefix",))
    engine.generate(request)
    second = engine.generate(request)
    n = _reused(engine, second, "prefix")
    _same(lm, second, exact)
    return f"{n} of {second.plan.n_tokens} tokens from pages, logits as computed exactly"


def _chunks(lm: LM, request: Request, exact: Output) -> str:
    """Passages that were ingested in another order; approximate, so only counted."""
    engine = _ingested(lm, Engine(lm, context=BehindSystem()))
    output = engine.generate(request)
    n = _reused(engine, output, "chunk")
    kl = torch.nn.functional.kl_div(
        output.logits.double().log_softmax(-1),
        exact.logits.double().log_softmax(-1),
        log_target=True,
        reduction="sum",
    )
    return f"{n} of {output.plan.n_tokens} tokens moved from chunks, KL to exact {float(kl):.2g}"


def _recompute(lm: LM, request: Request, exact: Output) -> str:
    """All matched tokens recomputed: exact again, whatever the chunks hold."""
    engine = _ingested(lm, Engine(lm, context=BehindSystem(), recompute=AllRecompute()))
    output = engine.generate(request)
    n = _reused(engine, output, "recomputed")
    _same(lm, output, exact)
    return f"{n} matched tokens recomputed, logits as computed exactly"


def _ingested(lm: LM, engine: Engine) -> Engine:
    engine.ingest(PASSAGES, system=SYSTEM)
    return engine


def _reused(engine: Engine, output: Output, name: str) -> int:
    """Tokens of one provenance; raises where there are none, or where the books are wrong."""
    engine.memory.pool.check()
    counts = output.counts()
    if sum(counts.values()) != output.plan.n_tokens:
        raise KvsemError(f"{counts} do not add up to {output.plan.n_tokens} tokens")
    if not counts[name]:
        raise KvsemError(f"nothing was reused as {name}: {output.plan.missed()}")
    return counts[name]


def _same(lm: LM, output: Output, exact: Output) -> None:
    error = float((output.logits - exact.logits).abs().max() / exact.logits.abs().max())
    if not error <= tolerance(lm):
        raise KvsemError(f"logits differ from exact by {error:.1e}, more than {tolerance(lm):.0e}")


# Table ----------------------------------------------------------------------------------------

STYLES = {"ok": "green", "note": "yellow", "failed": "bold red"}


def table(checks: Sequence[Check]) -> Table:
    grid = Table(box=None, pad_edge=False, show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    last = ""
    for check in checks:
        name = check.name if check.name != last else ""
        grid.add_row(Text(check.state, STYLES[check.state]), name, Text(check.text))
        last = check.name
    return grid
