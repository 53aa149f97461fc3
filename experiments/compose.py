"""From Hydra's configuration to objects, and from its errors to one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from kvsem.errors import KvsemError, SettingError, check_range
from kvsem.memory.memory import MemorySettings
from kvsem.types import CACHEABLE

CONF = Path(__file__).resolve().parent.parent / "conf"
CHOSEN = ("context", "chunker", "embedder", "index", "gate", "aligner")  # set: for every arm
MAX_THREADS = 1024
ALWAYS = ("exact", "exact_again")
MISTAKES = (KvsemError, HydraException, OmegaConfBaseException)  # a user can put them right
MEMORY = "one of page_size, pool_tokens, eviction, partial, salt"


def check(cfg: DictConfig) -> None:
    """Raise `SettingError` for a key that is unknown or a value that is out of range."""
    known = _run_keys()
    for key in cfg:
        if str(key) not in known:
            raise unknown(str(key), known)
    if cfg.recompute_ratio is not None:
        check_range("recompute_ratio", _number("recompute_ratio", cfg), 0.0, 1.0)
    if type(cfg.threads) is not int or not 1 <= cfg.threads <= MAX_THREADS:
        raise SettingError("threads", cfg.threads, f"a whole number from 1 to {MAX_THREADS}")
    if type(cfg.seed) is not int or cfg.seed < 0:
        raise SettingError("seed", cfg.seed, "a whole number from 0 up")
    if cfg.baselines not in ("reuse", "measure"):
        raise SettingError("baselines", cfg.baselines, "reuse or measure")
    _check_names("arms", cfg.arms, (*ALWAYS, *_names("arm"), *_names("recompute")))
    _check_names("metrics", cfg.metrics, _names("metric"))
    if "divergence" not in cfg.metrics:
        raise SettingError("metrics", list(cfg.metrics), "divergence among them")


def _run_keys() -> set[str]:
    """The settings of a run, read without Hydra, which may be the one that failed."""
    return {str(key) for key in OmegaConf.load(CONF / "run.yaml")} - {"defaults", "hydra"} | {
        "model", "workload", "tracking", "experiment", *CHOSEN,
    }  # fmt: skip


def _known_beside(name: str) -> set[str]:
    """Settings that could have been meant by ``name``: of its group where it names one."""
    group = name.rpartition(".")[0]
    files = (CONF / group).glob("*.yaml") if group else []
    beside = {f"{group}.{key!s}" for f in files for key in OmegaConf.load(f) if key != "_target_"}
    section = OmegaConf.to_container(OmegaConf.load(CONF / "run.yaml"))
    inside = section.get(group) if isinstance(section, dict) else None
    beside |= {f"{group}.{key!s}" for key in inside} if isinstance(inside, dict) else set()
    return beside or _run_keys()


def _number(name: str, cfg: DictConfig) -> float:
    value = cfg[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(name, value, "a number from 0 to 1, or null")
    return float(value)


def _names(group: str) -> tuple[str, ...]:
    """What a group offers, in ``conf/`` and in a folder given with ``--config-dir``."""
    if GlobalHydra.instance().is_initialized():
        names = GlobalHydra.instance().config_loader().get_group_options(group)
    else:
        names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    return tuple(name for name in names if (group, name) != ("arm", "base"))


def _check_names(field: str, values: Any, known: Sequence[str]) -> None:
    if not OmegaConf.is_list(values):
        raise SettingError(field, values, f"a list, such as {field}=[{known[-1]}]")
    for value in values:
        if value not in known:
            raise SettingError(field, value, f"names out of {', '.join(dict.fromkeys(known))}")
    if len(set(values)) < len(values):
        raise SettingError(field, list(values), "each name once")


def unknown(name: str, known: set[str]) -> SettingError:
    """The error for a setting that does not exist, with the nearest that does."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return SettingError(name, "…", f"a known setting ({', '.join(sorted(known))}){hint}")


def arm_config(name: str, cfg: DictConfig) -> DictConfig:
    """The arm ``conf/arm/NAME.yaml``, or the base arm with the rule ``conf/recompute/NAME.yaml``.

    Settings of the run that hold for every arm are laid over it, but for what it calls ``fixed``.
    """
    own = name in _names("arm")
    rule = [] if own else [f"recompute@arm.recompute={name}"]
    arm: DictConfig = compose(f"arm/{name}" if own else "arm/base", overrides=rule).arm
    _check_arm(name, arm)
    OmegaConf.set_struct(arm, False)
    for part in CHOSEN:
        arm.setdefault(part, None)  # `override /embedder@embedder: null` leaves no key
        if cfg.get(part) is not None and part not in arm.fixed:
            arm[part] = cfg[part]
    for key, value in cfg.memory.items():
        if value is not None and f"memory.{key!s}" not in arm.fixed:
            arm.memory[key] = value
    if cfg.recompute_ratio is not None and "ratio" in arm.recompute:
        arm.recompute.ratio = cfg.recompute_ratio
        if "k" in arm.recompute:
            arm.recompute.k = None
    return arm


