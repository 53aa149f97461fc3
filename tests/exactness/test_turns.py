"""Turn k reuses the turns before it, exactly and as far as the tokens agree; never further.

QwenLM/Qwen3#1826, QwenLM/Qwen3.8#48, raullenchai/Rapid-MLX#214; ggml-org/llama.cpp PR 26398;
vllm PR 16976.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.run import entry
from kvsem.diagnose import diagnose, diagnose_turn, turns
from kvsem.engine import Engine
from kvsem.harness import Arm, Harness
from kvsem.lm import LM
from kvsem.records import to_requests
from kvsem.serving.loop import Loop
from kvsem.types import Request
from kvsem.workloads.jsonl import JsonlWorkload
from tests.tiny import (
    TEMPLATE,
    fast,
    plain_generate,
    plain_logits,
    prose,
    tiny_engine,
    tiny_lm,
    tiny_model,
    tiny_tokenizer,
    tokens,
)

DATA = Path(__file__).parents[3] / "shared" / "data"
HISTORY = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n"
ANSWER = "m['content'] if m['role'] != 'assistant' else m['content']"
REPLY = "<think>hm, a bridge</think>the stone bridge of the river"
# what a template may do to the turns before the last, and to a reply fed as it was sampled
REWRITES: dict[str, tuple[str, str]] = {
    "none": (TEMPLATE, REPLY),
    "thoughts stripped": (
        TEMPLATE.replace("m['content']", f"({ANSWER}.split('</think>')[-1])"),
        REPLY,
    ),
    "thoughts opened": (
        TEMPLATE.replace(PROMPT, PROMPT + "<think>\n"),
        "hm, a bridge</think>the stone bridge",
    ),
    "trimmed": (TEMPLATE.replace("m['content']", "m['content'] | trim"), "the stone bridge \n\n"),
    "calls rendered anew": (
        TEMPLATE.replace("m['content']", f"({ANSWER}.replace('\": \"', '\":\"'))"),
        '{"name": "find", "place": "the river"}',
    ),
    "a date": (
        TEMPLATE.replace("{% for", "day {{ messages | length }}\n{% for", 1),
        "the stone bridge",
    ),
}


def chat(reply: str, questions: Sequence[str] = ("Who built it?", "When?")) -> list[Request]:
    """Two turns; the first is answered by ``reply``."""
    messages = [{"role": "system", "content": "You answer from memory, and briefly."}]
    messages += [{"role": "user", "content": f"{prose(3, 12)} {questions[0]}"}]
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": questions[1]}]
    return list(to_requests({"id": "c", "messages": messages}, 8, conversations=True))


def lm_with(template: str, kind: str = "llama") -> LM:
    lm = tiny_lm(kind)
    lm.tokenizer = fast(
        tiny_tokenizer().backend_tokenizer, template, bos_token="<|bos|>", eos_token="<|eos|>"
    )
    return lm


def paging(lm: LM, **more: Any) -> Engine:
    """Exact prefix pages and nothing else."""
    return tiny_engine(lm, reuse=("prefix",), **more)


def ids_of(lm: LM, text: str) -> list[int]:
    ids: list[int] = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def serve(engine: Engine, request: Request, sampled: Sequence[int]) -> list[int]:
    """Serve ``request`` as if the model had sampled these tokens; returns all ids that were fed."""
    done = engine.prefill(request, room=len(sampled))
    if sampled:
        engine.lm.extend(sampled, done.kv)
    engine.leave(done, sampled)
    return [*done.prompt.ids.tolist(), *sampled]


def common(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Length of the longest common prefix."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def assert_as_cold(engine: Engine, request: Request, plain: Any, hit: int) -> None:
    """Reuses exactly the first ``hit`` tokens, and answers as with every cache off."""
    output = engine.generate(request)
    assert output.plan.n_paged == output.counts()["prefix"] == hit
    assert output.counts()["new"] == output.plan.n_tokens - hit
    ids = engine.render(request).ids
    assert (output.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4
    want = plain_generate(plain, ids, request.max_new_tokens)
    assert list(output.tokens) == want[: len(output.tokens)]


# Templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REWRITES)
def test_a_rewritten_history_hits_as_far_as_it_agrees(name: str) -> None:
    template, reply = REWRITES[name]
    lm = lm_with(template)
    first, second = chat(reply)
    engine = paging(lm)
    fed = serve(engine, first, ids_of(lm, reply))
    later = engine.render(second).ids
    found = diagnose(lm.tokenizer, fed, later)
    hit = common(fed, later)
    assert found == diagnose_turn(lm.tokenizer, first, second)
    assert found.n_common == hit
    assert found.is_prefix == (name == "none")
    if found.before_id is not None and found.now_id is not None:
        assert (found.before_id, found.now_id) == (fed[hit], later[hit])
        assert (found.before, found.now) == tuple(
            lm.tokenizer.decode([token]) for token in (fed[hit], int(later[hit]))
        )
        assert f"token {hit} of {len(fed)}: {found.before!r} became {found.now!r}" in str(found)
    assert_as_cold(engine, second, tiny_model("llama"), hit)


def test_where_the_templates_part() -> None:
    """In the head, in the generation prompt, inside the reply, at its end."""
    parted = {}
    for name, (template, reply) in REWRITES.items():
        lm = lm_with(template)
        first, second = chat(reply)
        n = len(paging(lm).render(first).ids)
        found = diagnose_turn(lm.tokenizer, first, second)
        parted[name] = (found.n_common - n, found.n_earlier - n)
    assert parted["none"][0] == parted["none"][1] > 10
    assert parted["thoughts stripped"][0] == 0
    assert parted["thoughts opened"][0] < 0
    assert 0 < parted["trimmed"][0] < parted["trimmed"][1]
    assert 0 < parted["calls rendered anew"][0] < parted["calls rendered anew"][1]
    assert parted["a date"][0] < -30


# Ids that text does not lead back to ----------------------------------------------------------


def apart(lm: LM, text: str) -> list[int]:
    """The text, a token a byte: no tokenizer would cut it like this."""
    return [ids_of(lm, " ")[0] if c == " " else ids_of(lm, c)[0] for c in text]


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_sampled_ids_that_tokenise_otherwise(lm: LM, plain: Any, seed: int | None) -> None:
    """Keys are the ids that were fed; text that is equal is no hit."""
    sampled = apart(lm, "the stone bridge of the river")
    if seed is not None:
        sampled = tokens(12, seed).tolist()
    text = lm.tokenizer.decode(sampled)
    assert text.strip()
    first, second = chat(text)
    engine = paging(lm)
    fed = serve(engine, first, sampled)
    later = engine.render(second).ids
    hit = common(fed, later)
    assert len(fed) - len(sampled) <= hit < len(fed)
    assert_as_cold(engine, second, plain, hit)


def test_no_chunk_is_taken_by_its_text(lm: LM) -> None:
    """The turns' chunks too: a token's source has that token's id."""
    sampled = apart(lm, "the stone bridge of the river was built")
    text = lm.tokenizer.decode(sampled)
    first, second = chat(text)
    engine = tiny_engine(lm)
    serve(engine, first, sampled)
    engine.ingest([chat(text, ("Who closed it?", "Why?"))[1]])
    plan, ids = engine.plan(second), engine.render(second).ids
    assert plan.runs
    for run in plan.runs:
        entry = engine.store.get(run.entry)
        assert entry is not None
        taken = entry.ids[run.source : run.source + run.length]
        assert (taken == ids[run.target : run.target + run.length]).all()


