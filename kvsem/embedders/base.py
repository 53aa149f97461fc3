"""An embedder turns texts into unit vectors; and what those that read the model do alike."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvsem.errors import check_count
from kvsem.model import Model

REFERENCE = 1  # raise it when a text below changes
FLOOR = 0.01  # of the mean spread
# Of many kinds, none about anything: mean and spread of their vectors are what all texts share.
COMMON = (
    "The morning was mild and the road was dry. A cart stood beside the barn, and someone had "
    "left a bucket near the gate.",
    "Preheat the oven, line a tray with paper and mix flour, butter and sugar until crumbs form. "
    "Bake for twenty minutes.",
    "The committee met on Tuesday to discuss the budget. Members agreed to postpone the vote "
    "until the report is complete.",
    'def area(width, height):\n    """Return the area of a rectangle."""\n'
    "    return width * height\n",
    "She won the final in straight sets and thanked her coach, her family and the crowd that had "
    "travelled so far.",
    "Water boils at a lower temperature on a mountain, because the pressure of the air decreases "
    "with height.",
    "You are a helpful assistant. Answer briefly, never invent facts, and say so when you do not "
    "know.",
    "- Check the battery\n- Tighten both screws\n- Wait ten seconds before you switch the device "
    "on again",
    "To reset your password, open the settings, choose account and follow the link that we send "
    "you by mail.",
    "The film is slow and far too long, but the two leads are wonderful and the ending made me "
    "cry.",
    "In 1720 the town had about three thousand inhabitants, two churches, a market and a small "
    "harbour on the river.",
    "And he said unto them, Go ye into the field, and gather the corn before the evening; and "
    "they did so.",
    "Revenue rose by 12% to 4.3 million in the third quarter, while costs fell slightly compared "
    "with last year.",
    "User: Is the train late?\nAgent: It leaves at 10:45 from platform 4.\nUser: Thank you, that "
    "helps a lot.",
    "Cells take up glucose from the blood, and enzymes break it down step by step to release "
    "energy.",
    "The tenant shall pay the rent on the first day of each month and keep the premises in good "
    "repair.",
    '{"name": "lamp", "price": 19.5, "in_stock": true, "tags": ["home", "light"]}',
    "La biblioteca abre a las nueve y cierra a las seis. Los domingos no abre.",
    "图书馆早上九点开门，晚上六点关门。星期天不开门。",
    "Why did the ship turn back? The storm had damaged its mast, and the captain feared for the "
    "crew.",
)

PerToken = Callable[[np.ndarray], torch.Tensor]  # ids [batch, tokens] -> [batch, tokens, dim]


class Embedder(Protocol):
    """One that reads the language model also has ``use`` (`kvsem.model.UsesModel`), and neither
    ``dim`` nor ``identity`` before it is called."""

    @property
    def dim(self) -> int: ...

    @property
    def identity(self) -> str:
        """Model, revision and settings: vectors of two identities never share an index."""
        ...

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32 ``[n, dim]``, each row of length 1 (all zero where a text has no content)."""
        ...


def check_windows(window: int, batch_size: int) -> None:
    """Raise `SettingError` for what is no number of tokens, or of windows."""
    check_count("window", window, 2)
    check_count("batch_size", batch_size, 1)


def batches(windows: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Rows of at most ``size`` windows of one length, so that none is ever padded."""
    by_length = defaultdict(list)
    for row, window in enumerate(windows):
        by_length[len(window)].append(row)
    for rows in by_length.values():
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


@dataclass
class TokenMeans:
    """What the model makes of the tokens of a text, ``dim`` numbers each, averaged over all of
    them.

    A text is tokenised alone, without white space at its ends, and cut into windows of at most
    ``window`` tokens (or the model's context), the tokenizer's BOS ahead of each where it has one:
    its own vector is left out, as the first token of a prompt is like no other.
    """

    model: Model
    per_token: PerToken
    dim: int
    window: int
    batch_size: int
    _common: tuple[str, np.ndarray, np.ndarray] | None = None  # and the namespace it is of

    def of(self, texts: Sequence[str]) -> np.ndarray:
        """float64 ``[n, dim]``, 0 for a text without tokens."""
        bos = self.model.tokenizer.bos_token_id
        lead = [] if bos is None else [bos]
        limit = min(self.window, self.model.max_tokens) - len(lead)
        windows, owners = _windows(self.model.tokenizer, texts, limit)
        sums, counts = np.zeros((len(texts), self.dim)), np.zeros((len(texts), 1))
        for rows in batches(windows, self.batch_size):
            ids = np.array([lead + windows[row] for row in rows], dtype=np.int64)
            found = self.per_token(ids)[:, len(lead) :].double().sum(dim=1).cpu().numpy()
            for row, total in zip(rows, found, strict=True):
                sums[owners[row]] += total
                counts[owners[row]] += len(windows[row])
        return np.asarray(sums / np.maximum(counts, 1))

    def standardised(self, texts: Sequence[str]) -> np.ndarray:
        """`of`, less the mean of the texts in `COMMON` and divided by their spread."""
        rows = self.of(texts)
        _, mean, spread = self._of_common()
        return np.where(rows.any(axis=1, keepdims=True), (rows - mean) / spread, 0)

    def _of_common(self) -> tuple[str, np.ndarray, np.ndarray]:
        """Of the model as it is now."""
        namespace = self.model.namespace()
        if self._common is None or self._common[0] != namespace:
            rows = self.of(COMMON)
            spread = rows.std(axis=0)  # a number that hardly varies is not blown up
            self._common = namespace, rows.mean(axis=0), spread + FLOOR * max(spread.mean(), 1e-30)
        return self._common


def _windows(tokenizer: Any, texts: Sequence[str], limit: int) -> tuple[list[list[int]], list[int]]:
    """Ids of every window, and the text that each belongs to."""
    windows, owners = [], []
    for owner, text in enumerate(texts):
        ids = tokenizer(text.strip(), add_special_tokens=False)["input_ids"]
        for start in range(0, len(ids), limit):
            windows.append(ids[start : start + limit])
            owners.append(owner)
    return windows, owners


def units_of(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """float32 ``[n, dim]``: ``blocks`` ``[n, …]`` side by side, each of the same weight, rows of
    length 1; 0 where a row has no direction."""
    whole = np.concatenate([_unit(block) for block in blocks], axis=1)
    return _unit(whole).astype(np.float32)


def _unit(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1))
