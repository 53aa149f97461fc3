"""Every yaml of a group is built as it stands and held to the group's contract.

A new method is tested here as soon as its yaml exists.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvsem.aligners.base import Aligner
from kvsem.chunkers.base import Chunker
from kvsem.contexts.base import DonorContext, predecessors
from kvsem.embedders.base import Embedder
from kvsem.errors import SettingError
from kvsem.gates.base import Candidate, Gate
from kvsem.index.base import ChunkIndex
from kvsem.metrics.base import Metric, Observation
from kvsem.types import Request

CONF = Path(__file__).parents[2] / "conf"
TEXTS = [
    "",
    " \n ",
    "One sentence. Another, e.g. with 3.14!\n\nA new paragraph?\n- a list\n",
    "今天天气很好。我们去公园吧！\n\n「はい。」と言った。",
    "x" * 5000,
    "\x00\u200b\u2028é\U0001f600",
]


def configs(group: str) -> list[Path]:
    found = sorted((CONF / group).rglob("*.yaml"))
    assert found, f"no yaml in conf/{group}"
    return found


def names(path: Path) -> str:
    return path.stem


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.mark.parametrize("path", configs("chunker"), ids=names)
def test_chunker(path: Path) -> None:
    chunker: Chunker = instantiate(OmegaConf.load(path))
    for text in TEXTS:
        spans = chunker.split(text)
        edges = [s.start for s in spans] + [len(text)] * bool(text)
        assert edges == sorted(set(edges))
        assert edges[:1] == [0] * bool(text)
        assert [s.end for s in spans] == edges[1:]
        assert chunker.split(text) == spans


@pytest.mark.parametrize("path", configs("embedder"), ids=names)
def test_embedder(path: Path) -> None:
    embedder: Embedder = instantiate(OmegaConf.load(path))
    again: Embedder = instantiate(OmegaConf.load(path))
    vectors = embedder.embed(TEXTS)
    assert vectors.shape == (len(TEXTS), embedder.dim)
    assert vectors.dtype == np.float32
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    assert lengths == pytest.approx([0, 0, 1, 1, 1, 1], abs=1e-5)
    assert np.abs(again.embed(TEXTS[::-1])[::-1] - vectors).max() <= 1e-5
    assert embedder.identity == again.identity
    assert str(embedder.dim) in embedder.identity
    assert embedder.embed([]).shape == (0, embedder.dim)


@pytest.mark.parametrize("path", configs("index"), ids=names)
def test_index(path: Path) -> None:
    index: ChunkIndex = instantiate(OmegaConf.load(path))(dim=3, identity="e")
    assert index.search(np.ones(3), 4) == []
    index.add([4, 2**62], np.array([[2, 0, 0], [0, 5, 0]], np.float32))
    index.add([4], np.array([[0, 0, 1]], np.float32))
    assert len(index) == 2
    assert index.search(np.array([0, 0, 9], np.float32), 9) == [(4, 1.0), (2**62, 0.0)]
    assert index.search(np.full(3, math.nan), 9) == []
    assert (index.remove([4, 5]), len(index)) == (1, 1)


REQUESTS = [
    Request.rag("a", ["The bridge opened in 1847.", "A market.", "The harbour."], "When?"),
    Request.rag("b", ["The bridge was closed.", "A market.", "Copper is a metal."], "When?"),
    Request.rag("c", ["The harbour is old.", "Winter came early."], "When?", system="Be brief."),
    Request.donor_target("d", "A donor.", "A target.", "When?"),
]


@pytest.mark.parametrize("path", configs("context"), ids=names)
@pytest.mark.filterwarnings("ignore:context=:UserWarning")  # some find no company
def test_context(path: Path) -> None:
    context: DonorContext = instantiate(OmegaConf.load(path))
    assert context.name == path.stem
    if path.stem == "in_request":  # nothing is ever ingested for it
        with pytest.raises(SettingError, match="ingest"):
            context.donors(REQUESTS, 0)
        return
    donors = context.donors(REQUESTS, 0)
    assert donors == context.donors(REQUESTS, 0)
    assert context.donors([], 0) == []
    wanted = {(r.system, t) for r in REQUESTS for t in r.donors or r.segments("passage", "target")}
    assert sorted((str(d.system), d.text) for d in donors) == sorted((str(s), t) for s, t in wanted)
    ahead = predecessors(REQUESTS)
    for donor in donors:
        assert donor.text not in donor.company
        assert not set(donor.company[-1:]) & ahead[donor.text]
        assert not donor.filler  # only the arm filler_kv may
        assert donor.context in (path.stem, "behind_system")
    assert any(donor.context == path.stem for donor in donors)


@pytest.mark.parametrize("path", configs("gate"), ids=names)
def test_gate(path: Path) -> None:
    gate: Gate = instantiate(OmegaConf.load(path))
    text = "The dose is 50 mg."
    assert gate.accept(text, Candidate(text, 1.0)).accepted
    for score in (-1.0, math.nan):
        refused = gate.accept(text, Candidate("Bond yields fell.", score))
        assert not refused.accepted
        assert refused == gate.accept(text, Candidate("Bond yields fell.", score))
        assert 0 < len(refused.reason) <= 40  # counted by its text: no number in it
        assert not any(map(str.isdigit, refused.reason))


@pytest.mark.parametrize("path", configs("aligner"), ids=names)
@pytest.mark.parametrize(
    ("target", "donor"),
    [
        ([], []),
        ([1], []),
        ([], [1]),
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 3, 4], [1, 9, 3]),
        ([5] * 4, [5]),
    ],
)
def test_aligner(path: Path, target: list[int], donor: list[int]) -> None:
    aligner: Aligner = instantiate(OmegaConf.load(path))
    ids = np.array(target, np.int64), np.array(donor, np.int64)
    for array in ids:
        array.flags.writeable = False
    source = aligner.align(*ids)
    assert source.shape == ids[0].shape
    assert source.dtype == np.int64
    used = source[source >= 0]
    assert ((source >= -1) & (source < max(len(donor), 1))).all()
    assert (np.diff(used) > 0).all()
    if target == donor:
        assert source.tolist() == list(range(len(target)))


def observation(seed: int, *, is_bare: bool = False) -> Observation:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 30, generator=generator)
    kv = tuple(torch.randn(1, 5, 8, generator=generator) for _ in range(2))
    return Observation(
        logits=logits,
        greedy=tuple(logits.argmax(-1).tolist()),
        text=f"answer {seed}",
        answers=() if is_bare else ("answer one",),
        answer_nll_nats=None if is_bare else 2.0,
        keys=None if is_bare else kv,
        values=None if is_bare else kv,
    )


@pytest.mark.parametrize("path", configs("metric"), ids=names)
def test_metric(path: Path) -> None:
    metric: Metric = instantiate(OmegaConf.load(path))
    exact = observation(0)
    values = metric.compare(exact, observation(1))
    assert values.keys() == metric.higher_is_better.keys()
    assert all(key.startswith("quality/") for key in values)
    assert all(isinstance(v, float) and math.isfinite(v) for v in values.values())
    assert metric.compare(exact, observation(1)) == values
    same = metric.compare(exact, exact)
    for key, is_up in metric.higher_is_better.items():
        assert same[key] >= values[key] if is_up else same[key] <= values[key]
    bare = metric.compare(observation(0, is_bare=True), observation(1, is_bare=True))
    assert bare.keys() <= values.keys()


def test_keys_of_metrics_are_disjoint() -> None:
    keys = [k for p in configs("metric") for k in instantiate(OmegaConf.load(p)).higher_is_better]
    assert len(keys) == len(set(keys))
