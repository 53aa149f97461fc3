"""Deciding what to reuse: prefix first, then identical content, then similar chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvsem.aligners.base import Aligner
from kvsem.chunkers.base import Chunker
from kvsem.gates.base import Candidate, Gate
from kvsem.keys import chain_key
from kvsem.memory.store import ChunkStore
from kvsem.memory.vectors import ChunkVectors
from kvsem.prompt import Piece, Prompt, chunks_of
from kvsem.types import CACHEABLE, Chunk, ChunkKV, Match, Provenance, ReusePlan, Run, Span

COMPUTED = -2  # source of a token that has one, which the gate does not trust
KINDS_OF_REUSE = frozenset({"prefix", "segment", "chunk", "semantic"})


@dataclass
class Planner:
    """Looks chunks up and lays their KV out over the prompt; touches no model.

    ``moved`` is empty where chunks may be moved, and otherwise says why not: then only exact
    prefix is reused. ``off`` is empty too, or says why nothing is reused at all. ``reuse``: what
    may be reused, of prefix, segment, chunk and semantic (see `kvsem.engine.Engine`).
    """

    chunker: Chunker
    aligner: Aligner
    gate: Gate
    store: ChunkStore
    vectors: ChunkVectors
    namespace: str
    moved: str = ""
    n_candidates: int = 4
    off: str = ""
    reuse: frozenset[str] = KINDS_OF_REUSE

    def plan(self, prompt: Prompt, n_paged: int = 0, miss: str = "") -> ReusePlan:
        """The plan of one prompt whose first ``n_paged`` tokens come from prefix pages, which end
        there because of ``miss``; at least the last token is left to compute."""
        chunks = [chunk for piece in prompt.pieces for chunk in self.chunks(prompt, piece)]
        layout = _Layout(len(prompt.ids), prompt.ids, self.namespace, self._unmoved, n_paged, miss)
        open_ = [c for c in chunks if c.kind != "system" and c.end > n_paged]
        similar = self._candidates([c for c in open_ if self.store.get(c.key) is None])
        for chunk in chunks:
            if chunk.end <= n_paged:
                layout.matches.append(Match("prefix"))
            elif similar.get(chunk.key):
                layout.place(chunk, *self._similar(chunk, similar[chunk.key], layout))
            else:
                layout.place(chunk, *self._identical(chunk))
        return layout.finish(tuple(chunks), prompt.n_cacheable)

    def chunks(self, prompt: Prompt, piece: Piece) -> list[Chunk]:
        """The cacheable chunks of one piece; the head is one chunk, keyed by all its tokens."""
        if piece.kind not in CACHEABLE:
            return []
        if piece.kind == "system":
            ids = prompt.ids[: piece.end].copy()
            key = chain_key(self.namespace, ids)
            return [Chunk("system", piece.text, 0, piece.end, ids, (0, len(ids)), key)]
        return chunks_of(prompt, piece, self.chunker.split(piece.text), self.namespace)

    @property
    def _unmoved(self) -> str:
        """Why no chunk is moved; empty where they may be."""
        return self.moved if "chunk" in self.reuse else "chunks are not reused by this arm"

    def _candidates(self, chunks: Sequence[Chunk]) -> dict[str, list[tuple[ChunkKV, float]]]:
        """Similar entries of the chunks that nothing identical covers, best first."""
        if self._unmoved or self.off or "semantic" not in self.reuse:
            return {}
        texts = [chunk.text for chunk in chunks]
        found: dict[str, list[tuple[ChunkKV, float]]] = {}
        near = self.vectors.near(self.namespace, texts, self.n_candidates)
        for chunk, hits in zip(chunks, near, strict=True):
            entries = [(self.store.get(key), score) for key, score in hits]
            found[chunk.key] = [(entry, score) for entry, score in entries if entry is not None]
        return found

    def _identical(self, chunk: Chunk) -> tuple[ChunkKV | None, np.ndarray, Match]:
        if self.off:
            return None, _nothing(chunk), Match("none", reason=self.off)
        entry = self.store.get(chunk.key) if self.reuse & {"segment", "chunk"} else None
        if entry is None:
            gone = self.store.was_evicted(chunk.key)
            return None, _nothing(chunk), Match("none", reason="evicted" if gone else "unknown")
        source = _same_content(chunk, entry)
        if source is None:
            return None, _nothing(chunk), Match("none", entry.key, reason="ids_differ")
        return entry, source, Match("chunk", entry.key)

    def _similar(
        self, chunk: Chunk, candidates: list[tuple[ChunkKV, float]], layout: _Layout
    ) -> tuple[ChunkKV | None, np.ndarray, Match]:
        best = Match("none")  # of those refused, which come in the order of their scores
        for entry, score in candidates:
            decision = self.gate.accept(chunk.text, Candidate(entry.text, score))
            source = self.aligner.align(chunk.ids, entry.ids) if decision.accepted else None
            if source is not None:
                source[_inside(chunk, decision.compute) & (source >= 0)] = COMPUTED
            if source is not None and (source >= 0).any():
                return entry, source, Match("semantic", entry.key, score)
            reason = decision.reason or "nothing_aligned"
            layout.refused.append(reason)
            best = best if best.entry else Match("none", entry.key, score, reason)
        return None, _nothing(chunk), best


def _nothing(chunk: Chunk) -> np.ndarray:
    return np.full(len(chunk.ids), -1, dtype=np.int64)


def _inside(chunk: Chunk, spans: Sequence[Span]) -> np.ndarray:
    """bool ``[tokens]``: shares a character with one of ``spans``; all where nobody knows."""
    if chunk.chars is None:
        return np.full(len(chunk.ids), bool(spans))
    inside = np.zeros(len(chunk.ids), dtype=bool)
    chars = np.array(chunk.chars, dtype=np.int64).reshape(-1, 2)
    for span in spans:
        inside |= (chars[:, 0] < span.end) & (chars[:, 1] > span.start)
    return inside


def _same_content(chunk: Chunk, entry: ChunkKV) -> np.ndarray | None:
    """Sources of a chunk whose text is stored: inside all tokens, at the edges those that agree.

    None where the ids inside differ (another text under the same key).
    """
    source = _nothing(chunk)
    (a, b), (da, db) = chunk.inner, entry.inner
    if not np.array_equal(chunk.ids[a:b], entry.ids[da:db]):
        return None
    source[a:b] = np.arange(da, db)
    i, j = a - 1, da - 1
    while i >= 0 and j >= 0 and chunk.ids[i] == entry.ids[j]:
        source[i] = j
        i, j = i - 1, j - 1
    i, j = b, db
    while i < len(source) and j < len(entry.ids) and chunk.ids[i] == entry.ids[j]:
        source[i] = j
        i, j = i + 1, j + 1
    return source


@dataclass
class _Layout:
    """The plan under work. Tokens before ``exact`` are prefix, or computed behind nothing but
    prefix: what was computed behind the same tokens is exact there."""

    n: int
    ids: np.ndarray
    namespace: str
    unmoved: str
    n_paged: int = 0
    miss: str = ""
    matches: list[Match] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.provenance = np.zeros(self.n, dtype=np.int8)
        self.provenance[: self.n_paged] = Provenance.PREFIX
        self.exact = self.n

    def place(self, chunk: Chunk, entry: ChunkKV | None, source: np.ndarray, match: Match) -> None:
        """Lay one chunk's sources out, from where the prefix pages end; what was computed behind
        these very tokens is prefix too."""
        paged = min(max(self.n_paged - chunk.start, 0), len(source))
        exact = self._exact_tokens(chunk, entry) if entry else 0
        source[:exact] = np.arange(exact)
        source[:paged] = -1
        kinds = np.full(len(source), Provenance[match.kind.upper()] if entry else 0, dtype=np.int8)
        kinds[:exact] = Provenance.PREFIX
        if entry and self.unmoved and max(paged, exact) < len(source):
            source[max(paged, exact) :] = -1
            self.refused.append(self.unmoved)
            match = replace(match, kind="none", reason=self.unmoved)
        kinds[source < 0] = Provenance.NEW
        kinds[source == COMPUTED] = Provenance.RECOMPUTED
        kinds[:paged] = Provenance.PREFIX
        if (kinds == Provenance.PREFIX).all() or (entry and self.unmoved and exact > paged):
            match = replace(match, kind="prefix")
        self.provenance[chunk.start : chunk.end] = kinds
        approximate = np.flatnonzero(kinds > Provenance.PREFIX)
        if len(approximate):
            self.exact = min(self.exact, chunk.start + int(approximate[0]))
        if entry:
            self.runs += runs_of(entry.key, source, chunk.start)
        self.matches.append(match)

    def _exact_tokens(self, chunk: Chunk, entry: ChunkKV) -> int:
        """Leading tokens of the chunk whose stored KV was computed behind these very tokens."""
        if self.exact < chunk.start or entry.position != chunk.start or entry.depth > 0:
            return 0
        if entry.context_key != chain_key(self.namespace, self.ids[: chunk.start]):
            return 0
        n = min(len(chunk.ids), len(entry.ids))
        differ = np.flatnonzero(chunk.ids[:n] != entry.ids[:n])
        return int(differ[0]) if len(differ) else n

    def finish(self, chunks: tuple[Chunk, ...], n_cacheable: int) -> ReusePlan:
        if self.provenance[-1] != Provenance.NEW:
            self.provenance[-1] = Provenance.NEW
            cut = [replace(r, length=min(r.length, self.n - 1 - r.target)) for r in self.runs]
            self.runs = [run for run in cut if run.length > 0]
        return ReusePlan(
            self.n,
            self.provenance,
            chunks,
            tuple(self.matches),
            tuple(self.runs),
            n_cacheable,
            tuple(self.refused),
            self.n_paged,
            self.miss,
        )


def runs_of(key: str, source: np.ndarray, start: int) -> list[Run]:
    """Maximal stretches in which source and target advance together."""
    used = np.flatnonzero(source >= 0)
    if not len(used):
        return []
    breaks = np.flatnonzero((np.diff(used) != 1) | (np.diff(source[used]) != 1)) + 1
    return [
        Run(key, int(source[part[0]]), start + int(part[0]), len(part))
        for part in np.split(used, breaks)
    ]
