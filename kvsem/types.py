"""The nouns of kvsem: plain, frozen data that passes between the parts.

A prompt of ``n`` tokens is described along the token axis everywhere: provenance, sources
and masks are arrays of length ``n``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from kvsem.errors import DataError, check_count

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["system", "passage", "target", "turn", "question"]
CACHEABLE: frozenset[str] = frozenset({"system", "passage", "target", "turn"})
SEPARATOR = "\n\n"  # stands between the segments of a message


class Provenance(IntEnum):
    """Where the KV of one prompt token comes from; every token has exactly one."""

    NEW = 0  # computed, no candidate
    PREFIX = 1  # exact: same tokens in the same context
    CHUNK = 2  # identical content that stood in another context
    SEMANTIC = 3  # aligned from another chunk
    RECOMPUTED = 4  # matched (chunk or semantic), but computed at the last layer, as the recompute
    # rule or already the gate says


@dataclass(frozen=True)
class Span:
    """Half-open character range ``[start, end)``."""

    start: int
    end: int


@dataclass(frozen=True)
class Segment:
    """A piece of a message's content; ``kind`` says whether a cache may cover it."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Message:
    """One chat message; its content is its segments joined by a blank line."""

    role: str
    segments: tuple[Segment, ...]

    @property
    def content(self) -> str:
        return SEPARATOR.join(segment.text for segment in self.segments)


@dataclass(frozen=True)
class Request:
    """What a user asks. Either ``messages`` (the chat template is applied) or a plain ``text``.

    ``donors`` are ingested on this request's behalf before it is asked. ``group`` names the
    document that several records share (bootstrap intervals are clustered by it). With
    ``prompt_logprobs`` every token is computed, so that each has its log probability.
    """

    id: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    answers: tuple[str, ...] = ()
    max_new_tokens: int = 16
    tenant: str = ""
    prompt_logprobs: bool = False
    donors: tuple[str, ...] = ()
    group: str | None = None

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens, 0)

    @classmethod
    def rag(
        cls,
        id: str,
        passages: Iterable[str],
        question: str,
        *,
        system: str | None = None,
        **more: Any,
    ) -> Request:
        """System message, then one user message: passages, then ``Question: …``."""
        user = [Segment("passage", text) for text in passages]
        user.append(Segment("question", f"Question: {question}"))
        return cls(id, (*_system(system), Message("user", tuple(user))), **more)

    @classmethod
    def donor_target(
        cls,
        id: str,
        donor: str,
        target: str,
        question: str,
        *,
        system: str | None = None,
        **more: Any,
    ) -> Request:
        """``donor`` is ingested, ``target`` is asked; both directly behind the system prompt."""
        user = [Segment("target", target)]
        if question:
            user.append(Segment("question", f"Question: {question}"))
        return cls(id, (*_system(system), Message("user", tuple(user))), donors=(donor,), **more)

    def without(self, kinds: Iterable[str]) -> Request:
        """The same request with the segments of ``kinds`` left out (control ``no_context``)."""
        gone = set(kinds)
        kept = (
            Message(m.role, tuple(s for s in m.segments if s.kind not in gone))
            for m in self.messages
        )
        return replace(self, messages=tuple(m for m in kept if m.segments))

    def substituted(self) -> Request:
        """The same request with the donor's text in the target's place (control ``substitute``).

        Raises `DataError` where there is not one donor and one target.
        """
        if len(self.donors) != 1 or len(self.segments("target")) != 1:
            raise DataError(f"request {self.id!r}: substitute needs one donor and one target")

        def stand_in(segment: Segment) -> Segment:
            return Segment("target", self.donors[0]) if segment.kind == "target" else segment

        messages = (Message(m.role, tuple(map(stand_in, m.segments))) for m in self.messages)
        return replace(self, messages=tuple(messages))

    def segments(self, *kinds: str) -> tuple[str, ...]:
        """Texts of the segments of ``kinds``, in prompt order."""
        return tuple(s.text for m in self.messages for s in m.segments if s.kind in kinds)

    @property
    def system(self) -> str | None:
        """The system message, or None where the request has none."""
        return next(iter(self.segments("system")), None)


def _system(text: str | None) -> tuple[Message, ...]:
    return (Message("system", (Segment("system", text),)),) if text else ()


@dataclass(frozen=True)
class Chunk:
    """A semantic span of one prompt.

    Tokens ``[start, end)`` of the prompt; a separator ahead of the text belongs to it.
    ``inner`` is the part of ``ids`` away from the edges of the text: the rest may tokenise
    differently behind another separator, and is compared token by token. ``chars`` says where in
    ``text`` each token stands (negative ahead of it, as a separator does); None where unknown.
    """

    kind: Kind
    text: str
    start: int
    end: int
    ids: np.ndarray  # int64 [end - start]
    inner: tuple[int, int]  # relative to start
    key: str  # content key
    chars: tuple[tuple[int, int], ...] | None = None  # start and end of each token


@dataclass(frozen=True)
class ChunkKV:
    """A stored chunk: keys (rotated at ``position``…) and values, one tensor per layer.

    ``keys[l]`` and ``values[l]``: ``[kv_heads, tokens, head_dim]``, never written again; of a
    stored entry they are read from the pool's pages when asked for, and raise `KvsemError` once
    it is evicted. ``context`` names how the donor stood, ``context_key`` is the chain key of
    every token ahead of it, ``depth`` counts the approximations its own KV was computed on
    (0 = exact).
    """

    key: str
    namespace: str
    text: str
    ids: np.ndarray  # int64 [tokens]
    inner: tuple[int, int]
    position: int
    context: str
    context_key: str
    depth: int
    keys: Sequence[torch.Tensor] = field(repr=False)
    values: Sequence[torch.Tensor] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))


