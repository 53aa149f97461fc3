"""Every yaml of a group is built as it stands and held to the group's contract.

A new method is tested here as soon as its yaml exists.
"""

import math
import re
from functools import cache
from inspect import Parameter, signature
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import get_class, instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kvsem.aligners.base import Aligner
from kvsem.chunkers.base import Chunker
from kvsem.contexts.base import DonorContext, predecessors
from kvsem.embedders.base import Embedder
from kvsem.errors import KvsemError, SettingError
from kvsem.gates.base import Candidate, Gate
from kvsem.index.base import ChunkIndex
from kvsem.lm import LM
from kvsem.memory.gather import gather
from kvsem.metrics.base import Metric, Observation
from kvsem.model import hand
from kvsem.planner import runs_of
from kvsem.types import ChunkKV, Request
from tests.tiny import prose, relative, tokens

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


PARTS_OF = ("aligner", "chunker", "context", "embedder", "eviction", "gate", "metric", "recompute")
GROUPS = [path for group in PARTS_OF for path in configs(group)]


@pytest.mark.parametrize("path", GROUPS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_part_made_in_python_is_the_one_that_its_yaml_makes(path: Path) -> None:
    """A default is written down twice, and means the same in both places."""
    given = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(given, dict)
    parameters = signature(get_class(given.pop("_target_"))).parameters
    for name, value in ((str(name), value) for name, value in given.items()):
        if not name.startswith("_") and not isinstance(value, dict):
            default = parameters[name].default
            default = list(default) if isinstance(default, tuple) else default
            assert default in (value, Parameter.empty), f"{name}: {value} in the yaml"


@cache
def chunker_of(path: Path) -> Chunker:
    """As configured, but for an embedder that takes no model: many texts are cut."""
    cfg = OmegaConf.load(path)
    if "embedder" in cfg:
        cfg.embedder = OmegaConf.load(CONF / "embedder" / "hashing.yaml")
    chunker: Chunker = instantiate(cfg)
    return chunker


def assert_covers(chunker: Chunker, text: str) -> None:
    spans = chunker.split(text)
    edges = [s.start for s in spans] + [len(text)] * bool(text)
    assert edges == sorted(set(edges))
    assert edges[:1] == [0] * bool(text)
    assert [s.end for s in spans] == edges[1:]
    assert chunker.split(text) == spans


@pytest.mark.parametrize("path", configs("chunker"), ids=names)
def test_chunker(path: Path) -> None:
    chunker = instantiate(OmegaConf.load(path))
    for text in TEXTS:
        assert_covers(chunker, text)


BITS = [
    *("# Head", "- item", "| a | b |", "|---|---|", "```", "> said", "def f(x):", "    return 1"),
    *(
        "class A:",
        "@d",
        "# note",
        '"""',
        "x = 1; y = 2",
        "User: Hi.",
        "**Ana:** Well.",
        "用户：好。",
    ),
    *(
        "One sentence is here. Another?",
        "今天天气很好。我们去吧",
        "e\u0301",
        "\U0001f469\u200d\U0001f467",
    ),
    *("\ud83d", "\x00", "[SEP]", "(" * 40, "w" * 90, "1.", "---", "<b>", "\\", "'"),
]
JOINTS = ["", " ", "\n", "\n\n", "\r\n", "\r", "\t", "\n    ", "\n\n\n", "\u2028", "\x0c"]
PARTS = st.lists(st.tuples(st.sampled_from(JOINTS), st.sampled_from(BITS)), max_size=20)


@pytest.mark.parametrize("path", configs("chunker"), ids=names)
@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.text(), PARTS.map(lambda parts: "".join(map("".join, parts)))))
def test_a_chunker_covers_any_text(path: Path, text: str) -> None:
    assert_covers(chunker_of(path), text)


LONG = {
    "words": "word " * 15_000,
    "one word": "x" * 75_000,
    "unspaced": "今天天气很好" * 7_000,
    "lines": "word\n" * 10_000,
    "paragraphs": "word\n\n" * 5_000,
    "line breaks": "\n" * 50_000 + "x",
    "blanks": " " * 75_000 + "x",
    "functions": "def f(): pass\n" * 2_000,
    "methods": "class A:\n" + " def f(s): 1\n\n" * 2_000,
    "stairs": "".join(" " * (i % 300) + "x\n\n" for i in range(2_000)),
    "quotes": "> " * 12_000,
    "items": "- " * 12_000,
    "brackets": "[" * 25_000,
    "turns": "User: a\n" * 5_000,
    "names": "Aa Bb Cc Dd " * 5_000,
}


@pytest.mark.timeout(60)  # some of them are quadratic in what a careless pattern would do: hours
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("path", configs("chunker"), ids=names)
def test_a_chunker_cuts_long_text_in_linear_time(path: Path, name: str) -> None:
    assert_covers(chunker_of(path), LONG[name])


@pytest.mark.parametrize("path", configs("embedder"), ids=names)
def test_embedder(path: Path, llama: LM) -> None:
    embedder: Embedder = instantiate(OmegaConf.load(path))
    again: Embedder = instantiate(OmegaConf.load(path))
    for part in (embedder, again):
        hand(part, llama)
    vectors = embedder.embed(TEXTS)
    assert vectors.shape == (len(TEXTS), embedder.dim)
    assert vectors.dtype == np.float32
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    assert lengths == pytest.approx([0, 0, 1, 1, 1, 1], abs=1e-5)
    assert np.abs(again.embed(TEXTS[::-1])[::-1] - vectors).max() <= 1e-5
    assert embedder.identity == again.identity
    assert str(embedder.dim) in embedder.identity
    assert embedder.embed([]).shape == (0, embedder.dim)


