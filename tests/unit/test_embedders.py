"""Embedders: unit vectors that depend on the text alone, in every process and batch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsem.embedders.hashing import HashingEmbedder
from kvsem.embedders.minilm import MinilmEmbedder
from kvsem.errors import ModelError, SettingError

ROOT = Path(__file__).parents[2]
WORDS = "the quick brown fox jumps over lazy dogs while seven wizards read old maps at night"


@pytest.fixture(scope="module")
def minilm() -> MinilmEmbedder:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return MinilmEmbedder()


def prose(seed: int, n_words: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS.split(), n_words))


def lengths(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.norm(vectors.astype(np.float64), axis=1))


# --- minilm ---


def test_minilm_loads_nothing_until_it_embeds() -> None:
    code = (
        "import sys; from kvsem.embedders.minilm import MinilmEmbedder; e = MinilmEmbedder();"
        "print(e.dim, 'sentence_transformers' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["384", "False"]


@pytest.mark.slow
@pytest.mark.ci
def test_minilm_is_the_published_model(minilm: MinilmEmbedder) -> None:
    """Golden: `SentenceTransformer(path).encode(texts, normalize_embeddings=True)`."""
    from sentence_transformers import SentenceTransformer

    texts = ["A cat sat on the mat.", prose(0, 120), "¿Qué?"]
    model = SentenceTransformer(str(minilm.path), device="cpu", local_files_only=True)
    golden = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    assert np.abs(minilm.embed(texts) - golden).max() < 1e-6


@pytest.mark.slow
@pytest.mark.ci
def test_minilm_vectors(minilm: MinilmEmbedder) -> None:
    vectors = minilm.embed(["A cat sat.", "", "A feline was sitting.", " \n", "Bond yields fell."])
    assert vectors.dtype == np.float32
    assert lengths(vectors) == pytest.approx([1, 0, 1, 0, 1], abs=1e-6)
    assert vectors[0] @ vectors[2] > vectors[0] @ vectors[4] + 0.3
    assert minilm.embed([]).shape == (0, 384)


@pytest.mark.slow
@pytest.mark.ci
def test_minilm_reads_a_long_text_to_its_end(minilm: MinilmEmbedder) -> None:
    long = prose(1, 600)
    changed = long + " Interest rates and bond yields fell sharply."
    one, other = minilm.embed([long, changed])
    assert lengths(np.stack([one, other])) == pytest.approx([1, 1], abs=1e-6)
    assert 0.9 < one @ other < 0.9999


@pytest.mark.slow
@pytest.mark.ci
def test_minilm_averages_windows_by_their_word_pieces(minilm: MinilmEmbedder) -> None:
    head, tail = " ".join(["fox"] * 254), "bond yields fell"  # one word piece a word
    whole, *parts = minilm.embed([f"{head} {tail}", head, tail]).astype(np.float64)
    mean = 254 * parts[0] + 3 * parts[1]
    assert whole == pytest.approx(mean / np.linalg.norm(mean), abs=1e-6)


@pytest.mark.slow
@pytest.mark.ci
def test_minilm_does_not_depend_on_batch_mates(minilm: MinilmEmbedder) -> None:
    texts = [prose(seed, 3 + seed % 40) for seed in range(62)] + [prose(62, 300)] * 2
    picked = [0, 5, 30, 59, 63]
    together = minilm.embed(texts)
    alone = np.concatenate([minilm.embed([texts[i]]) for i in picked])
    order = np.random.default_rng(0).permutation(len(texts))
    shuffled = np.empty_like(together)
    shuffled[order] = minilm.embed([texts[i] for i in order])
    sets = [v.astype(np.float64) for v in (alone, together[picked], shuffled[picked])]
    cosines = [vectors @ vectors.T for vectors in sets]
    for other in cosines[1:]:
        assert np.abs(other - cosines[0]).max() <= 1e-5
        for margin in (-1e-4, 1e-4):  # the same decision around every cosine that occurs
            assert ((other >= cosines[0] + margin) == (margin < 0)).all()


def test_minilm_identity(minilm: MinilmEmbedder, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((minilm.path / file).read_bytes())
    assert MinilmEmbedder(tmp_path).identity == minilm.identity  # by content, not by folder
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert MinilmEmbedder(tmp_path).identity != minilm.identity


def test_minilm_without_a_model_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path / "none")):
        MinilmEmbedder(tmp_path / "none")
    bad: Any
    for bad in (0, 1.5, "abc"):
        with pytest.raises(SettingError, match="batch_size"):
            MinilmEmbedder(batch_size=bad)


# --- hashing ---


@given(st.lists(st.text(), max_size=4), st.integers(1, 64), st.integers(1, 5))
def test_hashing_lengths(texts: list[str], dim: int, ngram: int) -> None:
    vectors = HashingEmbedder(dim, ngram).embed(texts)
    assert vectors.shape == (len(texts), dim)
    assert vectors.dtype == np.float32
    wanted = [1.0 if text.strip() else 0.0 for text in texts]  # even where all signs cancel
    assert lengths(vectors) == pytest.approx(wanted, abs=1e-6)


def test_hashing_prefers_shared_words() -> None:
    one, near, far = HashingEmbedder().embed(
        ["the cat sat on the mat", "The cat sat on a mat.", "bond yields fell sharply"]
    )
    assert one @ near > 0.6 > 0.3 > one @ far


def test_hashing_counts_every_kind_of_feature() -> None:
    embedder = HashingEmbedder(4096)
    order = embedder.embed(["alpha beta gamma", "gamma beta alpha"])  # pairs of words differ
    assert order[0] @ order[1] < 0.99
    words = embedder.embed(["xq jz", "xqjz"])  # no shared word, some shared trigrams
    assert 0 < words[0] @ words[1] < 0.7
    assert embedder.embed(["今天天气很好", "今天天气不好"])[0].any()


def test_hashing_is_the_same_in_every_process() -> None:
    code = (
        "from kvsem.embedders.hashing import HashingEmbedder as H;"
        "print(H(8).embed(['A cat sat.', 'Ünï 今天']).tobytes().hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert found == {HashingEmbedder(8).embed(["A cat sat.", "Ünï 今天"]).tobytes().hex()}


def test_hashing_golden() -> None:
    """crc32("w ab") = 0x30bb5b4b, crc32("c  ab") = 0x5f9549cc, crc32("c ab ") = 0x9d32dd44."""
    third = 3**-0.5
    golden = {0xB: third, 0xC: third, 0x4: -third}  # the last hash has its top bit set
    found = HashingEmbedder(16).embed(["ab"])[0]
    assert found.tolist() == pytest.approx([golden.get(i, 0) for i in range(16)])


def test_hashing_identity_names_its_settings() -> None:
    identities = {HashingEmbedder(*a).identity for a in ((), (256,), (512, 4))}
    assert len(identities) == 3


@pytest.mark.parametrize("name", ["dim", "ngram"])
@pytest.mark.parametrize("value", [0, 1.5, True, "abc", None])
def test_hashing_settings_are_checked(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"{name}=.*: expected a whole number from 1"):
        HashingEmbedder(**{name: value})
