"""Donor contexts: what stands ahead of a passage at ingestion, and what never may."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsem.contexts.alone import Alone
from kvsem.contexts.base import FILLER, Donor, DonorContext
from kvsem.contexts.behind_dummy import BehindDummy
from kvsem.contexts.behind_filler import BehindFiller
from kvsem.contexts.behind_system import BehindSystem
from kvsem.contexts.filler_kv import FillerKV
from kvsem.contexts.in_company import InCompany
from kvsem.contexts.in_company_own import InCompanyOwn
from kvsem.contexts.in_request import InRequest
from kvsem.contexts.similar import Similar
from kvsem.embedders.hashing import HashingEmbedder
from kvsem.errors import SettingError
from kvsem.types import Message, Request, Segment
from kvsem.workloads.pydoc import PydocWorkload

CONTEXTS: list[DonorContext] = [
    InCompany(),
    InCompany(n=3),
    InCompany(n=2, draws=3),
    InCompanyOwn(),
    BehindSystem(),
    BehindFiller(),
    BehindFiller(words=3),
    BehindDummy(),
    BehindDummy(bare=True),
    Similar(HashingEmbedder(16)),
    Similar(HashingEmbedder(16), n=3, own=False),
    Alone(),
]
SYSTEMS = st.sampled_from([None, "Be brief.", "Be kind."])
TEXTS = st.sampled_from([f"passage {letter}" for letter in "abcdefghij"])


def _rag(system: str | None, passages: list[str], question: str) -> Request:
    return Request.rag("", passages, question, system=system)


def _chat(system: str | None, turns: list[str], passages: list[str]) -> Request:
    history = [
        Message(("user", "assistant")[i % 2], (Segment("turn", text),))
        for i, text in enumerate(turns)
    ]
    last = [*(Segment("passage", text) for text in passages), Segment("question", "Why?")]
    ahead = [Message("system", (Segment("system", system),))] if system else []
    return Request("", (*ahead, *history, Message("user", tuple(last))))


def _pair(system: str | None, donor: str, target: str) -> Request:
    return Request.donor_target("", donor, target, "Why?", system=system)


REQUESTS = st.lists(
    st.one_of(
        st.builds(_rag, SYSTEMS, st.lists(TEXTS, min_size=1, max_size=4), st.just("Why?")),
        st.builds(_chat, SYSTEMS, st.lists(TEXTS, max_size=3), st.lists(TEXTS, max_size=2)),
        st.builds(_pair, SYSTEMS, TEXTS, TEXTS),
    ),
    max_size=7,
)


def _texts(request: Request) -> tuple[str, ...]:
    return request.segments("passage", "target", "turn")


def _quietly(context: DonorContext, requests: Sequence[Request], seed: int = 0) -> list[Donor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return context.donors(requests, seed)


def _given(requests: Sequence[Request]) -> set[tuple[str | None, str]]:
    return {(r.system, text) for r in requests for text in r.donors}


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda c: f"{c.name}-{getattr(c, 'n', '')}")
@settings(max_examples=150, deadline=None)
@given(requests=REQUESTS, seed=st.integers(0, 3))
def test_every_distinct_passage_exactly_once(
    context: DonorContext, requests: list[Request], seed: int
) -> None:
    donors = _quietly(context, requests, seed)
    keys = [(donor.system, donor.text) for donor in donors]
    wanted = {(r.system, text) for r in requests for text in (r.donors or _texts(r))}
    assert len(keys) == len(set(keys))
    assert set(keys) == wanted
    for donor in donors:
        is_behind_system = not (donor.company or donor.bare or donor.n_dummies)
        assert (donor.context == "behind_system") == is_behind_system
        assert not donor.filler
        if (donor.system, donor.text) in _given(requests):
            assert donor == Donor(donor.text, donor.system)
        else:
            assert donor.context in (context.name, "behind_system")


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda c: f"{c.name}-{getattr(c, 'n', '')}")
@given(requests=REQUESTS, seed=st.integers(0, 3))
def test_same_seed_same_donors(context: DonorContext, requests: list[Request], seed: int) -> None:
    assert _quietly(context, requests, seed) == _quietly(context, requests, seed)


@settings(max_examples=300, deadline=None)
@given(requests=REQUESTS, seed=st.integers(0, 3), n=st.integers(1, 4))
def test_company_is_of_other_requests_only(requests: list[Request], seed: int, n: int) -> None:
    for donor in _quietly(InCompany(n), requests, seed):
        holders = [r for r in requests if donor.text in _texts(r)]
        pool = {t for r in requests if not r.donors for t in _texts(r)}
        free = pool.difference(*(_texts(r) for r in holders))
        assert donor.text not in donor.company
        assert free.issuperset(donor.company)
        if (donor.system, donor.text) not in _given(requests):
            assert len(set(donor.company)) == len(donor.company) == min(n, len(free))


@settings(max_examples=300, deadline=None)
@given(requests=REQUESTS, seed=st.integers(0, 3))
def test_company_of_its_own_never_ends_with_a_predecessor(
    requests: list[Request], seed: int
) -> None:
    ahead = {pair for r in requests for pair in pairwise(_texts(r))}
    for donor in _quietly(InCompanyOwn(), requests, seed):
        if (donor.system, donor.text) in _given(requests):
            continue
        own = [
            set(_texts(r)) - {donor.text}
            for r in requests
            if not r.donors and r.system == donor.system and donor.text in _texts(r)
        ]
        if donor.company:
            assert set(donor.company) in own
            assert len(set(donor.company)) == len(donor.company)
            assert (donor.company[-1], donor.text) not in ahead
        else:
            assert all((other, donor.text) in ahead for others in own for other in others)


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda c: f"{c.name}-{getattr(c, 'n', '')}")
@settings(max_examples=150, deadline=None)
@given(requests=REQUESTS, seed=st.integers(0, 3))
def test_nobody_stands_behind_its_predecessor(
    context: DonorContext, requests: list[Request], seed: int
) -> None:
    """That would be the exact context, and no reuse."""
    ahead = {pair for r in requests for pair in pairwise(_texts(r))}
    for donor in _quietly(context, requests, seed):
        assert donor.text not in donor.company
        assert not {(text, donor.text) for text in donor.company[-1:]} & ahead


@pytest.mark.parametrize("context", [InCompany(2), Similar(HashingEmbedder(16))])
@settings(deadline=None)
@given(requests=REQUESTS, seed=st.integers(0, 3))
def test_company_does_not_depend_on_the_order_of_requests(
    context: DonorContext, requests: list[Request], seed: int
) -> None:
    forward, backward = (_quietly(context, r, seed) for r in (requests, requests[::-1]))
    assert {(d.system, d.text): d for d in forward} == {(d.system, d.text): d for d in backward}


@settings(max_examples=300, deadline=None)
@given(requests=REQUESTS, seed=st.integers(0, 3), n=st.integers(1, 3), draws=st.integers(1, 3))
def test_further_draws_are_other_whole_companies(
    requests: list[Request], seed: int, n: int, draws: int
) -> None:
    first = {(d.system, d.text): d for d in _quietly(InCompany(n), requests, seed)}
    for donor in _quietly(InCompany(n, draws), requests, seed):
        assert donor.company == first[donor.system, donor.text].company
        met = {t for r in requests if donor.text in _texts(r) for t in _texts(r)}
        others = [text for company in donor.also for text in company]
        pool = {t for r in requests if not r.donors for t in _texts(r)}
        assert len({*donor.company, *others}) == len(donor.company) + len(others)
        assert not met.intersection(others)
        assert all(len(company) == n for company in donor.also)
        if (donor.system, donor.text) not in _given(requests):
            assert len(donor.also) == max(0, min(draws, len(pool - met) // n) - 1)


def test_company_is_drawn_with_the_seed() -> None:
    requests = [_rag(None, [f"passage {i}"], "Why?") for i in range(20)]
    draws = {
        seed: tuple(d.company for d in _quietly(InCompany(), requests, seed)) for seed in range(5)
    }
    assert len(set(draws.values())) == 5
    assert len(set(draws[0])) > 5  # no single text keeps everybody company


def test_more_requests_leave_most_draws_as_they_were() -> None:
    requests = [_rag(None, [f"passage {i}"], "Why?") for i in range(40)]
    few, many = (_quietly(InCompany(), requests[:n], 0) for n in (36, 40))
    assert sum(a == b for a, b in zip(few, many, strict=False)) > 24


def test_company_prefers_passages_to_turns() -> None:
    talk = _chat(None, ["turn a", "turn b", "turn c"], ["passage a"])
    donors = {d.text: d for d in _quietly(InCompany(), [talk, _rag(None, ["passage b"], "Why?")])}
    assert donors["passage b"].company == ("passage a",)
    assert donors["turn a"].company == ("passage b",)


def test_own_company_is_borrowed_where_the_first_request_allows_none() -> None:
    requests = [_rag(None, ["a", "p"], "Why?"), _rag(None, ["p", "c"], "Why?")]
    donors = {d.text: d for d in _quietly(InCompanyOwn(), requests)}
    assert donors["p"].company == ("c",)
    assert donors["a"].company == ("p",)


def test_own_company_is_all_the_others_in_another_order() -> None:
    passages = [f"passage {i}" for i in range(6)]
    by_seed = [_quietly(InCompanyOwn(), [_rag("s", passages, "Why?")], seed) for seed in range(4)]
    for donors in by_seed:
        assert [sorted(d.company) for d in donors] == [
            [p for p in passages if p != d.text] for d in donors
        ]
    assert len({donors[3].company for donors in by_seed}) > 1


class Angles:
    """An embedder whose text is its angle, in degrees."""

    dim, identity = 2, "angles dim=2"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        angles = np.radians([float(text) for text in texts])
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


SLICES = [_rag(None, ["0", "10", "25"], "Why?"), _rag(None, ["12", "90", "3"], "Why?")]


def _similar(requests: Sequence[Request], **more: Any) -> dict[str, tuple[str, ...]]:
    return {d.text: d.company for d in _quietly(Similar(Angles(), **more), requests)}


def test_the_nearest_stand_ahead_and_the_nearest_of_all_last() -> None:
    assert _similar(SLICES, n=1)["0"] == ("3",)
    assert _similar(SLICES)["0"] == ("10", "3")


def test_a_predecessor_is_never_last_but_may_stand_further_ahead() -> None:
    """0 precedes 10 and is the second nearest to it; 10 precedes 25 and is the second nearest."""
    company = _similar(SLICES, n=3)
    assert company["10"] == ("0", "3", "12")
    assert company["25"] == ("3", "10", "12")
    near = [_rag(None, ["1", "2", "60"], "Why?")]
    assert _similar(near, n=1)["2"] == ("60",)
    assert _similar(near, n=2)["2"] == ("1", "60")


def test_of_other_requests_only_where_asked() -> None:
    company = _similar(SLICES, n=2, own=False)
    assert company["0"] == ("12", "3")
    assert company["90"] == ("10", "25")


def test_a_twin_with_other_white_space_is_no_neighbour() -> None:
    requests = [_rag(None, ["0", "50"], "Why?"), _rag(None, [" 0 "], "Why?")]
    assert _similar(requests, n=1)["0"] == ("50",)


def test_twins_are_no_two_neighbours() -> None:
    requests = [_rag(None, ["0", "50"], "Why?"), _rag(None, [" 0 ", "60"], "Why?")]
    assert [text.strip() for text in _similar(requests, n=3)["50"]] == ["0", "60"]


def _padded(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from([text, f"{text} ", f"\n{text}"])


TWINS = st.lists(
    st.builds(
        _rag,
        st.none(),
        st.lists(st.sampled_from("abcde").flatmap(_padded), min_size=1, max_size=3),
        st.just("Why?"),
    ),
    max_size=5,
)


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda c: f"{c.name}-{getattr(c, 'n', '')}")
@settings(max_examples=150, deadline=None)
@given(requests=TWINS, seed=st.integers(0, 3))
def test_twins_with_other_white_space_are_one_text(
    context: DonorContext, requests: list[Request], seed: int
) -> None:
    """No passage stands behind itself, its predecessor, or twice in the same company."""
    held = [[text.strip() for text in _texts(r)] for r in requests]
    ahead = {pair for texts in held for pair in pairwise(texts)}
    for donor in _quietly(context, requests, seed):
        text = donor.text.strip()
        company = [other.strip() for part in (donor.company, *donor.also) for other in part]
        assert text not in company
        assert len(set(company)) == len(company)
        if donor.company:
            assert (donor.company[-1].strip(), text) not in ahead
        if isinstance(context, InCompany):
            assert not {t for texts in held if text in texts for t in texts} & {*company}


def test_a_twin_of_a_given_donor_stands_behind_the_system_prompt_too() -> None:
    requests = [_rag(None, ["a", "d "], "Why?"), _pair(None, "d", "t")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert InCompanyOwn().donors(requests, 0) == [
            Donor("a", None, ("d ",), context="in_company_own"),
            Donor("d ", None),
            Donor("d", None),
        ]


def test_white_space_that_makes_no_twins_changes_no_draw() -> None:
    requests = [_rag(None, [f"passage {i}\n", f" {i}"], "Why?") for i in range(6)]
    drawn = InCompany(2, 2).donors(requests, 0)[0]
    assert drawn.company == (" 5", "passage 5\n")
    assert drawn.also == ((" 1", "passage 2\n"),)
    own = InCompanyOwn().donors([_rag(None, [f"passage {i}\n" for i in range(5)], "Why?")], 0)[0]
    assert own.company == tuple(f"passage {i}\n" for i in (4, 2, 3, 1))


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "1", None])
def test_a_number_of_neighbours_dummies_or_words_is_checked(n: Any) -> None:
    with pytest.raises(SettingError, match=r"context\.n=.*from 1"):
        Similar(Angles(), n=n)
    with pytest.raises(SettingError, match=r"context\.n=.*from 1"):
        BehindDummy(n=n)
    with pytest.raises(SettingError, match=r"context\.draws=.*a whole number from 1"):
        InCompany(draws=n)
    if n is not None:
        with pytest.raises(SettingError, match=r"context\.words=.*from 1 up, or null"):
            BehindFiller(words=n)


def test_filler_is_cut_to_whole_words_and_repeated() -> None:
    words = FILLER.split()
    for text in ("a", "passage a", "x" * 100, "x" * 2000):
        (donor,) = _quietly(BehindFiller(), [_rag(None, [text], "Why?")])
        (filler,) = donor.company
        n = len(filler.split())
        assert filler.split() == (words * 9)[:n]
        assert len(text) - 12 < len(filler) <= max(len(text), 3)
    (donor,) = _quietly(BehindFiller(words=200), [_rag(None, ["a"], "Why?")])
    assert len(donor.company[0].split()) == 200


def test_all_donors_of_the_control_are_filler() -> None:
    requests = [_rag(None, ["a", "b"], "Why?"), _pair(None, "d", "t")]
    donors = FillerKV().donors(requests, 0)
    assert [donor.text for donor in donors] == ["a", "b", "d"]
    assert all(donor.filler and donor.context == "filler_kv" for donor in donors)


def test_what_requests_leave_behind_is_never_ingested() -> None:
    with pytest.raises(SettingError, match=r"in_request.*workload\.ingest=false"):
        InRequest().donors([], 0)


@pytest.mark.parametrize("context", [InCompany(), InCompanyOwn()], ids=lambda c: c.name)
def test_without_company_behind_system_and_one_warning(context: DonorContext) -> None:
    lonely = [_rag("Be brief.", ["a", "a"], "Why?"), _pair("Be brief.", "d", "t")]
    with pytest.warns(UserWarning, match=f"context={context.name}: no company for 1 of 2") as seen:
        donors = context.donors(lonely, 0)
    assert len(seen) == 1
    assert donors == [Donor("a", "Be brief."), Donor("d", "Be brief.")]


def test_donor_records_alone_need_no_company() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for context in CONTEXTS:
            assert context.donors([_pair(None, "d", "t")], 0) == [Donor("d", None)]


def test_alone_and_behind_system() -> None:
    requests = [_rag("Be brief.", ["a", "b"], "Why?")]
    assert Alone().donors(requests, 0) == [
        Donor(text, "Be brief.", bare=True, context="alone") for text in "ab"
    ]
    assert BehindSystem().donors(requests, 0) == [Donor(text, "Be brief.") for text in "ab"]


def test_plain_prompts_have_no_passages() -> None:
    for context in CONTEXTS:
        assert context.donors([Request("", text="Once upon a time")], 0) == []


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "1", None])
def test_company_of_nobody_is_refused(n: object) -> None:
    with pytest.raises(SettingError, match=r"context\.n=.*expected a whole number from 1"):
        InCompany(n)  # type: ignore[arg-type]


@pytest.mark.parametrize("context", [InCompany(), InCompanyOwn()], ids=lambda c: c.name)
@pytest.mark.parametrize("seed", range(3))
def test_the_default_experiment_finds_company_for_all(context: DonorContext, seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        donors = context.donors(list(PydocWorkload(limit=12, seed=seed)), seed)
    assert donors
    assert all(donor.context == context.name for donor in donors)