def test_what_the_model_says_is_reused_as_far_as_it_was_fed(lm: LM, plain: Any) -> None:
    """Five turns of the model's own words, its answers read back from their text."""
    engine = paging(lm)
    messages: list[dict[str, str]] = []
    fed: list[list[int]] = []
    for i in range(5):
        messages.append({"role": "user", "content": prose(i, 6)})
        (request,) = to_requests({"id": i, "messages": messages}, 8, conversations=False)
        ids = engine.render(request).ids
        hit = min(max((common(x, ids) for x in fed), default=0), len(ids) - 1)
        assert engine.plan(request).n_paged == hit
        assert i == 0 or hit > 10 * i
        output = engine.generate(request)
        assert list(output.tokens) == plain_generate(plain, ids, 8)[: len(output.tokens)]
        fed.append([*ids.tolist(), *output.tokens[:-1]])
        text = lm.tokenizer.decode(output.tokens, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text if text.strip() else "no"})


# Recorded dialogues ---------------------------------------------------------------------------


def lines(name: str) -> list[dict[str, Any]]:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is not there; put the public development data beside the checkout")
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in text.splitlines()]


def dialogues(name: str) -> list[dict[str, Any]]:
    """Records of the jsonl workload; calls of tools are written out as a template would, and of
    the policy there is the beginning."""
    if name == "mt_bench_101":
        return [
            {
                "id": row["id"],
                "messages": [
                    {"role": role, "content": turn[key]}
                    for turn in row["turns"]
                    for role, key in (("user", "user"), ("assistant", "bot"))
                ],
            }
            for row in lines("dialogue/mt_bench_101.jsonl.gz")
        ]
    policies = {
        r["domain"]: r["text"][:1000] for r in lines("system_prompts/tau_bench_policies.jsonl")
    }
    return [
        {
            "id": row["id"],
            "system": policies.get(row["domain"]),
            "messages": [
                {"role": m["role"], "content": m.get("content") or json.dumps(m["tool_calls"])}
                for m in row["messages"]
                if m.get("content") or m.get("tool_calls")
            ],
        }
        for row in lines("dialogue/tau_bench_dialogues.jsonl.gz")
    ]


def conversations(tmp_path: Path, name: str, n: int) -> list[Request]:
    """Every turn of the ``n`` shortest dialogues, read from a file."""
    chosen = sorted(dialogues(name), key=lambda record: len(json.dumps(record)))
    chosen = [record for record in chosen if len(record["messages"]) > 4][:n]
    path = tmp_path / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in chosen), encoding="utf-8")
    return list(JsonlWorkload(path, ingest=False, conversations=True, max_new_tokens=4))


