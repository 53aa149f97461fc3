"""What a command line names: a model, an engine of named parts, requests and texts in files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvsem.chunkers.base import Chunker
from kvsem.chunkers.code import CodeChunker
from kvsem.chunkers.dialogue import DialogueChunker
from kvsem.chunkers.fixed import FixedChunker
from kvsem.chunkers.markdown import MarkdownChunker
from kvsem.chunkers.segment import SegmentChunker
from kvsem.chunkers.sentence import SentenceChunker
from kvsem.embedders.base import Embedder
from kvsem.engine import Engine
from kvsem.errors import DataError, SettingError
from kvsem.gates.all_of import AllOf
from kvsem.gates.lexical import LexicalGate
from kvsem.gates.threshold import ThresholdGate
from kvsem.lm import LM, load
from kvsem.packaged import MODELS, packaged_path
from kvsem.recompute.base import Recompute
from kvsem.types import Message, Request, Segment
from kvsem.workloads.jsonl import JsonlWorkload

CHUNKERS: dict[str, Callable[[], Chunker]] = {
    "segment": SegmentChunker,
    "sentence": SentenceChunker,
    "markdown": MarkdownChunker,
    "code": CodeChunker,
    "dialogue": DialogueChunker,
    "fixed": FixedChunker,
}


def load_model(name: str) -> tuple[str, LM]:
    """Where a model comes from, and the model: packaged, a local folder, or the hub."""
    if Path(name).is_dir():
        return f"the folder {Path(name).resolve()}", load(name)
    if name in MODELS:
        return f"its package, converted into {packaged_path(name)}", load(name, packaged=True)
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    return "the hub" + (" (its cache only: HF_HUB_OFFLINE is set)" if offline else ""), load(name)


def make_engine(
    lm: LM, embedder: str, chunker: str, recompute: str, ratio: float, min_score: float
) -> Engine:
    """An engine of the parts that the command line names."""
    return Engine(
        lm,
        chunker=CHUNKERS[chunker](),
        embedder=_embedder(embedder),
        gate=AllOf((ThresholdGate(min_score), LexicalGate())),
        recompute=_rule(recompute, ratio),
    )


def _embedder(name: str) -> Embedder | None:
    if name == "none":
        return None
    if name == "hashing":
        from kvsem.embedders.hashing import HashingEmbedder

        return HashingEmbedder()
    from kvsem.embedders.minilm import MinilmEmbedder

    return MinilmEmbedder()


def _rule(name: str, ratio: float) -> Recompute | None:
    from kvsem.recompute.all import AllRecompute
    from kvsem.recompute.cacheblend import CacheBlendRecompute
    from kvsem.recompute.epic import EpicRecompute
    from kvsem.recompute.krige import KrigeRecompute

    match name:
        case "all":
            return AllRecompute()
        case "epic":
            return EpicRecompute(ratio)
        case "cacheblend":
            return CacheBlendRecompute(ratio)
        case "krige":
            return KrigeRecompute(ratio)
    return None


def read_request(where: str) -> Request:
    """The record ``FILE.jsonl:ID``, or the first of ``FILE.jsonl``; of a conversation its last
    turn, or the one that ID names (``ID/turn-1``)."""
    path, id = where, ""
    if not Path(where).is_file() and Path(where.rpartition(":")[0]).is_file():
        path, _, id = where.rpartition(":")
    requests = list(JsonlWorkload(path, conversations=True))
    id = id or requests[0].id.removesuffix("/turn-1")
    found = [r for r in requests if r.id == id or r.id.startswith(f"{id}/turn-")]
    if not found:
        known = [request.id for request in requests]
        more = ", …" if len(known) > 8 else ""
        raise SettingError("--request", id, f"an id of {path} ({', '.join(known[:8])}{more})")
    return found[-1]


def read_ingest(path: str) -> list[str | Request]:
    """Records of a .jsonl file, or of any other file its paragraphs, each a passage."""
    if path.endswith((".jsonl", ".jsonl.gz")):
        return list(JsonlWorkload(path))
    return list(paragraphs(read_text(path)))


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise DataError(f"{path}: {reason}; expected a text file") from None


def prompt_request(text: str, system: str | None) -> Request:
    """``text`` as one user message: its last paragraph is the question, those ahead passages."""
    *passages, question = paragraphs(text) or ("",)
    segments = [Segment("passage", passage) for passage in passages]
    user = Message("user", (*segments, Segment("question", question)))
    head = (Message("system", (Segment("system", system),)),) if system else ()
    return Request("prompt", (*head, user))


def paragraphs(text: str) -> tuple[str, ...]:
    """What blank lines part."""
    lines = "\n".join("" if not line.strip() else line for line in text.splitlines())
    return tuple(part.strip("\n") for part in lines.split("\n\n") if part.strip())
