"""The reuse maps: what is changed between donor and target, and how rows become cells."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.embeddings.pairs import FILES
from experiments.public import read, sentences
from experiments.reuse_map.bench import KEYS, means, overlap
from experiments.reuse_map.changes import (
    AHEAD,
    BEHIND,
    KINDS,
    LEFT_OUT,
    PUT_IN,
    around,
    inserted,
    made,
    parted,
)
from experiments.reuse_map.map import changed, inside, summarise
from experiments.reuse_map.semsharekv import replaced
from experiments.study import DATA
from kvsem.errors import DataError

ROOT = Path(__file__).parents[2]
needs_data = pytest.mark.skipif(
    not (DATA / FILES["xquad"]).is_file(), reason="needs the public files of the studies"
)


def articles(n: int, n_sentences: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"p{i}",
            "article": f"a{i}",
            "context": {"en": " ".join(f"This is {i} {j}." for j in range(n_sentences))},
            "qas": [{"question": {"en": f"What is {i}?"}}],
        }
        for i in range(n)
    ]


def row(**more: Any) -> dict[str, Any]:
    numbers = dict.fromkeys((*KEYS, "similarity", "overlap"), 0.5)
    about = {"id": "x", "group": "g", "kind": "name", "gate": "on", "ratio": 0.0, "refused": ""}
    return about | numbers | more


def test_overlap_is_the_common_subsequence_of_the_target() -> None:
    assert overlap([1, 2, 3, 4], [1, 9, 3]) == pytest.approx(0.5)
    assert overlap([1, 2], [1, 2, 3, 4]) == 1
    assert overlap([3, 2, 1], [1, 2, 3]) == pytest.approx(1 / 3)  # order counts


def test_bins_begin_at_their_lower_edge() -> None:
    bins = [inside(value, (0.5, 0.9)) for value in (0.0, 0.49, 0.5, 0.9, 1.0)]
    assert bins == ["0 to 0.5", "0 to 0.5", "0.5 to 0.9", "0.9 to 1", "0.9 to 1"]


def test_cells_are_means_with_intervals_over_documents() -> None:
    rows = [row(kl_nats=value, group=group) for value, group in ((1, "a"), (3, "a"), (8, "b"))]
    cell = means(rows, ["kind", "ratio"])["name | 0.0"]
    assert (cell["n"], cell["n_groups"]) == (3, 2)
    # both documents are drawn: once each, or one twice
    assert cell["kl_nats"] == {"mean": 4, "low": 2, "high": 8}


def test_the_map_has_a_cell_for_each_kind_and_bin() -> None:
    rows = [row(), row(id="y", similarity=0.99, overlap=0.95, refused="below_threshold")]
    found = summarise(rows)
    assert list(found["kind | gate | ratio"]) == ["name | on | 0.0"]
    assert set(found["similarity, overlap | gate | ratio"]) == {
        "0 to 0.75, 0.5 to 0.75 | on | 0.0",
        "0.95 to 1, 0.9 to 1 | on | 0.0",
    }
    assert not found["spearman"]  # nothing plain among them
    assert found["refused"] == {"y": "below_threshold"}


def test_system_prompts_are_cut_around_their_first_difference() -> None:
    words = [f"w{i}" for i in range(1000)]
    donor = " ".join(words)
    target = "\n".join([*words[:400], "new", *words[403:]])
    pair = around({"id": "x", "donor": donor, "target": target, "question": "?"})
    assert pair.donor.split() == words[400 - AHEAD : 403 + BEHIND]
    assert pair.target.split() == [*words[400 - AHEAD : 400], "new", *words[403 : 403 + BEHIND]]
    assert "\n" in pair.target  # white space stays


def test_an_inserted_sentence_stands_inside_and_is_of_another_article() -> None:
    for pair in inserted(articles(5, 6), 120, 0):
        own, target = sentences(pair.donor), sentences(pair.target)
        (strange,) = [s for s in target if s not in own]
        assert [s for s in target if s != strange] == own
        assert strange not in (target[0], target[-1])
    assert not list(inserted(articles(5, 3), 120, 0))  # too short
    assert not list(inserted(articles(5, 6), 10, 0))  # too long


def test_another_paragraph_of_the_article_is_left_out_of_the_middle_or_put_in() -> None:
    rows = articles(5, 6)
    rows = [row | {"article": f"a{i // 2}"} for i, row in enumerate(rows)]
    gone, put = list(parted(rows, LEFT_OUT, 120)), list(parted(rows, PUT_IN, 120))
    assert [pair.group for pair in gone] == ["a0", "a1"]  # a2 has one paragraph only
    for less, more in zip(gone, put, strict=True):
        assert (less.donor, less.target) == (more.target, more.donor)
        own, whole = sentences(less.target), sentences(less.donor)
        assert len(whole) == 12
        assert [*whole[:3], *whole[-3:]] == own
    assert not list(parted(rows, LEFT_OUT, 10))


def test_what_is_replaced_at_a_small_share_is_at_a_larger_one() -> None:
    made_ = list(replaced(articles(3, 10), [0.0, 0.2, 0.8], 2, 10, 0))
    assert [share for share, _ in made_] == [0.0, 0.2, 0.8] * 2
    assert len({pair.donor for _, pair in made_}) == 2
    kept: set[int] = set(range(10))
    for share, pair in made_[:3]:
        same = zip(sentences(pair.donor), sentences(pair.target), strict=True)
        still = {i for i, (a, b) in enumerate(same) if a == b}
        assert len(still) == round(10 * (1 - share))
        assert still <= kept
        kept = still


def test_plain_reuse_is_what_others_are_compared_with() -> None:
    rows = [row(gate="off", kl_nats=0.5), row(gate="off", ratio=0.3, kl_nats=0.2), row(id="y")]
    (less,) = changed(rows)
    assert less["ratio"] == 0.3
    assert less["kl_nats"] == pytest.approx(-0.3)


@needs_data
def test_pairs_are_of_their_kind() -> None:
    pairs = made(DATA, KINDS, 3, 120, 0)
    assert pairs == made(DATA, KINDS, 3, 120, 0)
    assert [pair.kind for pair in pairs] == list(np.repeat(KINDS, 3))
    assert len({pair.id for pair in pairs}) == len(pairs)
    for pair in pairs:
        assert pair.donor != pair.target
        if pair.kind == "sentences reversed":
            assert sorted(pair.donor.split()) == sorted(pair.target.split())


@pytest.mark.parametrize(
    ("study", "given", "said"),
    [
        ("map", "kinds=[nonsense]", "kinds"),
        ("map", "data=nowhere", "is missing"),
        ("semsharekv", "shares=[-1]", "shares"),
    ],
)
def test_a_mistake_is_one_line(study: str, given: str, said: str) -> None:
    command = [sys.executable, f"experiments/reuse_map/{study}.py", given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    whole = gzip.compress("".join(f'{{"id": {i * 7919}}}\n' for i in range(500)).encode())
    for name, body in {
        "cut": whole[:400],
        "overwritten": whole[:10] + b"\xff" + whole[11:],  # a block of no kind that there is
        "text": b"no gzip",
    }.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(body)
        with pytest.raises(DataError, match=f"{name}.*cannot be read"):
            list(read(path))
