"""The command line, in process on a tiny saved model, and once as a program of its own."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsem.cli import main
from kvsem.compare import compare, read
from kvsem.compare import factors as found_factors
from kvsem.doctor import serving
from kvsem.errors import KvsemError
from kvsem.explain import turn_before
from kvsem.inputs import paragraphs, prompt_request, read_request
from kvsem.lm import LM
from kvsem.memory.pool import BlockPool
from kvsem.results import RunDir
from kvsem.summary import bootstrap
from tests.families import family_lm
from tests.tiny import TEMPLATE, tiny_lm, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
KL, FLOPS = "quality/kl_first_nats", "cost/flop_ratio"
BRIDGE = "The bridge over the northern river was opened in 1847."
MUSEUM = "The museum of the island holds a letter from the captain."
ASKED = "Who wrote the letter?"
# thinks in its generation prompt, and leaves that out of history
FORGETFUL = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")

Capture = pytest.CaptureFixture[str]


# Runs to compare --------------------------------------------------------------------------------


def make(
    path: Path,
    kl: Mapping[str, float | None],
    *,
    arms: Sequence[str] = ("exact", "epic"),
    config: str = "workload: {path: a.jsonl, limit: 3}\n",
    n_tokens: int = 50,
    **settings: Any,
) -> str:
    """A run whose arm ``epic`` has ``kl`` per request; ``settings`` are the rows' own."""
    with RunDir.create(path, config=config, env={"cpu": "Synthetic"}) as run:
        for request, value in kl.items():
            for arm in arms:
                row: dict[str, Any] = {"request": request, "group": request[0], "arm": arm}
                row |= {KL: value if arm != "exact" else 0.0, FLOPS: 0.5, "n_tokens": n_tokens}
                own = {"model": "tiny", "namespace": "n", "seed": 0, **settings}
                run.append(row | {"settings": own})
    return str(path)


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """Only a1, a2 and b1 are in both; in b1 B has no finite value."""
    a = make(tmp_path / "a", {"a1": 0.1, "a2": 0.3, "b1": 0.2, "c1": 9.0}, recompute="Epic(0.1)")
    b = make(tmp_path / "b", {"b1": float("nan"), "a2": 0.1, "a1": 0.4}, recompute="Epic(0.3)")
    return a, b


