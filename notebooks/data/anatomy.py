"""Make anatomy.json: one plan of the real model that holds every kind of reuse, as plain data.

    python notebooks/data/anatomy.py

The texts are this project's own documentation (docs/memory.md) as it once stood.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvsem.embedders.minilm import MinilmEmbedder
from kvsem.engine import Engine, final_provenance
from kvsem.lm import LM, load
from kvsem.recompute.base import Recompute
from kvsem.recompute.cacheblend import CacheBlendRecompute
from kvsem.recompute.epic import EpicRecompute
from kvsem.recompute.none import NoRecompute
from kvsem.types import Request

OUT = Path(__file__).with_name("anatomy.json")
SYSTEM = "Answer the question from the passages, in one sentence."
PAGES = (
    "A page holds a fixed number of tokens of every layer. It is active while a request holds a "
    "reference, cached when nobody does but something published owns it, and free otherwise. A "
    "request gets matching cached pages first, then free ones, then what eviction gives up; where "
    "that is not enough it is refused and nothing has changed."
)
CHAIN = (
    "A page is found by a chain of hashes over its tokens and every page ahead of it, rooted in "
    "the namespace; its token ids and its parent are compared on every hit, so that a colliding "
    "hash is a miss. The last token of a prompt is always computed."
)
FLIGHT = (
    "The loop serves several requests at once: an iteration admits one that waits, if the pool has "
    "room, and gives every running one a token, in one forward. Where the pool runs out, the "
    "request admitted last goes back to the queue."
)
VERSIONS = (
    "The namespace is a digest of weights, active adapters, configuration, tokenizer and dtype. It "
    "is looked at before every request: changed weights or a switched adapter give another one, "
    "and switching back finds the old keys and values again. Changes that touch none of the "
    "sampled elements of a tensor are not seen."
)
EDITED = VERSIONS.replace("before every request", "once a minute").replace(
    "configuration, tokenizer and dtype", "configuration and dtype"
)
PUBLISHED = (
    "Pages are published when a request has completed, up to the first token that stands behind "
    "anything approximate. A request that was cancelled or has failed publishes nothing."
)
WEATHER = (
    "In winter the harbour freezes over for about six weeks, and the ferry to the island is "
    "replaced by a track across the ice that the town marks with spruce branches."
)
SERVED = Request.rag("served", [PAGES, CHAIN], "What is a page?", system=SYSTEM)
ASKED = Request.rag(
    "asked",
    [PAGES, FLIGHT, EDITED, PUBLISHED, WEATHER],
    "What happens when the pool runs out?",
    system=SYSTEM,
)
RULES: dict[str, Recompute] = {
    "none": NoRecompute(),
    "epic": EpicRecompute(ratio=0.15),
    "cacheblend": CacheBlendRecompute(ratio=0.15),
}


def engine(lm: LM, embedder: MinilmEmbedder, rule: Recompute) -> Engine:
    """A cache that knows two documents from before and has served one request."""
    made = Engine(lm, embedder=embedder, recompute=rule)
    made.ingest([FLIGHT, VERSIONS], system=SYSTEM)
    made.generate(SERVED)
    return made


def after(engine: Engine) -> dict[str, Any]:
    """What became of the plan: provenance, and how many matched tokens each layer computed."""
    done = engine.prefill(ASKED)
    computed = done.computed & done.plan.matched
    engine.drop(done)
    return {
        "provenance": final_provenance(done.plan, done.computed).tolist(),
        "computed_per_layer": computed.sum(axis=1).tolist(),
    }


def main() -> None:
    lm, embedder = load("smollm2", packaged=True, device="cpu"), MinilmEmbedder()
    engines = {name: engine(lm, embedder, rule) for name, rule in RULES.items()}
    ids = engines["none"].render(ASKED).ids
    saved = {
        "model": lm.name,
        "page_size": engines["none"].memory.settings.page_size,
        "tokens": [lm.tokenizer.decode([token]) for token in ids],
        "plan": engines["none"].plan(ASKED).to_dict(),
        "edited_from": VERSIONS,
        "after": {name: after(made) for name, made in engines.items()},
    }
    OUT.write_text(json.dumps(saved, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