@dataclass(frozen=True)
class Match:
    """What the plan found for one chunk. ``kind`` is prefix, chunk, semantic or refused/none."""

    kind: Literal["prefix", "chunk", "semantic", "none"]
    entry: str | None = None  # content key of the donor
    score: float | None = None  # cosine; None where content was identical
    reason: str = ""  # why a candidate was refused, or why nothing was reused


@dataclass(frozen=True)
class Run:
    """Copy ``length`` tokens from ``source`` in the entry to ``target`` in the prompt."""

    entry: str
    source: int
    target: int
    length: int


@dataclass(frozen=True)
class ReusePlan:
    """What will be reused, decided before anything is computed; no tensors of the model in it."""

    n_tokens: int
    provenance: np.ndarray  # int8 [n_tokens], Provenance before recomputation
    chunks: tuple[Chunk, ...]
    matches: tuple[Match, ...]  # one per chunk
    runs: tuple[Run, ...]
    n_cacheable: int
    refused: tuple[str, ...] = ()  # one reason per refused candidate
    n_paged: int = 0  # leading tokens that come from prefix pages
    miss: str = ""  # why the prefix pages end there; empty where they cover all they may

    @property
    def matched(self) -> np.ndarray:
        """bool ``[n_tokens]``: reused approximately (chunk, semantic): open to recomputation."""
        return np.isin(self.provenance, (Provenance.CHUNK, Provenance.SEMANTIC))

    @property
    def computed(self) -> np.ndarray:
        """bool ``[n_tokens]``: computed in any case: nothing matches, or the gate trusts it not
        (recomputed)."""
        return np.isin(self.provenance, (Provenance.NEW, Provenance.RECOMPUTED))

    @property
    def reuse_ratio(self) -> float:
        """Share of the prompt's tokens that take KV from elsewhere."""
        return float(np.mean(~self.computed))

    def missed(self) -> dict[str, int]:
        """Why KV was not found, counted: where the prefix pages end, and per chunk."""
        reasons = [f"prefix: {self.miss}"] if self.miss else []
        unmatched = (match for match in self.matches if match.kind == "none")
        reasons += [f"chunk: {match.reason}" for match in unmatched]
        return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}

    def to_frame(self) -> pd.DataFrame:
        """One row per chunk: tokens, match, score, tokens reused, reason."""
        import pandas as pd

        reused = ~self.computed
        rows = [
            {
                "kind": chunk.kind,
                "text": chunk.text[:60],
                "start": chunk.start,
                "tokens": chunk.end - chunk.start,
                "match": match.kind,
                "reused": int(reused[chunk.start : chunk.end].sum()),
                "score": match.score,
                "reason": match.reason,
            }
            for chunk, match in zip(self.chunks, self.matches, strict=True)
        ]
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """As plain data that JSON holds; `from_dict` reads it back."""
        plain = asdict(self)
        plain["provenance"] = self.provenance.tolist()
        for chunk in plain["chunks"]:
            chunk["ids"] = chunk["ids"].tolist()
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ReusePlan:
        """The plan that `to_dict` wrote. Raises `DataError` for anything else."""
        try:
            return cls(**{**plain, **_parts(plain)})
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a plan: {type(error).__name__} {error}") from None


def _parts(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan that JSON has only lists for."""
    kinds = [Provenance(kind) for kind in plain["provenance"]]
    if len(kinds) != plain["n_tokens"] or len(plain["chunks"]) != len(plain["matches"]):
        raise ValueError("its parts do not fit together")
    return {
        "provenance": np.array(kinds, dtype=np.int8),
        "chunks": tuple(_chunk(chunk) for chunk in plain["chunks"]),
        "matches": tuple(Match(**match) for match in plain["matches"]),
        "runs": tuple(Run(**run) for run in plain["runs"]),
        "refused": tuple(plain["refused"]),
    }


def _chunk(plain: Mapping[str, Any]) -> Chunk:
    chars = plain.get("chars")
    parts = {
        "ids": np.array(plain["ids"], dtype=np.int64),
        "inner": tuple(plain["inner"]),
        "chars": None if chars is None else tuple((start, end) for start, end in chars),
    }
    return Chunk(**{**plain, **parts})


@dataclass(frozen=True)
class Cost:
    """What one request cost. Times in milliseconds on the wall clock, counts from what ran.

    ``multiplications``: of the language model up to the first logits (matrix products of the
    linear layers, causal attention pairs counted once, lm_head for one row).
    """

    plan_ms: float = 0.0
    load_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms_per_token: float = 0.0
    store_ms: float = 0.0
    multiplications: int = 0
    recomputed_layer_tokens: int = 0
    kv_bytes: int = 0


@dataclass(frozen=True)
class Output:
    """The answer and how it came about."""

    tokens: tuple[int, ...]
    text: str
    logits: torch.Tensor = field(repr=False)  # fp32 [vocab] at the last prompt position
    plan: ReusePlan
    provenance: np.ndarray  # int8 [n_tokens], after recomputation
    computed: np.ndarray  # bool [layers, n_tokens], what was really forwarded
    cost: Cost
    memory: Mapping[str, float] = field(default_factory=dict)  # gauges after the prefill
    prompt_logprobs: torch.Tensor | None = field(default=None, repr=False)  # fp32 [n_tokens - 1]

    @property
    def recomputed(self) -> np.ndarray:
        """bool ``[layers, n_tokens]``: matched tokens that were computed all the same."""
        mask: np.ndarray = self.computed & self.plan.matched
        return mask

    def counts(self) -> dict[str, int]:
        """Tokens by provenance; the values add up to the prompt's length."""
        return {p.name.lower(): int((self.provenance == p).sum()) for p in Provenance}
