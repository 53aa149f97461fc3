"""Replaying real traces: as many hits as a plain LRU model counts, request by request."""

from __future__ import annotations

import gzip
import json
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsem.errors import DataError, SettingError
from kvsem.eviction.cost_aware import CostAware
from kvsem.eviction.fifo import FIFO
from kvsem.eviction.lru import LRU
from kvsem.serving.replay import Replayed, main, policies, policy, read_trace, replay

ROOT = Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "data" / "traces"
CONVERSATION, SYNTHETIC = "mooncake_conversation.jsonl.gz", "mooncake_synthetic.jsonl.gz"


class Model:
    """LRU over prefixes, in a dictionary whose first key goes next.

    Of one request the last block is touched first: so nothing stands before what continues it,
    and only ends of chains are evicted.
    """

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.prefixes: dict[tuple[int, int], int] = {}  # (prefix, next id): number of that prefix
        self.n_evicted = self.n_refused = 0
        self.hits: list[int] = []

    def serve(self, ids: Sequence[int]) -> None:
        path, at = [], 0
        for i in ids:
            at = self.prefixes.setdefault((at, i), len(self.prefixes) + 1)
            path.append(at)
        if len(path) > self.n_pages:
            self.n_refused += 1
            self.hits.append(0)
            return
        n = next((k for k, prefix in enumerate(path) if prefix not in self.cached), len(path))
        for prefix in reversed(path[:n]):  # held: cannot go to make room for the rest
            self.cached.move_to_end(prefix)
        while len(self.cached) + len(path) - n > self.n_pages:
            self.cached.popitem(last=False)
            self.n_evicted += 1
        for prefix in reversed(path):
            self.cached[prefix] = None
            self.cached.move_to_end(prefix)
        self.hits.append(n)


def compare(requests: list[list[int]], n_pages: int) -> Replayed:
    model = Model(n_pages)
    for ids in requests:
        model.serve(ids)
    done = replay(requests, n_pages, LRU())
    assert done.hits == tuple(model.hits)
    assert done.evictions.total() == done.evictions["capacity"] == model.n_evicted
    assert (done.n_hits, done.n_refused) == (sum(model.hits), model.n_refused)
    assert (done.n_requests, done.n_blocks) == (len(requests), sum(map(len, requests)))
    return done


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30),
    st.integers(1, 12),
)
def test_hits_are_those_of_a_plain_lru(requests: list[list[int]], n_pages: int) -> None:
    """Too large requests among them, which change nothing."""
    compare(requests, n_pages)


def trace(name: str, limit: int | None) -> list[list[int]]:
    if not TRACES.is_dir():
        pytest.skip("needs ../shared/data/traces beside the repository")
    return list(read_trace(TRACES / name, limit))


@pytest.mark.parametrize(
    ("name", "limit", "n_requests"),
    [
        pytest.param(CONVERSATION, 5000, 5000, id="conversation"),
        pytest.param(SYNTHETIC, None, 2595, id="synthetic"),
        pytest.param(CONVERSATION, None, 7820, id="whole", marks=pytest.mark.slow),
    ],
)
def test_hits_on_a_real_trace(name: str, limit: int | None, n_requests: int) -> None:
    """At three sizes, which differ in what they find."""
    requests = trace(name, limit)
    assert len(requests) == n_requests
    n_distinct = len({block for ids in requests for block in ids})
    rates = [compare(requests, int(n_distinct * share)).hit_rate for share in (0.02, 0.1, 0.4)]
    assert rates[0] + 0.05 < rates[1] < rates[2] - 0.05
    repeated = sum(map(len, requests)) - n_distinct
    assert rates[2] <= repeated / sum(map(len, requests))


def test_policies_differ_on_a_real_trace() -> None:
    requests = trace(SYNTHETIC, None)
    evictions = (LRU(), FIFO(), CostAware())
    found = {replay(requests, 8000, eviction).n_hits for eviction in evictions}
    assert len(found) == 3
    assert min(found) > 0


