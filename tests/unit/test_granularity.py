"""The study of granularity: what its arms find, hold and copy, checked by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from experiments.granularity.estimate import estimates
from experiments.granularity.measure import COUNTS, Arm, PageArm, SegmentArm, distinct, measure
from experiments.granularity.run import HERE, check, main, pools
from experiments.granularity.workloads import Served, interleave
from experiments.study import DATA, entry
from kvsem.errors import SettingError

# System of 6 tokens, question of 4, tail and reply of 5; the second request asks on behind it.
FIRST = [*range(100, 106), *range(200, 204), *range(300, 305)]
SECOND = [*FIRST, *range(400, 403), *range(500, 502)]
OTHER = [*range(100, 106), *range(600, 606), *range(700, 702)]
REQUESTS = (
    Served("a/0", "a", np.array(FIRST), 12, (6, 10, 15)),
    Served("a/1", "a", np.array(SECOND), 19, (6, 10, 15, 18, 20)),
    Served("b/0", "b", np.array(OTHER), 13, (6, 12, 14)),
)
ARMS: dict[str, Callable[[], Arm]] = {
    "page_1/unlimited": partial(PageArm, 1, False, None),
    "page_4/unlimited": partial(PageArm, 4, False, None),
    "page_4_partial/unlimited": partial(PageArm, 4, True, None),
    "page_16/unlimited": partial(PageArm, 16, False, None),
    "page_16_partial/unlimited": partial(PageArm, 16, True, None),
    "segment/unlimited": partial(SegmentArm, None),
}
HITS = {  # by request: nothing yet; all of the first with its reply; the system prompt
    "page_1/unlimited": [0, 15, 6],
    "page_4/unlimited": [0, 12, 4],
    "page_4_partial/unlimited": [0, 15, 6],
    "page_16/unlimited": [0, 0, 0],
    "page_16_partial/unlimited": [0, 15, 6],
    "segment/unlimited": [0, 15, 6],
}


def column(name: str) -> int:
    return COUNTS.index(name)


@pytest.fixture(scope="module")
def measured() -> Any:
    return measure(REQUESTS, ARMS, repetitions=2)


def test_tokens_found_at_each_granularity(measured: Any) -> None:
    found = {arm: measured.counts[:, a, 0].tolist() for a, arm in enumerate(measured.arms)}
    assert found == HITS


def test_only_a_match_that_ends_inside_a_page_copies(measured: Any) -> None:
    copied = measured.counts[:, :, column("copied_tokens")].T
    assert dict(zip(measured.arms, copied.tolist(), strict=True)) == {
        arm: [n % int(arm.split("_")[1]) for n in hits] if "partial" in arm else [0, 0, 0]
        for arm, hits in HITS.items()
    }


def test_pages_held_and_slots_left_empty(measured: Any) -> None:
    pages = dict(zip(measured.arms, measured.counts[:, :, column("pages")].T, strict=True))
    empty = dict(zip(measured.arms, measured.counts[:, :, column("empty_slots")].T, strict=True))
    assert pages["page_4/unlimited"].tolist() == [4, 5, 4]
    assert empty["page_4/unlimited"].tolist() == [1, 0, 2]
    assert pages["page_16_partial/unlimited"].tolist() == [1, 2, 1]
    assert pages["segment/unlimited"].tolist() == [3, 5, 3]  # one 16-token page a segment
    assert empty["segment/unlimited"].tolist() == [33, 60, 34]


def test_what_is_held_at_the_end(measured: Any) -> None:
    ends = measured.ends
    # every token once: 20 of the first dialogue, and 8 of the other behind the same system prompt
    assert distinct(REQUESTS) == ends["page_1/unlimited"]["held_tokens"] == 28
    # of whole pages 20 and 6 more; two tokens of the system prompt stand in either's second page
    assert distinct(REQUESTS, 4) == 26
    assert ends["page_4/unlimited"]["held_tokens"] == 26 + 2
    # the first request's end of 3 tokens is superseded by the page that goes on behind it
    assert ends["page_4_partial/unlimited"]["held_tokens"] == 20 + 8 + 2
    assert ends["page_4_partial/unlimited"]["held_slots"] == 32
    assert ends["page_16_partial/unlimited"]["held_tokens"] == 20 + 14
    assert ends["segment/unlimited"] == {
        "held_slots": 16 * 7,
        "held_tokens": 28,
        "blocks": 7,
        "evicted_blocks": 0,
        "pool_slots": 0,
    }


def test_the_last_prompt_token_is_never_a_hit() -> None:
    again = Served("c", "c", np.arange(9), 8, (4, 9))
    for make in (partial(PageArm, 4, False, None), partial(PageArm, 4, True, None)):
        arm = make()
        arm.serve(again)
        assert arm.serve(again).hit_tokens in (4, 7)
    segment = SegmentArm(None)
    assert [segment.serve(again).hit_tokens for _ in range(2)] == [0, 4]
    segment.pool.check()


@pytest.mark.parametrize("make", [partial(PageArm, 4, True), partial(SegmentArm)])
def test_a_small_pool_forgets_what_was_used_least_recently(make: Any) -> None:
    arm = make(48)
    one = Served("1", "1", np.arange(20), 18, (10, 20))
    two = Served("2", "2", np.arange(1000, 1020), 18, (10, 20))
    three = Served("3", "3", np.arange(2000, 2020), 18, (10, 20))
    for request in (one, two, three):
        arm.serve(request)
        arm.pool.check()
    assert arm.pool.evictions["capacity"] > 0
    assert arm.serve(three).hit_tokens >= 10  # the newest is there
    assert arm.serve(one).hit_tokens < 10


def test_limited_pools_have_the_same_tokens_and_hold_any_one_request() -> None:
    cfg = OmegaConf.create({"pool_shares": [0.25, 0.5], "page_sizes": [1, 16]})
    assert pools(cfg, REQUESTS, 1000) == {"unlimited": None, "pool_25": 250, "pool_50": 500}
    assert pools(cfg, REQUESTS, 28)["pool_25"] == 20 + 16 * 5 + 32


def test_differences_are_paired_and_times_are_ratios(measured: Any) -> None:
    found = estimates(measured, REQUESTS)
    hit = found["arms"]["page_4/unlimited"]["hit_rate"]
    assert hit["mean"] == pytest.approx((0 + 12 / 19 + 4 / 13) / 3, rel=1e-4)
    assert hit["low"] <= hit["mean"] <= hit["high"]
    assert hit["n"] == 3
    pair = found["pairs"]["page_4_partial/unlimited-page_4/unlimited"]
    assert pair["hit_rate"]["mean"] == pytest.approx((3 / 19 + 2 / 13) / 3, rel=1e-4)
    times = measured.seconds.sum(axis=2)
    a, b = (measured.arms.index(f"page_{size}/unlimited") for size in (1, 16))
    ratio = math.exp(np.log(times[:, a] / times[:, b]).mean())
    pair = found["pairs"]["page_1/unlimited-page_16/unlimited"]
    assert pair["bookkeeping_ratio"]["mean"] == pytest.approx(ratio, rel=1e-4)


def test_dialogues_take_turns_and_the_next_follows_one_that_ended() -> None:
    def turns(name: str, n: int) -> list[Served | None]:
        return [Served(f"{name}{i}", name, np.arange(2), 1, (2,)) for i in range(n)]

    order = interleave([turns("a", 1), turns("b", 3), turns("c", 2), [None]], sessions=2)
    assert [r and r.id for r in order] == ["a0", "b0", "c0", "b1", "c1", "b2", None]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_sizes", [1, 4]),
        ("page_sizes", [16, 512]),
        ("page_sizes", 16),
        ("pool_shares", [1.5]),
        ("limit", 0),
        ("repetitions", 0),
        ("workloads", ["nothing"]),
        ("more", 1),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: Any) -> None:
    cfg = OmegaConf.merge(OmegaConf.load(HERE / "config.yaml"), {name: value})
    assert isinstance(cfg, DictConfig)
    own = OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k not in ("defaults", "hydra")])
    with pytest.raises(SettingError, match=name):
        check(own)


def test_missing_data_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", f"data={tmp_path}", f"out={tmp_path / 'out'}"])
    assert entry(main) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "tau_bench_policies.jsonl is missing" in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.ci
def test_two_dialogues_of_the_real_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not DATA.is_dir():
        pytest.skip("the public data is not beside the repository (../shared/data)")
    out = tmp_path / "out"
    arguments = ["limit=2", "repetitions=1", "page_sizes=[4,16]", f"data={DATA}", f"out={out}"]
    monkeypatch.setattr("sys.argv", ["run.py", *arguments])
    assert entry(main) == 0
    written = {path.name for path in out.iterdir()}
    assert written == {
        *("config.yaml", "env.json", "rows.jsonl", "summary.json"),
        *("hit_rate.svg", "costs.svg"),
    }
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["workloads"]) == {"service", "rag", "chat"}
    for workload in summary["workloads"].values():
        hits = {arm: keys["hit_rate"]["mean"] for arm, keys in workload["arms"].items()}
        inside = [hits[f"page_{size}_partial/unlimited"] for size in (4, 16)]
        assert inside[0] == inside[1] >= hits["page_4/unlimited"] >= hits["page_16/unlimited"] > 0
        assert inside[0] >= hits["segment/unlimited"]
    for path in out.iterdir():
        assert str(tmp_path) not in path.read_text()
