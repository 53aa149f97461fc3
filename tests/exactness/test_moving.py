"""A moved chunk's keys are the keys computed there (MemOS#2315, CacheBlend#6, LMCache#845)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvsem import rope
from kvsem.lm import LM
from kvsem.memory.gather import gather
from kvsem.types import ChunkKV, Run
from tests.tiny import KINDS, relative, tiny_lm, tokens

IDS = tokens(24, seed=4)


def entry(lm: LM, position: int, ids: np.ndarray = IDS, key: str = "k") -> ChunkKV:
    """``ids`` computed with nothing else, the first at ``position``."""
    keys, values = lm.alone(ids, position)
    return ChunkKV(
        key,
        lm.namespace(),
        "",
        ids,
        (0, len(ids)),
        position,
        "alone",
        "",
        0,
        tuple(k.contiguous() for k in keys),
        tuple(v.contiguous() for v in values),
    )


def placed(lm: LM, stored: ChunkKV, *targets: int, capacity: int = 400) -> list[list[torch.Tensor]]:
    """Keys per target and layer after one gather."""
    kv = lm.buffer(capacity)
    n = len(stored.ids)
    gather(lm, kv, [Run(stored.key, 0, target, n) for target in targets], {stored.key: stored})
    for layer in range(lm.n_layers):
        for target in targets:
            assert torch.equal(kv.values[layer][0, :, target : target + n], stored.values[layer])
    return [[k[0, :, target : target + n] for k in kv.keys] for target in targets]


@pytest.mark.parametrize(("base", "target"), [(0, 100), (37, 5), (0, 1), (350, 0), (3, 370)])
def test_moved_keys_are_the_keys_computed_there(lm: LM, base: int, target: int) -> None:
    (moved,) = placed(lm, entry(lm, base), target)
    there = lm.alone(IDS, target)[0]
    for layer in range(lm.n_layers):
        assert relative(moved[layer], there[layer]) <= 1e-5
        assert relative(entry(lm, base).keys[layer], there[layer]) > 0.02  # unmoved is wrong


# Another process ------------------------------------------------------------------------------

SCRIPT = """
import sys
from tests.exactness.test_moving import KINDS, entry, save
from tests.tiny import tiny_lm
for kind in KINDS:
    save(entry(tiny_lm(kind), 37), f"{sys.argv[1]}/{kind}")
"""


def save(stored: ChunkKV, path: str) -> None:
    """All that the entry says of itself, and its tensors as they are."""
    said = {k: v for k, v in vars(stored).items() if k not in ("keys", "values")}
    said["ids"] = stored.ids.tolist()
    tensors = {f"keys.{i}": t for i, t in enumerate(stored.keys)}
    tensors |= {f"values.{i}": t for i, t in enumerate(stored.values)}
    save_file(tensors, path, metadata={"entry": json.dumps(said)})


def read(path: Path) -> ChunkKV:
    with safe_open(path, "pt") as file:
        said: dict[str, Any] = json.loads(file.metadata()["entry"])
        n = len(file.keys()) // 2
        keys, values = (
            tuple(file.get_tensor(f"{name}.{i}") for i in range(n)) for name in ("keys", "values")
        )
    said["ids"], said["inner"] = np.array(said["ids"]), tuple(said["inner"])
    return ChunkKV(keys=keys, values=values, **said)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], cwd=root, check=True)
    return folder


def test_a_chunk_that_another_process_computed_is_placed_by_what_it_says(
    lm: LM, kind: str, saved: Path
) -> None:
    """A6: the entry alone knows at which position, and by which rotation, it was computed."""
    stored = read(saved / kind)
    assert stored.position == 37
    (moved,) = placed(lm, stored, 5)
    there = lm.alone(IDS, 5)[0]
    for layer in range(lm.n_layers):
        assert relative(moved[layer], there[layer]) <= 1e-5
        assert relative(stored.keys[layer], there[layer]) > 0.02
    others = {other: read(saved / other).namespace for other in KINDS}
    assert [other for other in KINDS if others[other] == lm.namespace()] == [kind]


def test_two_copies_differ_and_are_both_right(lm: LM) -> None:
    first, second = placed(lm, entry(lm, 0), 40, 200)
    for layer in range(lm.n_layers):
        assert not torch.equal(first[layer], second[layer])
        assert relative(first[layer], lm.alone(IDS, 40)[0][layer]) <= 1e-5
        assert relative(second[layer], lm.alone(IDS, 200)[0][layer]) <= 1e-5


def test_what_stays_in_place_is_copied_bit_for_bit(lm: LM) -> None:
    stored = entry(lm, 17)
    (moved,) = placed(lm, stored, 17)
    assert all(torch.equal(a, b) for a, b in zip(moved, stored.keys, strict=True))


def test_parts_of_a_chunk_move_each_to_its_place(lm: LM) -> None:
    """Two runs of one entry with a gap: every kept token's key is right (llama.cpp PR 12161)."""
    stored = entry(lm, 0)
    kv = lm.buffer(100)
    runs = [Run("k", 0, 60, 6), Run("k", 9, 66, 4), Run("k", 20, 70, 4)]
    gather(lm, kv, runs, {"k": stored})
    for run in runs:
        there = lm.alone(IDS, run.target - run.source)[0]
        for layer in range(lm.n_layers):
            got = kv.keys[layer][0, :, run.target : run.target + run.length]
            want = there[layer][:, run.source : run.source + run.length]
            assert relative(got, want) <= 1e-5


