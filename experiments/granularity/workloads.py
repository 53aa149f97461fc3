"""Real requests as token ids: customer service, RAG and chat, in the order they would arrive."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig

from experiments.public import Record, read
from experiments.study import data_file
from kvsem.prompt import render
from kvsem.types import Kind, Message, Request, Segment

CONTEXT = 8192  # tokens that the model can hold
RAG_SYSTEM = (
    "You answer questions about the passage below. Use only what the passage says, answer in a "
    "few words, and say so where the passage does not hold the answer."
)
CHAT_SYSTEM = (
    "You are a helpful assistant. Answer truthfully and to the point, in the language of the "
    "user. Remember what was said earlier in the conversation, follow corrections, and ask back "
    "where a request can be understood in more than one way."
)


@dataclass(frozen=True)
class Served:
    """One request and the reply it got. ``ids``: prompt, then reply, int64.

    ``ends``: where the segments of ``ids`` end, each with the template text ahead of it; the
    last one is the reply. ``group``: what the bootstrap draws whole.
    """

    id: str
    group: str
    ids: np.ndarray
    n_prompt: int
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival; ``n_too_long`` more did not fit the model."""

    requests: tuple[Served, ...]
    n_too_long: int


@dataclass(frozen=True)
class Dialogue:
    """(role, text) by message; every assistant message is the reply to a request."""

    id: str
    group: str
    system: str
    messages: tuple[tuple[str, str], ...]


def load(name: str, cfg: DictConfig, tokenizer: Any) -> Workload:
    """The workload ``name``, in the order and of the size that the settings ask for."""
    n = cfg.sizes[name] if cfg.limit is None else min(cfg.sizes[name], cfg.limit)
    rng = np.random.default_rng(cfg.seed)
    match name:
        case "service":
            queues = [_turns(d, tokenizer) for d in _drawn(list(_service(cfg)), n, rng)]
            return _workload(interleave(queues, cfg.sessions))
        case "chat":
            queues = [_turns(d, tokenizer) for d in _drawn(list(_chat(cfg)), n, rng)]
            return _workload(interleave(queues, cfg.sessions))
    return _workload(_drawn(list(_questions(cfg, n, rng, tokenizer)), None, rng))


def interleave(queues: Sequence[Sequence[Served | None]], sessions: int) -> Iterator[Served | None]:
    """One turn of each of ``sessions`` live dialogues, again and again; the next follows one
    that ended."""
    lanes: list[list[Served | None]] = [[] for _ in range(sessions)]
    waiting = list(reversed(queues))
    while waiting or any(lanes):
        for lane in lanes:
            if not lane and waiting:
                lane.extend(waiting.pop())
            if lane:
                yield lane.pop(0)


def served(
    tokenizer: Any, id: str, group: str, messages: Sequence[Message], reply: str
) -> Served | None:
    """A request as tokens; None where prompt and reply are longer than the model's context."""
    prompt = render(tokenizer, Request(id, tuple(messages)))
    answer = tokenizer(reply, add_special_tokens=False)["input_ids"]
    ids = np.concatenate([prompt.ids, np.asarray(answer, dtype=np.int64)])
    if len(ids) > CONTEXT:
        return None
    # The template's tail leads up to the reply, as a separator leads up to any other segment.
    ends = sorted({piece.end for piece in prompt.pieces} | {len(ids)})
    return Served(id, group, ids, len(prompt.ids), tuple(ends))


def _workload(found: Iterator[Served | None] | Sequence[Served | None]) -> Workload:
    everything = list(found)
    requests = tuple(request for request in everything if request is not None)
    return Workload(requests, len(everything) - len(requests))


def _drawn(items: list[Any], n: int | None, rng: np.random.Generator) -> list[Any]:
    return [items[i] for i in rng.permutation(len(items))[:n]]


def _turns(dialogue: Dialogue, tokenizer: Any) -> list[Served | None]:
    """The requests of one dialogue, None for each that is too long."""
    found: list[Served | None] = []
    messages = [_message("system", "system", dialogue.system)]
    for role, text in dialogue.messages:
        if role == "assistant" and len(messages) > 1:
            id = f"{dialogue.id}/{len(found)}"
            found.append(served(tokenizer, id, dialogue.group, messages, text))
        messages.append(_message(role, "turn", text))
    return found


def _message(role: str, kind: Kind, text: str) -> Message:
    return Message(role, (Segment(kind, text),))


# Files ----------------------------------------------------------------------------------------


def _service(cfg: DictConfig) -> Iterator[Dialogue]:
    """tau-bench dialogues behind the policy of their domain; trials of a task are one group."""
    policies = data_file(cfg, "system_prompts/tau_bench_policies.jsonl")
    systems = {record["domain"]: record["text"] for record in read(policies)}
    for record in read(data_file(cfg, "dialogue/tau_bench_dialogues.jsonl.gz")):
        if record["domain"] in systems:
            group = f"task {record['task_id']}" if "task_id" in record else record["id"]
            messages = tuple((m["role"], _text(m)) for m in record["messages"])
            yield Dialogue(record["id"], group, systems[record["domain"]], messages)


def _text(message: Record) -> str:
    """What was said, or the tool call as JSON where nothing was."""
    return message.get("content") or json.dumps(message.get("tool_calls") or [])


def _chat(cfg: DictConfig) -> Iterator[Dialogue]:
    for record in read(data_file(cfg, "dialogue/mt_bench_101.jsonl.gz")):
        pairs = [(("user", t["user"]), ("assistant", t["bot"])) for t in record["turns"]]
        messages = tuple(message for pair in pairs for message in pair)
        yield Dialogue(record["id"], record["id"], CHAT_SYSTEM, messages)


def _questions(
    cfg: DictConfig, n: int, rng: np.random.Generator, tokenizer: Any
) -> Iterator[Served | None]:
    """XQuAD's questions, each behind its English paragraph; an article is one group."""
    records = list(read(data_file(cfg, "rag/xquad_en_zh_es.jsonl.gz")))
    for record in _drawn(records, n, rng):
        for qa in record["qas"]:
            request = Request.rag(
                qa["id"], [record["context"]["en"]], qa["question"]["en"], system=RAG_SYSTEM
            )
            reply = qa["answer"]["en"]
            yield served(tokenizer, request.id, record["article"], request.messages, reply)