@pytest.mark.parametrize("path", configs("embedder"), ids=names)
def test_an_embedding_does_not_depend_on_batch_mates(path: Path, llama: LM) -> None:
    """F10: alone, in a batch of 64 or in another order: the same cosines, the same decisions."""
    embedder: Embedder = instantiate(OmegaConf.load(path))
    hand(embedder, llama)
    texts = [prose(seed, 3 + seed % 40) for seed in range(63)] + [prose(63, 300)]
    picked = [0, 5, 30, 59, 63]
    together = embedder.embed(texts)
    alone = np.concatenate([embedder.embed([texts[i]]) for i in picked])
    shuffled = embedder.embed(texts[::-1])[::-1]
    sets = [v.astype(np.float64) for v in (alone, together[picked], shuffled[picked])]
    cosines = [vectors @ vectors.T for vectors in sets]
    for other in cosines[1:]:
        assert np.abs(other - cosines[0]).max() <= 1e-5
        for margin in (-1e-4, 1e-4):  # the same decision around every cosine that occurs
            assert ((other >= cosines[0] + margin) == (margin < 0)).all()


@pytest.mark.parametrize("path", configs("embedder"), ids=names)
@pytest.mark.parametrize("index", configs("index"), ids=names)
def test_vectors_of_every_embedder_in_every_index(path: Path, index: Path, llama: LM) -> None:
    """F4, F5, F8: lengths do not count, nothing comes of what has no direction, and of another
    embedder there is an error with both identities."""
    embedder: Embedder = instantiate(OmegaConf.load(path))
    hand(embedder, llama)
    make = instantiate(OmegaConf.load(index))
    held: ChunkIndex = make(dim=embedder.dim, identity=embedder.identity)
    vectors = embedder.embed([prose(seed) for seed in range(8)])
    held.add(range(8), 100 * vectors)
    for i, vector in enumerate(vectors):
        (best, score), *rest = held.search(0.01 * vector, 20)
        assert (best, len(rest)) == (i, 7)
        assert score == pytest.approx(1, abs=1e-6)
    assert held.search(embedder.embed([" "])[0], 3) == []
    held.check(embedder)
    other = make(dim=embedder.dim, identity="another")
    with pytest.raises(KvsemError, match=f"'another'.*{re.escape(embedder.identity)}"):
        other.check(embedder)
    with pytest.raises(KvsemError, match=f"{embedder.dim + 1}.*{embedder.dim}"):
        make(dim=embedder.dim + 1, identity=embedder.identity).check(embedder)


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


ASCENDING = {"identical", "edit"}  # aligners whose sources keep the donor's order


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
def test_aligner(path: Path, target: list[int], donor: list[int], llama: LM) -> None:
    aligner: Aligner = instantiate(OmegaConf.load(path))
    hand(aligner, llama)
    ids = np.array(target, np.int64), np.array(donor, np.int64)
    for array in ids:
        array.flags.writeable = False
    source = aligner.align(*ids)
    assert source.shape == ids[0].shape
    assert source.dtype == np.int64
    used = source[source >= 0]
    assert ((source >= -1) & (source < max(len(donor), 1))).all()
    if path.stem in ASCENDING:
        assert (np.diff(used) > 0).all()
    assert source.tolist() == aligner.align(*ids).tolist()
    if target == donor:
        assert source.tolist() == list(range(len(target)))


@pytest.mark.parametrize("path", configs("aligner"), ids=names)
@settings(max_examples=20, deadline=None)
@given(kept=st.sets(st.integers(0, 23)), start=st.integers(0, 200))
def test_any_alignment_moves_each_token_by_its_own_delta(
    path: Path, llama: LM, kept: set[int], start: int
) -> None:
    """A7: after random deletions each token that is aligned has its source's key, moved from where
    it was stored; of aligners that compare ids, every kept token once."""
    aligner: Aligner = instantiate(OmegaConf.load(path))
    hand(aligner, llama)
    donor_ids = np.resize(tokens(9, seed=4), 24)  # with repetitions
    target = donor_ids[sorted(kept)]
    source = aligner.align(target, donor_ids)
    if path.stem in {"edit", "hybrid"}:
        assert donor_ids[source].tolist() == target.tolist()
    keys, values = llama.alone(donor_ids, 37)
    entry = ChunkKV("k", "", "", donor_ids, (0, 24), 37, "alone", "", 0, keys, values)
    kv = llama.buffer(start + 24)
    gather(llama, kv, runs_of("k", source, start), {"k": entry})
    for i in np.flatnonzero(source >= 0).tolist():
        s = int(source[i])
        there = llama.alone(donor_ids, start + i - s)[0]
        for layer in range(llama.n_layers):
            assert relative(kv.keys[layer][0, :, start + i], there[layer][:, s]) <= 1e-5
            assert torch.equal(kv.values[layer][0, :, start + i], values[layer][:, s])


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
