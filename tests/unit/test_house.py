"""Rules of the house that a review would otherwise have to look for."""

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "kvsem").rglob("*.py"))
CONFIGS = sorted((ROOT / "conf").rglob("*.yaml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PLUGS = {
    "aligners", "chunkers", "contexts", "embedders", "eviction", "gates", "heads", "index",
    "metrics", "recompute", "workloads",
}  # fmt: skip
LAYERS: tuple[set[str], ...] = (
    {
        "errors",
        "files",
        "lcs",
        "model",
        "types",
        "keys",
        "rope",
        "packaged",
        "pretrained",
        "records",
    }
    | {"wording"},
    {
        "admit",
        "batch",
        "diagnose",
        "fingerprint",
        "forward",
        "ingest",
        "lm",
        "memory",
        "planner",
        "prompt",
        "selfcheck",
    }
    | PLUGS,
    {"engine", "repair"},
    {"baselines", "environment", "guarantee", "harness", "observe", "serving"},
    {
        "cli",
        "compare",
        "doctor",
        "explain",
        "inputs",
        "intervals",
        "labels",
        "pgr",
        "plots",
        "report",
        "results",
        "summary",
        "tracking",
        "wandb_report",
    },
)
LAYER = {name: level for level, names in enumerate(LAYERS) for name in names}
# the one knot: `load` checks what it has loaded, and the check drives a loaded model
KNOT = ("kvsem.lm", "kvsem.selfcheck")


def test_the_globs_find_something() -> None:
    assert len(SOURCES) > 20
    assert len(CONFIGS) > 10
    assert all((ROOT / "kvsem" / plug).is_dir() for plug in ("chunkers", "recompute", "metrics"))


# Imports --------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[str]:
    """Full names, wherever in the file they stand; of kvsem as far as they are modules."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def own_imports(name: str) -> set[str]:
    return {i for i in imports(MODULES[name]) if i.split(".")[0] == "kvsem" and i != "kvsem"}


def part(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("name", [name for name in MODULES if name != "kvsem"])
def test_no_import_goes_upward(name: str) -> None:
    for module in {name, *own_imports(name)}:
        assert part(module) in LAYER, f"{module}: give it a layer in LAYERS"
    upward = [i for i in own_imports(name) if LAYER[part(i)] > LAYER[part(name)]]
    assert not upward


@pytest.mark.parametrize("name", [n for n in MODULES if n.count(".") == 2 and part(n) in PLUGS])
def test_a_plug_knows_the_bottom_layer_and_its_own_base_only(name: str) -> None:
    others = [
        i for i in own_imports(name) if LAYER[part(i)] > 0 and i != f"kvsem.{part(name)}.base"
    ]
    assert not others


def test_no_import_goes_in_circles() -> None:
    graph = {name: own_imports(name) & MODULES.keys() for name in MODULES}
    graph[KNOT[0]].discard(KNOT[1])
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_hydra_stays_out_of_the_library() -> None:
    assert not [n for n, p in MODULES.items() if top_level(p) & {"hydra", "omegaconf"}]


def test_wandb_is_known_to_tracking_only() -> None:
    assert [n for n, p in MODULES.items() if "wandb" in top_level(p)] == ["kvsem.tracking"]


def test_transformers_caches_are_known_to_the_adapter_only() -> None:
    """J4: one module touches the cache API."""
    pattern = re.compile(r"\b(cache_utils|\w*Cache(LayerMixin)?|\w+Layer)\b")
    found = {
        name
        for name, path in MODULES.items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom)
        and str(node.module).startswith("transformers")
        and any(pattern.search(f"{node.module}.{alias.name}") for alias in node.names)
    }
    found |= {name for name, path in MODULES.items() if "transformers.cache_utils" in text(path)}
    assert found <= {"kvsem.lm"}


def text(path: Path) -> str:
    return path.read_text()


def top_level(path: Path) -> set[str]:
    return {i.split(".")[0] for i in imports(path)}


def test_every_library_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]
    required = [*PROJECT["dependencies"], *extras["cpu"], *extras["report"]]
    declared = {canonicalize_name(Requirement(r).name) for r in required}
    owners = packages_distributions()
    paths = [*SOURCES, *sorted((ROOT / "experiments").rglob("*.py"))]
    used = {i for path in paths for i in top_level(path)} - sys.stdlib_module_names
    used -= {"kvsem", "experiments"}
    assert "torch" in used
    undeclared = {
        name for name in used if not {canonicalize_name(o) for o in owners.get(name, ())} & declared
    }
    assert not undeclared


# What must not be called ----------------------------------------------------------------------


def forbidden(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            if call in ("eval", "exec", "compile", "hash", "torch.load", "torch.save"):
                yield f"{path.name}:{node.lineno}: {call}"
            risky = (k for k in node.keywords if k.arg in ("allow_pickle", "trust_remote_code"))
            if any(ast.unparse(k.value) != "False" for k in risky):
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"
    yield from (f"{path.name}: {i}" for i in top_level(path) & {"pickle", "dill", "joblib"})


def test_nothing_is_unpickled_or_evaluated() -> None:
    """B2, rule 8: no pickle, no eval, and never Python's own hash, which differs per process."""
    assert not [found for path in SOURCES for found in forbidden(path)]


def test_forbidden_calls_would_be_found(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle\nx = hash('a')\ny = np.load('f', allow_pickle=True)\nm.eval()\n")
    assert len(list(forbidden(bad))) == 3


# Configs --------------------------------------------------------------------------------------


def targets(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from targets(child)


TARGETS = [
    pytest.param(found, id=str(path.relative_to(ROOT / "conf")))
    for path in CONFIGS
    if "launcher" not in path.parts  # plugins that may be missing: tests/unit/test_sweep.py
    for found in targets(yaml.safe_load(path.read_text()))
]


def test_there_are_targets() -> None:
    assert len(TARGETS) > 10


@pytest.mark.parametrize("node", TARGETS)
def test_a_target_is_importable_and_takes_its_settings(node: dict[str, Any]) -> None:
    module, _, name = node["_target_"].rpartition(".")
    signature = inspect.signature(getattr(importlib.import_module(module), name))
    settings = {key: None for key in node if not re.fullmatch(r"_\w+_", key)}
    if node.get("_partial_"):
        signature.bind_partial(**settings)
    else:
        signature.bind(**settings)


# Set-up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", ["No module named 'faiss'", "libcudart.so.12: cannot open shared object file"]
)
def test_without_faiss_one_line_says_what_to_install(error: str) -> None:
    script = f"""
import sys
class NoFaiss:
    def find_spec(self, name, path=None, target=None):
        if name == "faiss":
            raise ImportError({error!r})
sys.meta_path.insert(0, NoFaiss())
from kvsem.errors import KvsemError
from kvsem.index.flat import FlatIndex
try:
    FlatIndex(dim=4, identity="test")
except KvsemError as caught:
    print(caught)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1, done.stderr
    assert "kvsem[cpu]" in done.stdout
    assert "kvsem[gpu]" in done.stdout


def fake_python(folder: Path, failing: str) -> Path:
    """A python that runs, but fails what it is asked with ``failing`` in it."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *{failing}*) exit 1;; *print*) echo pythonX-venv;; esac\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(checkout: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    inherited = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", *arguments], cwd=checkout, env=inherited, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (None, "no .* found: kvsem needs Python 3.11 or newer"),
        ("version_info\\ \\<", "kvsem needs Python 3.11 or newer"),
        ("ensurepip", "cannot make environments: apt install .*venv"),
    ],
)
def test_make_says_in_one_line_what_python_lacks(
    checkout: Path, failing: str | None, message: str
) -> None:
    python = fake_python(checkout, failing) if failing else checkout / "absent"
    done = make(checkout, f"PYTHON={python}", "install")
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1, done.stdout
    assert re.search(message, done.stdout)
    assert not (checkout / ".venv").exists()


