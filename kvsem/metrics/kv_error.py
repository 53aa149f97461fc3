"""How far the arm's KV is from exact's."""

from __future__ import annotations

from kvsem.metrics.base import Observation


class KvErrorMetric:
    """``quality/kv_error_rel``: the mean of `per_layer`; left out where a side kept no KV."""

    needs_text = False

    def __init__(self) -> None:
        self.higher_is_better = {"quality/kv_error_rel": False}

    def compare(self, exact: Observation, arm: Observation) -> dict[str, float]:
        errors = per_layer(exact, arm)
        return {"quality/kv_error_rel": sum(errors) / len(errors)} if errors else {}


def per_layer(exact: Observation, arm: Observation) -> list[float]:
    """``||arm - exact|| / ||exact||`` a layer: Frobenius norms of keys and values together.

    Summed in float64 over the sampled positions; [] where a side kept no KV.
    """
    if exact.keys is None or exact.values is None or arm.keys is None or arm.values is None:
        return []
    layers = zip(exact.keys, exact.values, arm.keys, arm.values, strict=True)
    errors = []
    for key, value, arm_key, arm_value in layers:
        wanted = [key.double(), value.double()]
        found = [arm_key.double(), arm_value.double()]
        error = sum(float((f - w).square().sum()) for f, w in zip(found, wanted, strict=True))
        norm = sum(float(w.square().sum()) for w in wanted)
        errors.append((error / norm) ** 0.5 if norm else float("nan"))
    return errors
