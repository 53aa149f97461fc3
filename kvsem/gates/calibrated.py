"""What reuse is going to cost, predicted by a small model that was fitted on what it did cost."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from kvsem.errors import SettingError, check_count
from kvsem.gates.base import Candidate, Decision
from kvsem.lcs import runs
from kvsem.model import Model, needed, taken
from kvsem.wording import cut, differences

FEATURES = ("similarity", "overlap", "length_ratio", "probe")
NAME = "the gate calibrated"
_FLOOR = 1e-6  # of a share of energy


class CalibratedGate:
    """Refuses where the predicted divergence is above ``max_divergence`` nats (KL of the first
    answer token when the candidate's aligned tokens stand in, per share of the text that they
    are).

    log10 of it is ``bias`` plus the sum of ``weights`` times these, or those of them that have a
    weight: ``similarity``, the index's cosine; ``overlap``, the share of the text's words that the
    candidate has in order; ``length_ratio``, of words, shorter by longer; ``probe``, log10 of how
    far the values of aligned tokens are apart behind the first ``probe_layers`` layers, each text
    alone, as a share of their energy (CacheBlend's deviation, before anything is reused). ``probe``
    runs those layers over both texts.

    Weights are of one language model and one embedder: ``experiments/gates/fit.py`` fits them.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        bias: float,
        max_divergence: float = 0.02,
        probe_layers: int = 4,
    ) -> None:
        if not weights or not set(weights) <= set(FEATURES):
            raise SettingError("weights", dict(weights), f"numbers for some of {FEATURES}")
        if not all(math.isfinite(w) for w in (*weights.values(), bias)):
            raise SettingError("weights", dict(weights), "finite numbers")
        if not max_divergence > 0:
            raise SettingError("max_divergence", max_divergence, "nats, above 0")
        check_count("probe_layers", probe_layers, 1)
        self.weights, self.bias = dict(weights), bias
        self.max_divergence, self.probe_layers = max_divergence, probe_layers
        self._model: Model | None = None

    def use(self, model: Model) -> None:
        """Take ``model`` for ``probe``; raises where it has fewer layers."""
        if "probe" in self.weights and self.probe_layers > model.n_layers:
            raise SettingError("probe_layers", self.probe_layers, f"1 to {model.n_layers}")
        self._model = taken(self._model, model, NAME)

    def accept(self, text: str, candidate: Candidate) -> Decision:
        """Refuses with ``divergence_predicted``, ``score_not_finite`` or ``nothing_in_common``."""
        if not math.isfinite(candidate.score):
            return Decision(False, "score_not_finite")
        features = self.features(text, candidate)
        if features["overlap"] == 0:
            return Decision(False, "nothing_in_common")
        if self.predicted(features) > self.max_divergence:
            return Decision(False, "divergence_predicted")
        return Decision(True)

    def predicted(self, features: Mapping[str, float]) -> float:
        """Nats per share reused."""
        log = self.bias + sum(weight * features[name] for name, weight in self.weights.items())
        return float(10.0 ** min(log, 9.0))

    def features(self, text: str, candidate: Candidate) -> dict[str, float]:
        """Those that have a weight, and ``overlap``."""
        here, there = cut(text), cut(candidate.text)
        kept = len(here) - sum(d.end - d.start for d in differences(here, there))
        lengths = sorted((len(here), len(there)))
        found = {
            "similarity": candidate.score,
            "overlap": kept / len(here) if here else float(text == candidate.text),
            "length_ratio": lengths[0] / lengths[1] if lengths[1] else 1.0,
        }
        if "probe" in self.weights:
            found["probe"] = self._probe(text, candidate.text)
        return found

    def _probe(self, text: str, other: str) -> float:
        here, there = self._ids(text), self._ids(other)
        same = runs(here.tolist(), there.tolist())
        used = np.array([i + k for i, _, n in same for k in range(n)], dtype=np.int64)
        source = np.array([j + k for _, j, n in same for k in range(n)], dtype=np.int64)
        if not len(used):
            return 0.0
        own = self._values(here)[:, used]
        energy = own.square().sum().clamp_min(torch.finfo(own.dtype).tiny)
        apart = (own - self._values(there)[:, source]).square().sum() / energy
        return math.log10(max(float(apart), _FLOOR))

    def _ids(self, text: str) -> np.ndarray:
        tokenizer = needed(self._model, NAME).tokenizer
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    def _values(self, ids: np.ndarray) -> torch.Tensor:
        """``[kv_heads, tokens, head_dim]`` at the probe layer, fp32."""
        found = needed(self._model, NAME).first_layers(ids[None], self.probe_layers)
        return found.values[-1][0].float()