def test_operations_are_counted() -> None:
    done = replay([[1, 2], [1, 2], [3], [1, 2, 3, 4], [1]], 2, LRU())
    # 1, 2 miss; 1, 2 hit; 3 misses, 2 goes; four pages are refused; 1 hits
    assert done.hits == (0, 2, 0, 0, 1)
    assert (done.n_requests, done.n_blocks, done.n_hits, done.n_refused) == (5, 10, 3, 1)
    assert done.evictions == {"capacity": 1}
    assert done.n_operations == 3 * (2 + 2 + 1 + 1) + 1
    assert done.hit_rate == 0.3
    assert done.seconds > 0
    assert replay([], 2, LRU()).hit_rate == 0.0


# Files and the command ------------------------------------------------------------------------


def written(path: Path, *requests: Sequence[int]) -> Path:
    lines = [json.dumps({"timestamp": 0, "hash_ids": list(ids)}) + "\n" for ids in requests]
    data = "".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_trace_is_read(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, [1, 2], [], [3])
    assert list(read_trace(path)) == [[1, 2], [], [3]]
    assert list(read_trace(path, 2)) == [[1, 2], []]
    assert list(islice(read_trace(str(path)), 1)) == [[1, 2]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: broken JSON"),
        ("[" * 100_000, "line 2: broken JSON"),
        ("\udcff", "line 2: broken JSON"),
        ("[1, 2]", 'line 2: expected "hash_ids"'),
        ('{"ids": [1]}', 'line 2: expected "hash_ids"'),
        ('{"hash_ids": 1}', 'line 2: expected "hash_ids"'),
        ('{"hash_ids": [1.5]}', 'line 2: expected "hash_ids"'),
        ('{"hash_ids": [true]}', 'line 2: expected "hash_ids"'),
        ('{"hash_ids": [9223372036854775808]}', "line 2: a number .* 64 bits"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "t.jsonl", [1])
    path.write_bytes(path.read_bytes() + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(DataError, match=rf"t\.jsonl {message}") as caught:
        list(read_trace(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["missing", "folder", "empty", "cut", "not gzip"])
def test_a_bad_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "t.jsonl.gz"
    match damage:
        case "folder":
            path.mkdir()
        case "empty":
            path.write_bytes(b"\n")
        case "cut":
            path.write_bytes(gzip.compress(b'{"hash_ids": [1]}\n')[:-4])
        case "not gzip":
            path.write_bytes(b"\x1f\x8bno")
    with pytest.raises(DataError, match=r"t\.jsonl\.gz: ") as caught:
        list(read_trace(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_at_least_one(tmp_path: Path, limit: int) -> None:
    with pytest.raises(SettingError, match=f"limit={limit}"):
        list(read_trace(written(tmp_path / "t.jsonl", [1]), limit))


def test_every_policy_has_a_name() -> None:
    assert {name: type(policy(name)).__name__ for name in policies()} == {
        path.stem: yaml.rpartition(".")[2]
        for path in (ROOT / "conf" / "eviction").glob("*.yaml")
        for yaml in [path.read_text().split("_target_:")[1].split()[0]]
    }
    assert len(policies()) >= 3


@pytest.mark.parametrize("eviction", policies())
def test_the_command_prints_what_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], eviction: str
) -> None:
    path = written(tmp_path / "t.jsonl", [1, 2], [1, 2], [3], [4])
    assert main([str(path), "--pages", "2", "--eviction", eviction, "--limit", "3"]) == 0
    out = capsys.readouterr().out
    for words in ("requests 3 (0 refused", "blocks 5 (2 hits)", "hit rate 0.4000", "1 capacity"):
        assert words in " ".join(out.split())
    assert "page operations/s" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pages", "0"], "n_pages=0"),
        (["--pages", "2", "--eviction", "best"], "eviction='best': expected cost_aware or"),
        (["--pages", "2", "--limit", "0"], "limit=0"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([str(written(tmp_path / "t.jsonl", [1])), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_help_helps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("TRACE", "--pages", "hash_ids", *policies()))