def test_differences_are_paired_over_what_both_hold(two: tuple[str, str], capsys: Capture) -> None:
    assert main(["compare", *two, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["n_shared"], found["n_only"], found["n_clusters"]) == (3, [1, 0], 2)
    by_key = {(d["arm"], d["key"]): d for d in found["differences"]}
    epic = by_key["epic", KL]
    assert epic["n"] == 2  # b1 counts on neither side
    assert epic["a"] == pytest.approx(0.2)
    assert epic["b"] == pytest.approx(0.25)
    assert epic["difference"] == pytest.approx(0.05)  # B - A, of +0.3 and -0.2
    assert by_key["exact", KL]["difference"] == 0
    assert by_key["epic", FLOPS]["n"] == 3
    assert list(found["differ"]) == ["recompute"]
    assert found["differ"]["recompute"]["epic"] == ["Epic(0.1)", "Epic(0.3)"]
    assert {"model", "namespace", "seed", "workload", "hardware"} <= set(found["equal"])
    assert found["notes"] == [f"{two[0]}: 1 requests have no partner and are left out"]


def test_the_interval_is_the_bootstrap_of_the_differences(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [f"{'abcdef'[i % 6]}{i}" for i in range(18)]
    ours, theirs = rng.random((2, 18))
    a = make(tmp_path / "a", dict(zip(names, ours.tolist(), strict=True)))
    b = make(tmp_path / "b", dict(zip(names, theirs.tolist(), strict=True)))
    (found,) = compare(read(a), read(b), ["epic"], [KL]).differences
    order = sorted(range(18), key=lambda i: names[i])
    change = (theirs - ours)[order][:, None]
    low, high = bootstrap(change, [f"group {names[i][0]}" for i in order])
    assert (found.low, found.high) == pytest.approx((low[0], high[0]))
    assert found.low < found.difference < found.high


def test_the_table_shows_means_settings_and_notes(tmp_path: Path, capsys: Capture) -> None:
    values = {"a1": 0.1, "b1": 0.3}
    a = make(tmp_path / "a", values, context="alone", recompute="None")
    b = make(tmp_path / "b", values, context="in_company", recompute="Epic")
    assert main(["compare", a, b, "--arm", "epic", "--key", KL]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"epic +{KL} +0.2 +0.2 +0 +0 … 0 +2\n", out)
    assert re.search(r"context +epic +alone +in_company\n", out)
    assert "exact" not in out
    assert "epic: 2 settings differ (context, recompute), so that a difference has no" in out


@pytest.mark.parametrize(
    ("change", "factors"),
    [
        ({"seed": 1}, ["seed"]),
        ({"model": "other", "namespace": "m", "dtype": "bfloat16"}, ["model"]),
        ({"config": "workload: {path: b.jsonl, limit: 3}\n"}, ["workload"]),
        ({"config": "workload: {path: a.jsonl, limit: 9}\n"}, []),
        ({"added_later": 1}, []),
    ],
)
def test_factors_are_counted(tmp_path: Path, change: dict[str, Any], factors: list[str]) -> None:
    """K6: what differs beside what was meant to differ is said."""
    values = {"a1": 0.1, "b1": 0.3}
    a = make(tmp_path / "a", values, recompute="None")
    b = make(tmp_path / "b", values, recompute="Epic", **change)
    found = compare(read(a), read(b), anyway=True)
    assert sorted(found_factors(found.differ, "epic")) == sorted(["recompute", *factors])
    assert set(change) - {"config"} <= set(found.differ)  # told all the same
    (note,) = [note for note in found.notes if "settings differ" in note] or [""]
    assert note.startswith("exact, epic: 2 settings differ") == bool(factors)


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path: Path, capsys: Capture) -> None:
    values = {"a1": 0.1, "b1": 0.3}
    a = make(tmp_path / "a", values)
    other = {
        "share no request": make(tmp_path / "1", {"z": 0.1}),
        "no arm is in both runs": make(tmp_path / "2", values, arms=["none"]),
        "the models differ (namespace n and m); --anyway": make(
            tmp_path / "3", values, namespace="m"
        ),
        "request 'a1' has 50 tokens in": make(tmp_path / "4", values, n_tokens=60),
        "no rows to pair": make(tmp_path / "5", {}),
        "not a run directory": str(tmp_path / "6"),
    }
    for message, b in other.items():
        assert main(["compare", a, b]) == 2, message
        done = capsys.readouterr()
        assert done.out == ""
        assert message in done.err
        assert done.err.count("\n") == 1
    for name in ("3", "4"):
        assert main(["compare", a, str(tmp_path / name), "--anyway"]) == 0
    capsys.readouterr()
    for wrong in (["--arm", "eqic"], ["--key", "quality/kl"]):
        assert main(["compare", a, a, *wrong]) == 2
        assert re.fullmatch(rf"error: {wrong[0]}='{wrong[1]}': .*epic.*\n|.*{KL}.*\n", _err(capsys))


def _err(capsys: Capture) -> str:
    return capsys.readouterr().err


def test_report_writes_the_page_anew(tmp_path: Path, capsys: Capture) -> None:
    runs = [make(tmp_path / name, {"a1": 0.1, "b1": 0.3}) for name in ("a", "b")]
    assert main(["report", *runs]) == 0
    pages = capsys.readouterr().out.split()
    assert pages == [f"{run}/report.html" for run in runs]
    assert all("<html" in Path(page).read_text() for page in pages)
    assert main(["report", "--dry-run", runs[0]]) == 2
    assert _err(capsys).startswith("error: --wandb=False: expected given")


# One prompt -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "passages.txt").write_text(f"{BRIDGE}\n\n{MUSEUM}\n")
    (tmp_path / "prompt.txt").write_text(f"{MUSEUM}\n \n{BRIDGE}\n\n{ASKED}\n")
    (tmp_path / "system.txt").write_text("Answer briefly.\n")
    return tmp_path


def explained(capsys: Capture, *arguments: str | Path) -> dict[str, Any]:
    assert main(["explain", "--json", "--embedder", "none", *map(str, arguments)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    check_sums(found)
    return found


def check_sums(found: Mapping[str, Any]) -> None:
    """I2: every token is in one part and one class."""
    assert sum(found["counts"].values()) == found["n_tokens"]
    at = 0
    for part in found["parts"]:
        assert part["start"] == at
        assert sum(part["counts"].values()) == part["tokens"] > 0
        at += part["tokens"]
    assert at == found["n_tokens"]
    for name, count in found["counts"].items():
        assert sum(part["counts"][name] for part in found["parts"]) == count


def test_every_chunk_is_explained(folder: Path, files: Path, capsys: Capture) -> None:
    given: list[str | Path] = [
        "--model",
        folder,
        "--prompt",
        files / "prompt.txt",
        "--system",
        files / "system.txt",
    ]
    cold = explained(capsys, *given)
    assert cold["counts"] == {**dict.fromkeys(cold["counts"], 0), "new": cold["n_tokens"]}
    assert cold["prefix_ends"] == "no cached prompt begins like this one"
    assert [(p["kind"], p["match"]) for p in cold["parts"]] == [
        ("system", "none"),
        ("passage", "none"),
        ("passage", "none"),
        ("question", "none"),
        ("template", "none"),
    ]
    assert [p["reason"] for p in cold["parts"][1:3]] == ["unknown"] * 2
    warm = explained(capsys, *given, "--ingest", files / "passages.txt")
    matches = [(p["match"], p["text"]) for p in warm["parts"][:3]]
    assert matches == [("prefix", "Answer briefly."), ("chunk", MUSEUM), ("chunk", BRIDGE)]
    system, museum, bridge = (part["tokens"] for part in warm["parts"][:3])
    assert warm["n_paged"] == warm["counts"]["prefix"] == system
    assert warm["counts"]["chunk"] == museum + bridge
    assert warm["prefix_ends"] == "the cached prompt ends there, or goes on otherwise"
    assert not warm["served"]


def test_with_a_rule_it_says_what_was_recomputed(
    folder: Path, files: Path, capsys: Capture
) -> None:
    given: list[str | Path] = ["--model", folder, "--prompt", files / "prompt.txt"]
    given += ["--ingest", files / "passages.txt", "--recompute"]
    planned = explained(capsys, *given[:-1])["counts"]
    half = explained(capsys, *given, "epic", "--ratio", "0.5")
    assert half["served"]
    assert half["counts"]["recomputed"] == pytest.approx(planned["chunk"] / 2, abs=2)
    whole = explained(capsys, *given, "all")["counts"]
    assert (whole["recomputed"], whole["chunk"]) == (planned["chunk"], 0)
    assert explained(capsys, *given, "none")["counts"] == planned


def test_a_refused_candidate_has_its_score_and_reason(
    folder: Path, files: Path, capsys: Capture
) -> None:
    near = MUSEUM.replace("captain", "painter")
    (files / "prompt.txt").write_text(f"{near}\n\n{ASKED}")
    given = ["explain", "--model", str(folder), "--prompt", str(files / "prompt.txt")]
    given += ["--ingest", str(files / "passages.txt"), "--embedder", "hashing", "--json"]
    assert main([*given, "--min-score", "0.99"]) == 0
    part = json.loads(capsys.readouterr().out)["parts"][1]
    assert (part["match"], part["reason"]) == ("none", "below_threshold")
    assert 0.5 < part["score"] < 0.99
    assert main([*given, "--min-score", "0.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    check_sums(found)
    assert found["parts"][1]["match"] == "semantic"
    assert found["counts"]["semantic"] > 0
    assert found["counts"]["new"] > 0


def test_the_table_and_a_prompt_from_standard_input(
    folder: Path, files: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", (files / "prompt.txt").open())
    given = ["--model", str(folder), "--embedder", "none", "--ingest", str(files / "passages.txt")]
    assert main(["explain", "--prompt", "-", *given]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][:7] == ["part", "class", "tokens", "prefix", "chunk", "semantic", "new"]
    passages = [row for row in rows if row[:2] == ["passage", "chunk"]]
    assert len(passages) == 2
    (sums,) = [row for row in rows if row[:1] == ["all"]]
    assert int(sums[1]) == sum(map(int, sums[2:6]))
    assert re.search(r"prefix pages end at token \d+, ahead of '.+': ", out)


@pytest.mark.filterwarnings("ignore:context=in_company")
def test_prefix_that_does_not_come_from_pages_is_told(
    folder: Path, files: Path, capsys: Capture
) -> None:
    """A passage without company was computed right behind the system prompt, where it stands."""
    (files / "passages.txt").write_text(MUSEUM)
    (files / "prompt.txt").write_text(f"{MUSEUM}\n\n{ASKED}")
    given = ["explain", "--model", str(folder), "--prompt", str(files / "prompt.txt")]
    assert main([*given, "--embedder", "none", "--ingest", str(files / "passages.txt")]) == 0
    out = capsys.readouterr().out
    (passage,) = [
        row for row in map(str.split, out.splitlines()) if row[:2] == ["passage", "prefix"]
    ]
    assert f"{passage[2]} tokens behind them are exact too" in out


def chat(path: Path, replies: Sequence[str]) -> Path:
    messages = [{"role": "user", "content": BRIDGE}]
    for reply in replies:
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": ASKED}]
    path.write_text(json.dumps({"id": "c", "messages": messages}) + "\n")
    return path


def test_a_templated_prompt_has_one_bos(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    """A11: the tokens are those of the model's own template, in which BOS stands already."""
    messages = [{"role": "user", "content": BRIDGE}]
    want: Any = tiny_tokenizer().apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    assert want["input_ids"].count(tiny_tokenizer().bos_token_id) == 1
    found = explained(capsys, "--model", folder, "--request", chat(tmp_path / "chat.jsonl", []))
    assert found["n_tokens"] == len(want["input_ids"])


def test_a_conversation_names_the_first_token_that_differs(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A12: a template that rewrites history."""
    path = chat(tmp_path / "chat.jsonl", [MUSEUM])
    found = explained(capsys, "--model", folder, "--request", path)
    turn = found["turn_before"]
    assert turn["n_common"] == turn["n_earlier"]  # goes on from it
    assert found["n_paged"] > 0
    tokenizer = tiny_tokenizer()
    forgetful = tmp_path / "model"
    tiny_model("llama").save_pretrained(forgetful)
    tokenizer.save_pretrained(forgetful)
    (forgetful / "chat_template.jinja").write_text(FORGETFUL)
    found = explained(capsys, "--model", forgetful, "--request", path)
    turn = found["turn_before"]
    assert turn["n_common"] < turn["n_earlier"]
    assert found["n_paged"] == turn["n_common"]
    assert turn["before"].startswith("<")
    assert main(["explain", "--model", str(forgetful), "--request", str(path)]) == 0
    out = capsys.readouterr().out
    where = f"parts at token {turn['n_common']} of {turn['n_earlier']}: {turn['before']!r} became"
    assert f"from the turn before and its reply, this prompt {where}" in out


def test_requests_are_found_by_id(tmp_path: Path) -> None:
    path = chat(tmp_path / "chat.jsonl", [MUSEUM, "Both."])
    last = read_request(str(path))
    assert len(last.messages) == 5
    assert read_request(f"{path}:c") == last
    first = read_request(f"{path}:c/turn-1")
    assert turn_before(first) is None
    before = turn_before(last)
    assert before is not None
    assert [m.content for m in before.messages] == [BRIDGE, MUSEUM, ASKED]
    with pytest.raises(KvsemError, match=r"--request='d': expected an id of .* \(c/turn-1, "):
        read_request(f"{path}:d")


def test_paragraphs_are_passages_and_the_last_is_the_question() -> None:
    assert paragraphs("a\nb\n \n\n\n c \n") == ("a\nb", " c ")
    request = prompt_request(f"{MUSEUM}\n\n{ASKED}", None)
    assert request.segments("passage") == (MUSEUM,)
    assert request.segments("question") == (ASKED,)
    assert prompt_request("x", "s").system == "s"


# The doctor -------------------------------------------------------------------------------------


def examined(capsys: Capture, model: str | Path) -> tuple[int, dict[str, tuple[str, str]]]:
    code = main(["doctor", "--json", "--model", str(model)])
    checks = json.loads(capsys.readouterr().out)
    return code, {check["name"]: (check["state"], check["text"]) for check in checks}


def test_a_healthy_model(
    folder: Path, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    code, checks = examined(capsys, folder)
    assert code == 0
    assert not [name for name, (state, _) in checks.items() if state == "failed"]
    for name in ("prefix", "chunks", "recompute"):
        state, text = checks[name]
        assert state == "ok"
        assert re.search(r"[1-9]\d* (of \d+ |matched )tokens", text)
    assert checks["blend"] == ("ok", "works")
    assert checks["heads"][0] == "note"
    assert "off: " in checks["heads"][1]
    assert "offline: there is no API key" in checks["W&B"][1]
    assert "CPU build" in checks["FAISS"][1]
    monkeypatch.setenv("WANDB_MODE", "online")  # asked for, but nobody can log in
    code, checks = examined(capsys, folder)
    assert (code, checks["W&B"][0]) == (0, "note")


def test_a_model_that_cannot_be_loaded_is_a_failure(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    code, checks = examined(capsys, tmp_path / "empty")
    assert code == 1
    assert checks["model"][0] == "failed"
    assert "cannot be loaded" in checks["model"][1]
    assert "prefix" not in checks


def test_reusing_nothing_is_a_failure(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 12, whether it is known or not."""
    assert {c.state for c in serving(llama)} == {"ok"}
    off = dict.fromkeys(llama.support, (False, "broken"))
    monkeypatch.setattr(llama, "support", off)
    states = {check.name: check.state for check in serving(llama)}
    assert states == {"prefix": "failed", "chunks": "note", "recompute": "note"}
    only_prefix = {**off, "exact_prefix": (True, "")}
    monkeypatch.setattr(llama, "support", only_prefix)
    states = {check.name: check.state for check in serving(llama)}
    assert states == {"prefix": "ok", "chunks": "note", "recompute": "note"}
    monkeypatch.setattr(llama, "support", dict.fromkeys(off, (True, "")))
    monkeypatch.setattr("kvsem.doctor.PASSAGES", ("?", "!"))  # other than what is asked about
    request = prompt_request(f"{MUSEUM}\n\n{ASKED}", "s")
    monkeypatch.setattr("kvsem.doctor.Request.rag", lambda *_, **__: request)
    found = {check.name: check for check in serving(llama)}
    assert found["chunks"].state == found["recompute"].state == "failed"
    assert found["chunks"].text.startswith("nothing was reused as chunk: ")


@pytest.mark.parametrize(
    ("family", "prefix"), [("GPT-2", "ok"), ("Bloom", "ok"), ("Jamba", "failed")]
)
def test_what_a_family_cannot_do_is_a_note_until_nothing_is_left(family: str, prefix: str) -> None:
    lm = family_lm(family)
    found = {check.name: check for check in serving(lm)}
    states = {name: check.state for name, check in found.items()}
    assert states == {"prefix": prefix, "chunks": "note", "recompute": "note"}
    assert found["chunks"].text.endswith(lm.support["moved_chunk"][1])


def test_wrong_books_are_a_failure(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: BlockPool) -> None:
        raise KvsemError("the free list and the pages disagree")

    monkeypatch.setattr(BlockPool, "check", broken)
    assert {(c.state, c.text) for c in serving(llama)} == {
        ("failed", "the free list and the pages disagree")
    }


def test_wrong_logits_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny_lm("llama")
    monkeypatch.setattr("kvsem.doctor.tolerance", lambda _: -1.0)
    found = {check.name: check for check in serving(lm)}
    assert found["prefix"].state == found["recompute"].state == "failed"
    assert "logits differ from exact by" in found["prefix"].text


# The program ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["compare", "report", "explain", "doctor"])
def test_help_has_examples(command: str, capsys: Capture) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    examples = out.partition("examples:\n")[2]
    assert f"kvsem {command} " in examples
    for line in examples.splitlines():
        assert f"kvsem {command}" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["explian"], "invalid choice: 'explian'"),
        (["compare", "a"], "required: RUN_B"),
        (["explain"], "one of the arguments --prompt --request is required"),
        (["explain", "--prompt", "absent.txt"], "absent.txt: No such file"),
        (["explain", "--request", "absent.jsonl:1"], "absent.jsonl:1: no such file"),
        (["report", "absent"], "absent: not a run directory"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert message in done.err


def test_the_entry_point_is_main() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["kvsem"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_help_needs_neither_torch_nor_hydra() -> None:
    script = (
        "import sys\nfrom kvsem.cli import main\nassert main(['--help']) == 0\n"
        "assert not {'torch', 'hydra', 'pandas', 'wandb'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)


def commands() -> list[str]:
    """The shell lines of docs/cli.md."""
    (block,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "cli.md").read_text(), re.DOTALL)
    return [str(block)]


def shell(script: str, folder: Path, more: str) -> list[dict[str, Any]]:
    """Run ``script`` in ``folder`` with a `kvsem` that prints JSON; what its calls printed."""
    (folder / "kvsem").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvsem.cli "$@" {more}\n')
    (folder / "kvsem").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].strip()
    return found


def check_shipped(found: list[dict[str, Any]]) -> None:
    planned, served = found
    assert planned["counts"]["chunk"] > 0
    assert served["counts"]["recomputed"] > 0
    for explanation in found:
        check_sums(explanation)


def test_the_shipped_example_runs_as_a_program(folder: Path, tmp_path: Path) -> None:
    """I5: and it does blend."""
    (script,) = commands()
    check_shipped(shell(script, tmp_path, f"--json --embedder none --model {folder}"))


@pytest.mark.slow
def test_the_shipped_example_runs_on_the_real_model(tmp_path: Path) -> None:
    (script,) = commands()
    check_shipped(shell(script, tmp_path, "--json"))
