"""Computing the KV of passages ahead of time, in the company that a donor context gives them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvsem import rope
from kvsem.admit import Admission
from kvsem.contexts.base import FILLER, Donor
from kvsem.forward import KVBuffer
from kvsem.lm import LM
from kvsem.memory.pages import PagedKV
from kvsem.planner import Planner
from kvsem.prompt import render
from kvsem.types import Chunk, Message, Request, Segment


def build(donor: Donor, lm: LM, planner: Planner, admission: Admission) -> None:
    """One exact forward over the donor prompt, up to the end of its passage.

    Leaves its chunks, and the head of its prompt as prefix pages; nothing that is there already
    is computed again. Where the first company does not fit, the passage stands behind the system
    prompt instead, with a warning, and its further companies (``also``) are left out too.
    """
    prompt = render(lm.tokenizer, _request(donor))
    last = [p for p in prompt.pieces if p.kind == "passage" and p.text == donor.text.strip()]
    chunks = planner.chunks(prompt, last[-1]) if last else []  # none: the text makes no token
    known = admission.memory.chunks
    if not chunks or (admission.keeps_chunks and all(chunk.key in known for chunk in chunks)):
        return
    head = planner.chunks(prompt, prompt.pieces[0]) if prompt.pieces[0].kind == "system" else []
    n_head = head[0].end if head else 0
    ids, chunks = _laid_out(donor, prompt.ids, n_head, chunks, lm.tokenizer)
    if len(ids) > min(lm.max_tokens, lm.steady_tokens) and donor.company:
        warnings.warn("a passage and its company are longer than the context", stacklevel=2)
        lonely = replace(donor, company=(), context="behind_system", also=())
        build(lonely, lm, planner, admission)
        return
    lm.check_prompt(len(ids), what=f"the donor prompt of {donor.text[:40]!r}")
    if len(ids) > lm.steady_tokens:
        warnings.warn(
            f"a passage stands past {lm.steady_tokens} tokens, where rope changes", stacklevel=2
        )
        return
    namespace = planner.namespace
    if donor.bare and admission.keeps_chunks:
        kv = _exact(ids, "", lm, admission)
        admission.keep(chunks, kv, ids, namespace, donor.context, int(donor.filler))
    if donor.bare or not admission.keeps_chunks:
        ids, chunks = prompt.ids[:n_head], []
    if chunks or admission.match(namespace, ids[:n_head]).n_tokens < n_head:
        kv = _exact(ids, namespace, lm, admission)
        admission.publish(kv, ids[:n_head], namespace)
        admission.keep(head, kv, ids, namespace, donor.context)
        n_more = _average(kv, chunks, donor, lm, planner, admission)
        approximate = int(donor.filler or n_more > 0)
        admission.keep(chunks, kv, ids, namespace, donor.context, approximate)


def _average(
    kv: KVBuffer,
    chunks: Sequence[Chunk],
    donor: Donor,
    lm: LM,
    planner: Planner,
    admission: Admission,
) -> int:
    """The KV of ``chunks`` becomes the mean over the companies of ``donor``, in fp32, keys as they
    would be at their places in ``kv``; returns over how many besides the first. A company that
    does not fit, or makes other tokens of the passage, is left out."""
    if not (chunks and donor.also) or not lm.support.get("moved_chunk", (False, ""))[0]:
        return 0
    span = slice(chunks[0].start, chunks[-1].end)
    read = [kv.read(layer, span.stop) for layer in range(lm.n_layers)]
    sums = [(k[:, :, span].float(), v[:, :, span].float()) for k, v in read]
    n = 0
    for company in donor.also:
        prompt = render(lm.tokenizer, _request(replace(donor, company=company)))
        passage = [p for p in prompt.pieces if p.kind == "passage"][-1]
        there = planner.chunks(prompt, passage)
        ids = prompt.ids[: there[-1].end]
        fits = len(ids) <= min(lm.max_tokens, lm.steady_tokens)
        if not fits or [c.key for c in there] != [c.key for c in chunks]:
            continue
        other, n = _exact(ids, planner.namespace, lm, admission), n + 1
        turns = lm.angles([span.start - there[0].start])
        for layer, (keys, values) in enumerate(sums):
            k, v = (x[:, :, there[0].start :].float() for x in other.read(layer, len(ids)))
            keys += rope.shift(k, *turns[lm.layer_types[layer]], lm.pairs[layer])
            values += v
    for layer, (keys, values) in enumerate(sums if n else ()):
        kv.write(layer, span, keys / (n + 1), values / (n + 1))
    return n


def _laid_out(
    donor: Donor, ids: np.ndarray, n_head: int, chunks: Sequence[Chunk], tokenizer: Any
) -> tuple[np.ndarray, list[Chunk]]:
    """The tokens to compute, and the passage's chunks at their places in them.

    With filler in the passage's place the chunks keep the ids that they will be looked up by.
    """
    first, last = chunks[0].start, chunks[-1].end
    passage = ids[first:last]
    if not (donor.bare or donor.n_dummies or donor.filler):
        return ids[:last], list(chunks)
    if donor.filler:
        passage = np.resize(_ids(tokenizer, FILLER), len(passage))
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    dummy = (_ids(tokenizer, "\n") or _ids(tokenizer, "."))[-1:]
    ahead = [*(bos if donor.bare else ids[:n_head]), *dummy * donor.n_dummies]
    moved = len(ahead) - first
    placed = [replace(c, start=c.start + moved, end=c.end + moved) for c in chunks]
    return np.array([*ahead, *passage], dtype=np.int64), placed


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _exact(ids: np.ndarray, namespace: str, lm: LM, admission: Admission) -> KVBuffer:
    """Exact KV of ``ids``, behind what prefix pages of ``namespace`` hold of them."""
    kv = lm.buffer(len(ids))
    rest = torch.ones(len(ids), dtype=torch.bool)
    with admission.memory.pool.lock:  # nothing is evicted while it is read
        matched = admission.match(namespace, ids[:-1])
        n = matched.n_tokens
        pages = PagedKV(admission.memory.pages, matched.held, n)
        for layer in range(lm.n_layers if n else 0):
            kv.write(layer, slice(0, n), *pages.read(layer, n))
    rest[:n] = False
    lm.prefill(ids, kv, lambda _: rest)
    return kv


def _request(donor: Donor) -> Request:
    """System, company, passage; a question follows so that the passage's end tokenises alike."""
    stand_in = (FILLER,) if donor.n_dummies or donor.filler else ()  # the passage is not the first
    passages = [Segment("passage", t) for t in (*stand_in, *donor.company, donor.text)]
    user = Message("user", (*passages, Segment("question", "Question: ?")))
    head = (Message("system", (Segment("system", donor.system),)),) if donor.system else ()
    return Request("donor", (*head, user))
