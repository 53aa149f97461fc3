"""The notebooks run from top to bottom on what is committed, and show what their text says."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAY_IMPORT = {  # beside kvsem.results and kvsem.types: reading is apart from computing
    "01_anatomy_of_a_plan": set(),
    "02_quality_against_cost": {"kvsem.plots"},
    "03_your_own_method": {"kvsem.engine", "kvsem.harness", "kvsem.lm"}
    | {"kvsem.metrics", "kvsem.recompute", "kvsem.workloads"},
}
FACTS = {  # run in the notebook's own kernel, behind its last cell
    "01_anatomy_of_a_plan": """
kinds = [match.kind for match in plan.matches]
assert kinds == ["prefix", "prefix", "chunk", "semantic", "none", "none"]
assert all(sum(counts(p).values()) == plan.n_tokens for p in [plan.provenance, *after.values()])
assert plan.miss == "diverged" and 0 < rest < saved["page_size"]
assert plan.refused and set(plan.refused) == {"below_threshold"}
assert 0.85 <= plan.matches[edited].score < 1
assert (runs["for"] == names[edited]).sum() > 1 and (runs["for"] == names[2]).sum() == 1
assert all("".join(tokens[c.start : c.end]).strip() == c.text for c in plan.chunks[1:])
assert all((p == Provenance.PREFIX).sum() == table["prefix"].iloc[0] for p in after.values())
layers = {name: found["computed_per_layer"] for name, found in saved["after"].items()}
n = int(plan.matched.sum())
assert layers["none"] == [0] * 30 and layers["cacheblend"][:2] == [n, n]
assert 0.1 * n < layers["cacheblend"][-1] < 0.2 * n and 0.1 * n < layers["epic"][0] < 0.2 * n
""",
    "02_quality_against_cost": """
from math import isclose
kl, error, nll = "quality/kl_first_nats", "quality/kv_error_rel", "quality/answer_nll_nats"
for found in (run, musique):
    arms, pairs = found.summary["arms"], found.summary["pairs"]
    assert arms["exact_again"][kl]["mean"] == 0
    assert arms["zero_kv"][kl]["mean"] > 20 * arms["none"][kl]["mean"]
    assert all(pairs[f"none-{rule}"][kl]["low"] > 0 for rule in ("random", "epic", "cacheblend"))
    assert pairs["epic-cacheblend"][error]["high"] < 0
own = run.summary["arms"]
assert own["none"][kl]["low"] < own["random"][kl]["low"] + 0.01 < own["none"][kl]["high"]
wide = run.samples.pivot(index="request", columns="arm", values=kl)
assert (wide["none"] > wide["random"]).mean() > 0.8
tied = run.summary["pairs"]["epic-cacheblend"][kl]
assert tied["low"] < 0 < tied["high"]
assert musique.summary["pairs"]["epic-cacheblend"][kl]["low"] > 0
cost = {name: found["cost/flop_ratio"]["mean"] for name, found in own.items()}
assert cost["zero_kv"] == cost["none"] < 0.15 < cost["epic"] < cost["cacheblend"]
assert all(musique.summary["pairs"][p][nll]["low"] < 0 < musique.summary["pairs"][p][nll]["high"]
           for p in PAIRS)
assert run.summary["pairs"]["none-epic"][nll]["high"] < 0
assert own["none"][nll]["mean"] < own["exact"][nll]["mean"]
per_layer = run.samples[run.samples["arm"] != "zero_kv"].set_index("arm")["kv_error_rel_per_layer"]
assert per_layer.str[0].max() < 1e-4 > per_layer.loc["cacheblend"].str[1].max()
assert wide["none"].corr(wide["random"], method="spearman") > 0.9
assert wide["none"].corr(wide["epic"], method="spearman") > 0.3
assert all(isclose(run.samples[run.samples["arm"] == arm][kl].mean(), own[arm][kl]["mean"],
                   abs_tol=1e-12) for arm in run.arms)
""",
    "03_your_own_method": """
assert list(means.index) == ["exact", "exact_again", *rules] and len(run.samples) == 12
shown = means["recomputed tokens"], means["FLOP ratio"], means["KV error"]
for column, fewer_is_more in zip(shown, (False, False, True)):
    ordered = column[["none", "stripes_16", "stripes_4"]]
    assert ordered.is_monotonic_decreasing if fewer_is_more else ordered.is_monotonic_increasing
matched_tokens = run.samples.set_index("arm").loc["none", "reuse/chunk_tokens"].sum()
assert abs(means["recomputed tokens"]["stripes_4"] * 2 / matched_tokens - 0.25) < 0.01
assert means["KL first token, nats"]["exact_again"] == 0 < means["KL first token, nats"]["none"]
assert not written.path.exists()
""",
}
pytestmark = [pytest.mark.slow, pytest.mark.ci]
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def code(path: Path) -> str:
    """The notebook's Python, without its magics."""
    cells = (cell.source for cell in read(path).cells if cell.cell_type == "code")
    lines = "\n".join(cells).splitlines()
    return "\n".join(line for line in lines if not line.startswith("%"))


def test_there_is_a_notebook_for_every_fact() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(FACTS) == set(MAY_IMPORT)


@by_name
def test_it_is_committed_without_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert cell.metadata == {}
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


@by_name
def test_reading_is_apart_from_computing(path: Path) -> None:
    names = set()
    for node in ast.walk(ast.parse(code(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            own = (f"kvsem.{alias.name}" for alias in node.names)
            names |= set(own) if node.module == "kvsem" else {str(node.module)}
    parts = {".".join(n.split(".")[:2]) for n in names if n.split(".")[0] == "kvsem"}
    assert parts
    assert parts <= {"kvsem.results", "kvsem.types"} | MAY_IMPORT[path.stem]


def test_the_method_is_the_one_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Add your own method", 1)[1]
    for language in ("python", "yaml"):
        snippet = section.split(f"```{language}\n", 1)[1].split("\n```", 1)[0]
        sources = [cell.source for cell in read(ROOT / "notebooks/03_your_own_method.ipynb").cells]
        assert any(snippet in source for source in sources)


@by_name
def test_it_runs_and_shows_what_it_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, temporary = tmp_path / "notebooks", tmp_path / "temporary"
    shutil.copytree(ROOT / "notebooks", folder)
    for study in ("experiments/pydoc/results", "experiments/musique/results/ratio"):
        shutil.copytree(ROOT / study, tmp_path / study)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other cost minutes
    before = {p for p in tmp_path.rglob("*") if p.is_file()}
    notebook = read(path)
    notebook.cells.append(nbformat.v4.new_code_cell(FACTS[path.stem]))  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=550, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    said = [out.text for out in outputs if out.get("name") == "stderr"]
    assert not [text for text in said if "IProgress" not in text]  # no widgets in CI
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == before