def test_each_layer_turns_with_its_own_theta() -> None:
    gemma = tiny_lm("gemma3")
    angles = gemma.angles([100])
    sliding, full = angles["sliding_attention"][0], angles["full_attention"][0]
    assert not torch.allclose(sliding, full, atol=1e-2)
    stored = entry(gemma, 0)
    there = gemma.alone(IDS, 100)[0]
    sin = {t: s for t, (_, s) in angles.items()}
    wrong = rope.shift(stored.keys[0], full[0], sin["full_attention"][0])
    assert relative(wrong, there[0]) > 1e-2


def test_llama3_scaling_is_not_the_default_rotation() -> None:
    scaled, default = tiny_lm("llama3"), tiny_lm("llama")
    cos, sin = default.angles([300])[None]
    stored = entry(scaled, 0)
    wrong = rope.shift(stored.keys[1], cos[0], sin[0])
    assert relative(wrong, scaled.alone(IDS, 300)[0][1]) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_moves_from_the_original_err_like_one(dtype: torch.dtype) -> None:
    """Fifty small moves of the moved would add up; each here starts from what was stored."""
    model = tiny_lm("llama", dtype)
    stored = entry(model, 0)
    before = [k.clone() for k in stored.keys]
    kv = model.buffer(200)
    for target in range(100, 150):
        gather(model, kv, [Run("k", 0, target, len(IDS))], {"k": stored})
    (once,) = placed(model, stored, 149)
    limit = 1e-5 if dtype == torch.float32 else 4e-3
    cos, sin = model.angles([149])[None]
    for layer in range(model.n_layers):
        got = kv.keys[layer][0, :, 149 : 149 + len(IDS)]
        assert torch.equal(got, once[layer])
        assert torch.equal(stored.keys[layer], before[layer])
        wide = rope.shift(stored.keys[layer].float(), cos[0], sin[0])
        assert relative(got, wide) <= limit  # one rounding to the dtype, not fifty


def test_shift_is_a_rotation_group() -> None:
    model = tiny_lm("qwen3")
    keys = entry(model, 0).keys[0]
    cos, sin = model.angles([-60, 25, -35])[model.layer_types[0]]
    both = rope.shift(rope.shift(keys, cos[0], sin[0]), cos[1], sin[1])
    assert relative(both, rope.shift(keys, cos[2], sin[2])) <= 1e-5
    assert torch.allclose(both.norm(dim=-1), keys.norm(dim=-1), rtol=1e-5)