def _check_arm(name: str, arm: DictConfig) -> None:
    base = compose("arm/base").arm
    known = {str(key) for key in base}
    for key in arm:
        if str(key) not in known:
            raise SettingError(f"arm/{name}.yaml: {key!s}", arm[key], f"one of {sorted(known)}")
    for key in arm.memory:
        if key not in base.memory:
            raise SettingError(f"arm/{name}.yaml: memory.{key!s}", arm.memory[key], MEMORY)
    if type(arm.substitute) is not bool:
        raise SettingError(f"arm/{name}.yaml: substitute", arm.substitute, "true or false")
    for kind in arm.drop:
        if kind not in CACHEABLE:
            raise SettingError(f"arm/{name}.yaml: drop", kind, f"kinds of {sorted(CACHEABLE)}")
    fixable = [*CHOSEN, *(f"memory.{key!s}" for key in base.memory)]
    for setting in arm.fixed:
        if setting not in fixable:
            raise SettingError(f"arm/{name}.yaml: fixed", setting, f"names out of {fixable}")


def config_text(cfg: DictConfig) -> str:
    """What a run's ``config.yaml`` holds: the settings, and every arm as it was composed."""
    kept = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in ("out", "hydra")])
    names = [name for name in cfg.arms if name not in ALWAYS]
    composed = OmegaConf.create({"composed": {name: arm_config(name, cfg) for name in names}})
    for settings in (kept, *composed.composed.values()):
        if settings.memory.salt:  # a secret has no place in a record
            OmegaConf.update(settings, "memory.salt", "set")
    return OmegaConf.to_yaml(kept) + OmegaConf.to_yaml(composed)


def memory_settings(cfg: DictConfig) -> MemorySettings:
    """``memory`` of an arm, its eviction policy made of ``conf/eviction/NAME.yaml``."""
    if cfg.eviction not in (names := _names("eviction")):
        raise SettingError("memory.eviction", cfg.eviction, f"one of {', '.join(names)}")
    policy = make(compose(f"eviction/{cfg.eviction}").eviction, "memory.eviction")
    return MemorySettings(cfg.page_size, cfg.pool_tokens, policy, cfg.partial, cfg.salt)


def make(cfg: Any, field: str, **more: Any) -> Any:
    """The object that ``cfg`` describes; a mistake in it is a `KvsemError` naming ``field``."""
    try:
        return instantiate(cfg, **more)
    except InstantiationException as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, KvsemError):
            cause = cause.__cause__
        if isinstance(cause, KvsemError):
            raise cause from error
        stray = re.search(r"unexpected keyword argument '(\w+)'", str(cause))
        if stray:
            keys = ", ".join(str(k) for k in cfg if k not in ("_target_", stray[1]))
            raise SettingError(f"{field}.{stray[1]}", cfg[stray[1]], f"one of {keys}") from error
        raise KvsemError(f"{field}: {one_line(cause)}") from error


def describe_part(cfg: Any) -> str:
    """One part in a row's settings: ``EpicRecompute(ratio=0.15, k=None)``."""
    values = OmegaConf.to_container(cfg) if OmegaConf.is_config(cfg) else cfg
    if not isinstance(values, Mapping) or "_target_" not in values:
        return str(values)
    shown = (f"{k!s}={describe_part(v)}" for k, v in values.items() if not str(k).startswith("_"))
    return f"{values['_target_'].rsplit('.', 1)[-1]}({', '.join(shown)})"


def one_line(error: BaseException) -> str:
    """An error as one line that says what would be right."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, HydraException | OmegaConfBaseException):
        strange = re.search(r"Could not override '([^']+)'", text)
        if strange:
            name, known = str(strange[1]), _known_beside(str(strange[1]))
            if name in known:
                group = name.rpartition(".")[0]
                return f"{name}: choose the part first, {group}=NAME ({', '.join(_names(group))})"
            return str(unknown(name, known))
        choice = re.search(r"(?:Could not find|In '[^']+': Could not find) '([^']+)'", text)
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        if choice and options:
            group, _, name = str(choice[1]).rpartition("/")
            return f"{group}={name!r}: expected one of {', '.join(map(str, options))}"
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} cannot be read: name=value, with brackets closed and quoted"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: it has no default; expected {error.full_key}=…"
    return re.sub(r"\s+", " ", text)
