"""Each token from the donor token whose embedding, turned by its position, is nearest."""

from __future__ import annotations

import numpy as np
import torch

from kvsem import rope
from kvsem.errors import SettingError, check_range, is_number
from kvsem.model import Model, needed, taken

BLOCK = 256  # target tokens compared at a time
NOISE = 1e-5  # of a cosine in fp32


class NearestAligner:
    """SemShareKV's matching (IJCNLP-AACL 2025): rows of the model's embedding table with RoPE
    added, and for each target token the donor token with the highest cosine, never below
    ``min_score``.

    Positions count from the chunk's first token, and one rotation of base ``theta`` turns the
    whole row (RoFormer, arXiv 2104.09864). Ours searches exactly where the paper uses LSH. Sources
    are neither ascending nor distinct, and a token may take the KV of another word. Of equally
    near donor tokens (within 1e-5) the one at the target's own place is preferred, then the first.
    """

    def __init__(self, min_score: float = 0.7, theta: float = 10_000.0) -> None:
        check_range("min_score", min_score, -1.0, 1.0)
        if not is_number(theta) or theta <= 0:
            raise SettingError("theta", theta, "a finite number above 0")
        self.min_score, self.theta = min_score, theta
        self._model: Model | None = None

    def use(self, model: Model) -> None:
        """Take the embedding table of ``model``."""
        self._model = taken(self._model, model, "the aligner nearest")

    def align(self, target_ids: np.ndarray, donor_ids: np.ndarray) -> np.ndarray:
        """int64 ``[target tokens]``: donor indices in any order, -1 where none is near enough."""
        source = np.full(len(target_ids), -1, dtype=np.int64)
        if not len(target_ids) or not len(donor_ids):
            return source
        target, donor = self._rows(target_ids), self._rows(donor_ids)
        for start in range(0, len(target), BLOCK):
            cosine = target[start : start + BLOCK] @ donor.T
            best = cosine.max(dim=1).values
            near = (cosine >= best[:, None] - NOISE).int()
            place = near.argmax(dim=1)  # the first of the nearest
            own = torch.arange(start, start + len(place))
            kept = own.clamp(max=len(donor) - 1)
            at_home = (own < len(donor)) & near.gather(1, kept[:, None])[:, 0].bool()
            place = torch.where(at_home, kept, place)
            place[best < self.min_score - NOISE] = -1
            source[start : start + BLOCK] = place.numpy()
        return source

    def _rows(self, ids: np.ndarray) -> torch.Tensor:
        """fp32 ``[tokens, hidden size]`` of length 1 (0 where the table has only zeros)."""
        rows = needed(self._model, "the aligner nearest").embeddings(ids)
        half = rows.shape[1] // 2
        speed = self.theta ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))
        angle = torch.arange(len(ids), dtype=torch.float64)[:, None] * speed
        turned = rope.shift(rows, angle.cos().float(), angle.sin().float())
        return torch.nn.functional.normalize(turned, dim=1)
