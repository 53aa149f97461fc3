"""The donor stands behind neutral filler text."""

from collections.abc import Sequence
from itertools import cycle, islice

from kvsem.contexts.base import FILLER, Donor, place_passages
from kvsem.errors import SettingError
from kvsem.types import Request


class BehindFiller:
    """Behind one text that says nothing, in the place of a passage of company.

    ``words``: how many; None = as many characters as the passage has, cut to whole words, so that
    the filler is about as long as the passage in any script.
    """

    name = "behind_filler"

    def __init__(self, words: int | None = None) -> None:
        if words is not None and (type(words) is not int or words < 1):
            raise SettingError("context.words", words, "a whole number from 1 up, or null")
        self.words = words

    def donors(self, requests: Sequence[Request], seed: int) -> list[Donor]:
        return place_passages(
            requests,
            lambda text, system: Donor(text, system, (self._filler(text),), context=self.name),
        )

    def _filler(self, text: str) -> str:
        if self.words is not None:
            return " ".join(islice(cycle(FILLER.split()), self.words))
        n = len(text.strip())
        whole = (f"{FILLER} " * (n // len(FILLER) + 1))[:n]
        return whole.rsplit(None, 1)[0] if len(whole.split()) > 1 else FILLER.split()[0]