@pytest.mark.parametrize("name", ["mt_bench_101", "tau_bench"])
def test_recorded_turns_continue_those_before(tmp_path: Path, name: str) -> None:
    requests = conversations(tmp_path, name, 12)
    pairs = list(turns(requests))
    assert len(pairs) == len(requests) - 12
    for earlier, later in pairs:
        assert later.group == earlier.group
        assert diagnose_turn(tiny_tokenizer(), earlier, later).is_prefix


@pytest.mark.parametrize("name", ["mt_bench_101", "tau_bench"])
def test_recorded_dialogues_hit_their_longest_common_prefix(tmp_path: Path, name: str) -> None:
    """Two dialogues in turns of each other, replies as recorded; the first answers are checked."""
    requests = conversations(tmp_path, name, 2)
    lm = tiny_lm("llama", max_position_embeddings=8192)
    plain = tiny_model("llama", max_position_embeddings=8192)
    engine = paging(lm)
    fed: list[np.ndarray] = []
    hits = 0
    for request in sorted(requests, key=lambda r: len(r.messages))[:10]:
        ids = engine.render(request).ids
        hit = min(max((common(x, ids) for x in fed), default=0), len(ids) - 1)
        assert engine.plan(request).n_paged == hit
        output = engine.generate(request)
        assert (output.logits - plain_logits(plain, ids)[-1]).abs().max() <= 1e-4
        reply = ids_of(lm, request.answers[0]) if request.answers else []
        serve(engine, request, reply)
        fed += [np.array([*ids, *output.tokens[:-1]]), np.array([*ids, *reply])]
        hits += hit
    assert hits > 0.5 * sum(len(x) for x in fed[::2])


# Every entry point ----------------------------------------------------------------------------


def templated(lm: LM, request: Request) -> list[int]:
    messages = [{"role": m.role, "content": m.content} for m in request.messages]
    ids: list[int] = lm.tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return ids


def test_one_bos_through_library_loop_and_harness(llama: LM) -> None:
    bos = llama.tokenizer.bos_token_id
    requests = [*chat("of stone"), Request.rag("r", [prose(1), prose(2)], "Why?")]
    harness = Harness(
        llama, tiny_engine(llama, admit="none", reuse=()), [Arm("prefix", paging(llama))], []
    )
    for request, rows in zip(requests, harness.run(requests), strict=True):
        want = templated(llama, request)
        assert want.count(bos) == 1
        assert [row["n_tokens"] for row in rows] == [len(want)] * 3
        engine = tiny_engine(llama)
        assert engine.render(request).ids.tolist() == want
        assert engine.plan(request).n_tokens == len(want)
        done = engine.prefill(request)
        assert done.prompt.ids.tolist() == want
        engine.leave(done)
        loop = Loop(paging(llama))
        loop.submit(request)
        loop.step()
        (flight,) = loop.running
        assert flight.done is not None
        assert flight.done.prompt.ids.tolist() == want
        loop.engine.drop(flight.done)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model in a folder, with a template that strips thoughts."""
    lm = lm_with(REWRITES["thoughts stripped"][0])
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    lm.tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path


@pytest.mark.slow  # some 10 s, most of them for plots and page
@pytest.mark.ci
def test_a_conversation_from_the_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One BOS, prefix tokens = what the prompts share, and a note on the turn that parts."""
    monkeypatch.setenv("KVSEM_CACHE", str(folder / "cache"))
    requests = chat(REPLY)
    messages = [{"role": m.role, "content": m.content} for m in requests[1].messages]
    data = folder / "chat.jsonl"
    data.write_text(json.dumps({"id": "c", "messages": messages}), encoding="utf-8")
    threads = torch.get_num_threads()
    code = entry(
        [
            "workload=jsonl", f"workload.path={data}", "workload.conversations=true",
            "workload.ingest=false", "model=hub", f"model.name={folder / 'tiny'}",
            "model.device=cpu", "arms=[prefix]", "embedder=hashing", "threads=1",
            f"out={folder / 'run'}", "baselines=measure",
        ]
    )  # fmt: skip
    torch.set_num_threads(threads)
    seen = capsys.readouterr()
    assert code == 0, seen.err
    rows = [json.loads(line) for line in (folder / "run" / "samples.jsonl").open()]
    lm = lm_with(REWRITES["thoughts stripped"][0])
    want = [templated(lm, request) for request in requests]
    for arm in ("exact", "prefix"):
        own = [row for row in rows if row["arm"] == arm]
        assert [row["n_tokens"] for row in own] == [len(ids) for ids in want]
        assert [row["request"] for row in own] == ["c/turn-1", "c/turn-2"]
    hits = [row["reuse/prefix_tokens"] for row in rows if row["arm"] == "prefix"]
    assert hits == [0, common(*want)]
    notes = json.loads((folder / "run" / "summary.json").read_text())["status"]["notes"]
    found = diagnose_turn(lm.tokenizer, *requests)
    assert [note for note in notes if f"c/turn-2 from c/turn-1 {found}" in note]
    assert f"became {found.now!r}" in " ".join(seen.out.split())
