"""Computing the KV of passages ahead of time, in the company that a donor context gives them."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import torch

from kvsem.admit import Admission
from kvsem.contexts.base import Donor
from kvsem.forward import KVBuffer
from kvsem.lm import LM
from kvsem.memory.pages import PagedKV
from kvsem.planner import Planner
from kvsem.prompt import Prompt, render
from kvsem.types import Chunk, Message, Request, Segment


def build(donor: Donor, lm: LM, planner: Planner, admission: Admission) -> None:
    """One exact forward over the donor prompt, up to the end of its passage.

    Leaves its chunks, and the head of its prompt as prefix pages; nothing that is there already
    is computed again.
    """
    prompt = render(lm.tokenizer, _request(donor))
    last = [p for p in prompt.pieces if p.kind == "passage" and p.text == donor.text.strip()]
    chunks = planner.chunks(prompt, last[-1]) if last else []  # none: the text makes no token
    known = admission.memory.chunks
    if not chunks or (admission.keeps_chunks and all(chunk.key in known for chunk in chunks)):
        return
    ids = prompt.ids[: last[-1].end]
    if len(ids) > min(lm.max_tokens, lm.steady_tokens) and donor.company:
        warnings.warn("a passage and its company are longer than the context", stacklevel=2)
        build(replace(donor, company=(), context="behind_system"), lm, planner, admission)
        return
    lm.check_prompt(len(ids), what=f"the donor prompt of {donor.text[:40]!r}")
    if len(ids) > lm.steady_tokens:
        warnings.warn(
            f"a passage stands past {lm.steady_tokens} tokens, where rope changes", stacklevel=2
        )
        return
    head = planner.chunks(prompt, prompt.pieces[0]) if prompt.pieces[0].kind == "system" else []
    n_head = head[0].end if head else 0
    namespace = planner.namespace
    if admission.keeps_chunks and donor.bare:
        _build_bare(donor, prompt, chunks, lm, namespace, admission)
    if donor.bare or not admission.keeps_chunks:
        ids, chunks = ids[:n_head], []
    if chunks or admission.match(namespace, ids[:n_head]).n_tokens < n_head:
        kv = _exact(ids, namespace, lm, admission)
        admission.publish(kv, ids[:n_head], namespace)
        admission.keep([*head, *chunks], kv, ids, namespace, donor.context)


def _build_bare(
    donor: Donor, prompt: Prompt, chunks: list[Chunk], lm: LM, namespace: str, admission: Admission
) -> None:
    """The passage behind BOS only."""
    bos = lm.tokenizer.bos_token_id
    ahead = np.array([] if bos is None else [bos], dtype=np.int64)
    ids = np.concatenate([ahead, prompt.ids[chunks[0].start : chunks[-1].end]])
    kv = _exact(ids, "", lm, admission)
    moved = len(ahead) - chunks[0].start
    placed = [replace(c, start=c.start + moved, end=c.end + moved) for c in chunks]
    admission.keep(placed, kv, ids, namespace, donor.context)


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
    passages = [Segment("passage", text) for text in (*donor.company, donor.text)]
    user = Message("user", (*passages, Segment("question", "Question: ?")))
    head = (Message("system", (Segment("system", donor.system),)),) if donor.system else ()
    return Request("donor", (*head, user))
