"""F2, F11, F12, F13 on the whole engine: what was wrong stays gone, and the cache stays one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsem.embedders.hashing import HashingEmbedder
from kvsem.engine import Engine
from kvsem.gates.all_of import AllOf
from kvsem.gates.deny import DenyGate
from kvsem.gates.threshold import ThresholdGate
from kvsem.index.flat import FlatIndex
from kvsem.lm import LM
from kvsem.types import Provenance, Request
from tests.tiny import SYSTEM, prose, tiny_engine

TEXT = prose(400, 30)
NEAR = TEXT.replace(TEXT.split()[9], "lantern", 1)


def engine(lm: LM, **parts: Any) -> Engine:
    parts = {"gate": ThresholdGate(0.5)} | parts
    return tiny_engine(lm, embedder=HashingEmbedder(), index=FlatIndex, **parts)


def ask(*passages: str) -> Request:
    return Request.rag("r", passages, "Why?", system=SYSTEM, max_new_tokens=1)


def kind(engine: Engine, *passages: str) -> str:
    return engine.plan(ask(*passages)).matches[-1].kind


def test_a_forgotten_entry_is_no_source_and_no_candidate(llama: LM) -> None:
    mine = engine(llama, admit="none")
    mine.ingest([prose(401), TEXT], system=SYSTEM)
    match = mine.plan(ask(NEAR)).matches[-1]
    assert match.kind == "semantic"
    assert match.entry is not None
    assert mine.forget(match.entry)
    assert not mine.forget(match.entry)
    again = mine.plan(ask(NEAR))
    assert match.entry not in {run.entry for run in again.runs}
    assert again.matches[-1].entry != match.entry


def test_a_denied_pair_is_never_reused_again(llama: LM, tmp_path: Path) -> None:
    """F2: also in a session that starts later, with what it ingests itself."""
    path = tmp_path / "denied.json"
    for session in range(2):
        deny = DenyGate(path)
        mine = engine(llama, gate=AllOf([deny, ThresholdGate(0.5)]), admit="none")
        mine.ingest([TEXT], system=SYSTEM)
        if session == 0:
            match = mine.plan(ask(NEAR)).matches[-1]
            assert match.kind == "semantic"
            entry = mine.store.get(str(match.entry))
            assert entry is not None
            deny.deny(NEAR, entry.text)
        plan = mine.plan(ask(NEAR))
        assert plan.matches[-1].kind == "none"
        assert "denied" in plan.refused
        assert not (plan.provenance == Provenance.SEMANTIC).any()


def test_unrelated_entries_change_no_identical_match(llama: LM) -> None:
    """F11: hits drift as more is stored."""
    mine = engine(llama, admit="none")
    mine.ingest([prose(402), TEXT], system=SYSTEM)
    before = mine.plan(ask(NEAR[:40], TEXT))
    mine.ingest([NEAR, *(prose(500 + i, 30) for i in range(12))], system=SYSTEM)
    after = mine.plan(ask(NEAR[:40], TEXT))
    assert before.matches[-1].kind == "chunk"
    assert (after.matches[-1], after.runs[-1]) == (before.matches[-1], before.runs[-1])


def test_a_chunk_is_stored_once_and_a_near_one_beside_it(llama: LM) -> None:
    """F12: duplicates grow the index; or a near one overwrites another."""
    mine = engine(llama, admit="none")
    for _ in range(20):
        mine.ingest([TEXT], system=SYSTEM)
    stored = [entry.text for entry in mine.store]
    assert stored.count(TEXT) == 1
    assert [hits for hits in _near(mine, TEXT, 5) if hits == TEXT] == [TEXT]
    a, b = HashingEmbedder().embed([TEXT, NEAR])
    assert 0.8 < float(a @ b) < 1
    mine.ingest([NEAR], system=SYSTEM)
    assert {TEXT, NEAR} <= {entry.text for entry in mine.store}
    assert set(_near(mine, TEXT, 5)) == {TEXT, NEAR}


def _near(engine: Engine, text: str, k: int) -> list[str]:
    namespace = next(iter(engine.store)).namespace
    (hits,) = engine.vectors.near(namespace, [text], k)
    found = (engine.store.get(key) for key, _ in hits)
    return [entry.text for entry in found if entry is not None]


def test_two_sessions_of_one_setting_find_the_same(llama: LM) -> None:
    """F13: a cache that is made anew per call never hits."""
    first, second = engine(llama, admit="none"), engine(llama, admit="none")
    second.share(first)
    assert kind(second, TEXT) == "none"
    first.ingest([prose(403), TEXT], system=SYSTEM)
    second.share(first)
    assert kind(second, prose(404), TEXT) == "chunk"
    assert kind(second, NEAR) == "semantic"