def test_make_alone_prints_its_targets(checkout: Path) -> None:
    done = make(checkout)
    assert done.returncode == 0
    assert {"make run", "make test"} <= {" ".join(x.split()[:2]) for x in done.stdout.splitlines()}


def test_constraints_pin_what_pyproject_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins: dict[str, str] = {
        canonicalize_name(name): version
        for name, _, version in (x.partition("==") for x in lines if not x.startswith("#"))
    }
    assert "+" not in pins["torch"]  # a local version would ask for one index's build
    assert "kvsem" not in pins
    extras = PROJECT["optional-dependencies"]
    for group in (PROJECT["dependencies"], extras["cpu"], extras["minilm"], extras["dev"]):
        for requirement in map(Requirement, group):
            pinned = pins[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pinned), requirement


def test_the_oldest_transformers_of_the_range_is_the_one_that_is_tested() -> None:
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    (tested,) = [Requirement(line) for line in lines if line.startswith("transformers")]
    (asked,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "transformers"]
    assert f">={str(tested.specifier).removeprefix('==').removesuffix('.0')}" in str(asked)


@pytest.mark.parametrize(
    "name", ["README.md", "LICENSE", "NOTICE", "THIRD_PARTY_NOTICES.md", "CHANGELOG.md", ".ci/run"]
)
def test_the_house_is_complete(name: str) -> None:
    assert (ROOT / name).stat().st_size > 100


def test_data_files_are_packaged() -> None:
    """What is no module and not listed in package-data is missing from a wheel."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    listed = {
        path
        for package, patterns in tool["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    found = {
        path
        for path in (ROOT / "kvsem").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert found
    assert found == listed


def test_every_folder_with_modules_is_a_package() -> None:
    """A namespace package has no importlib.resources once it is installed editable."""
    assert not [f for f in {p.parent for p in SOURCES} if not (f / "__init__.py").exists()]
