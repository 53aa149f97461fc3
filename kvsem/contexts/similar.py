"""The donor stands behind the passages that are most like it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvsem.contexts.base import (
    PASSAGES,
    Donor,
    companions,
    place_passages,
    predecessors,
    warn_lonely,
)
from kvsem.errors import SettingError, check_count
from kvsem.keys import digest
from kvsem.model import Model, hand
from kvsem.types import Request


class Embeds(Protocol):
    """What it takes of an embedder."""

    def embed(self, texts: Sequence[str]) -> np.ndarray: ...


class Similar:
    """Behind the ``n`` most similar other passages of the corpus, the nearest one last.

    The offline half of FusionRAG (arXiv 2601.12904): the context of each chunk's neighbours is
    baked into it before it is stored. FusionRAG puts the neighbours' stored KV together and
    computes the chunk over that; ours is one exact forward over their texts. Neighbours come from
    anywhere, the passage's own requests included; ``own: false`` leaves those out, so that what is
    left is likeness without company. The last one is never the predecessor that the passage has
    in any request. Ties go by digest: neither seed nor the requests' order matters.
    """

    name = "similar"

    def __init__(self, embedder: Embeds, n: int = 2, own: bool = True) -> None:
        check_count("context.n", n, 1)
        if type(own) is not bool:
            raise SettingError("context.own", own, "true or false")
        self.embedder, self.n, self.own = embedder, n, own

    def use(self, model: Model) -> None:
        """For an embedder that reads the model."""
        hand(self.embedder, model)

    def donors(self, requests: Sequence[Request], seed: int) -> list[Donor]:
        near = self._neighbours(requests)

        def place(text: str, system: str | None) -> Donor:
            company = near[text.strip()]
            return Donor(text, system, company, context=self.name if company else "behind_system")

        donors = place_passages(requests, place)
        warn_lonely(donors, requests, self.name)
        return donors

    def _neighbours(self, requests: Sequence[Request]) -> dict[str, tuple[str, ...]]:
        """Stripped passage → its company in prompt order; empty where nothing may stand there."""
        corpus = {t for r in requests if not r.donors for t in r.segments(*PASSAGES)}
        distinct = {text.strip(): text for text in sorted(corpus)}.values()
        texts = sorted(distinct, key=lambda text: digest("company", text=text))
        vectors = self.embedder.embed(texts)
        met, ahead = companions(requests), predecessors(requests)
        found = {}
        for text, vector in zip(texts, vectors, strict=True):
            order = np.argsort(-(vectors @ vector).round(5), kind="stable")  # noise breaks no tie
            stripped = text.strip()
            banned = {stripped} if self.own else met[stripped]
            ranked = [texts[i] for i in order if texts[i].strip() not in banned]
            found[stripped] = self._company(ranked, ahead[stripped])
        return found

    def _company(self, ranked: Sequence[str], ahead: set[str]) -> tuple[str, ...]:
        last = next((text for text in ranked if text.strip() not in ahead), None)
        if last is None:
            return ()
        others = [text for text in ranked if text != last][: self.n - 1]
        return (*others[::-1], last)
