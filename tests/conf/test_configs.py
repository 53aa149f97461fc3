"""Every yaml composes, and an arm is what its name says."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from experiments.compose import arm_config, check, describe_part
from kvsem.engine import Engine
from kvsem.errors import SettingError
from tests.tiny import tiny_lm

CONF = Path(__file__).parents[2] / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
RULES = sorted(path.stem for path in (CONF / "recompute").glob("*.yaml"))
ARMS = sorted(path.stem for path in (CONF / "arm").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _conf() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def test_the_globs_find_something() -> None:
    assert len(GROUPS) >= 10
    assert {"none", "all", "random", "epic", "cacheblend"} <= set(RULES)
    assert len(ARMS) > 1
    assert EXPERIMENTS


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_names_arms_that_exist(name: str) -> None:
    cfg = compose("run", overrides=[f"experiment={name}"])
    check(cfg)
    for arm in cfg.arms:
        assert "_target_" in arm_config(arm, cfg).recompute


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_an_experiment_sets_holds(name: str) -> None:
    cfg = compose("run", overrides=[f"experiment={name}"])
    own = {
        str(key): value
        for key, value in OmegaConf.load(CONF / "experiment" / f"{name}.yaml").items()
        if key != "defaults"
    }
    assert own
    assert OmegaConf.merge(cfg, own) == cfg


@pytest.mark.parametrize("name", [*RULES, *(a for a in ARMS if a != "base")])
def test_every_arm_makes_its_rule(name: str) -> None:
    arm = arm_config(name, compose("run"))
    rule = instantiate(arm.recompute)
    assert hasattr(rule, "needs")
    if name in RULES:
        assert arm.recompute._target_.split(".")[-2] == name


def test_a_ratio_holds_for_every_arm_that_has_one() -> None:
    cfg = compose("run", overrides=["recompute_ratio=0.5"])
    for name in ("random", "epic", "cacheblend"):
        assert arm_config(name, cfg).recompute.ratio == 0.5
    assert "ratio" not in arm_config("none", cfg).recompute


def test_a_context_holds_for_every_arm() -> None:
    cfg = compose("run", overrides=["context=alone"])
    assert arm_config("none", cfg).context._target_.endswith("Alone")
    assert arm_config("none", compose("run")).context._target_.endswith("InCompany")


def test_the_engine_defaults_are_those_of_the_base_arm() -> None:
    arm = arm_config("none", compose("run"))
    engine = Engine(tiny_lm("llama"))
    for part in ("chunker", "aligner", "gate", "recompute", "context"):
        made, default = instantiate(arm[part]), getattr(engine, part)
        assert type(made) is type(default)
        assert vars(made) == vars(default)
    assert engine.n_candidates == arm.n_candidates
    assert engine.admit == arm.admit
    assert engine.reuse == {*arm.reuse, "segment"}  # which chunk includes
    settings = engine.memory.settings
    for name in ("page_size", "pool_tokens", "partial", "salt"):
        assert getattr(settings, name) == arm.memory[name]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["recompute_ratio=1.5"], "recompute_ratio"),
        (["recompute_ratio=-0.1"], "recompute_ratio"),
        (["recompute_ratio=much"], "recompute_ratio"),
        (["threads=0"], "threads"),
        (["seed=-1"], "seed"),
        (["arms=[nonsense]"], "arms"),
        (["arms=epic"], "arms"),
        (["arms=[epic,epic]"], "arms"),
        (["metrics=[bleu]"], "metrics"),
        (["baselines=sometimes"], "baselines"),
        (["+recompute_ration=0.1"], "recompute_ration"),
    ],
)
def test_what_is_out_of_range_names_field_and_value(overrides: list[str], field: str) -> None:
    with pytest.raises(SettingError) as raised:
        check(compose("run", overrides=overrides))
    assert raised.value.field == field
    assert "\n" not in str(raised.value)


def test_an_unknown_setting_is_told_its_neighbour() -> None:
    with pytest.raises(SettingError, match="did you mean 'recompute_ratio'"):
        check(compose("run", overrides=["+recompute_ration=0.1"]))


def test_a_part_is_described_by_its_class_and_values() -> None:
    part: DictConfig = OmegaConf.create({"_target_": "kvsem.x.Y", "ratio": 0.1, "_partial_": True})
    assert describe_part(part) == "Y(ratio=0.1)"
