"""Study: SemShareKV's ablation (matched, zeroed, random KV), and its sweep of the changed share.

python experiments/reuse_map/semsharekv.py --help
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["HYDRA_FULL_ERROR"] = "1"

import hydra
import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.embeddings.pairs import FILES, Pair  # noqa: E402
from experiments.public import Record, read, sentences  # noqa: E402
from experiments.reuse_map.bench import KEYS, Bench, Row, collected, means, part, shown  # noqa: E402
from experiments.reuse_map.changes import REWORDED, made  # noqa: E402
from experiments.study import attempt, check_keys, data_file, entry, record  # noqa: E402
from kvsem.errors import SettingError, check_range  # noqa: E402
from kvsem.gates.threshold import ThresholdGate  # noqa: E402
from kvsem.lm import LM, load  # noqa: E402
from kvsem.plots import GREY, METHOD_COLOURS, METHOD_MARKERS, STYLE  # noqa: E402

ARMS: dict[str, tuple[str, dict[str, float], str]] = {  # by name: aligner, its settings, rule
    "nearest": ("nearest", {}, "none"),
    "nearest, zeroed": ("nearest", {}, "zero_kv"),
    "nearest, random": ("nearest", {}, "random_kv"),
    "nearest, any": ("nearest", {"min_score": -1.0}, "none"),  # every token takes one
    "hybrid": ("hybrid", {}, "none"),
    "edit": ("edit", {}, "none"),
}
SWEPT = ("nearest", "nearest, any", "hybrid", "edit")
SWEEP = "sentences replaced"
FLOOR = 1e-5  # nats


def arms(names: Sequence[str]) -> list[dict[str, Any]]:
    """Parts of engines that take whatever they find."""
    gate = ThresholdGate(-1.0)
    return [
        {"aligner": part("aligner", of, **own), "recompute": part("recompute", rule), "gate": gate}
        for of, own, rule in (ARMS[name] for name in names)
    ]


def replaced(
    rows: Sequence[Record], shares: Sequence[float], n: int, length: int, seed: int
) -> Iterator[tuple[float, Pair]]:
    """The first ``length`` sentences of ``n`` articles, with each share of them replaced by those
    that stand there in the next article. What is replaced at a small share is at a larger one."""
    texts: dict[str, list[str]] = defaultdict(list)
    questions = {row["article"]: row["qas"][0]["question"]["en"] for row in reversed(rows)}
    for row in rows:
        texts[row["article"]] += sentences(row["context"]["en"])
    names = [name for name in sorted(texts) if len(texts[name]) >= length]
    for i, name in enumerate(names[:n]):
        own, other = texts[name][:length], texts[names[(i + 1) % len(names)]]
        order = np.random.default_rng([seed, i]).permutation(length)
        for share in shares:
            gone = set(order[: round(share * length)].tolist())
            target = " ".join(other[j] if j in gone else own[j] for j in range(length))
            identity = f"{SWEEP}/{name}/{share:g}"
            yield share, Pair(identity, SWEEP, name, " ".join(own), target, questions[name])


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    ablated, swept = parted(rows)
    return {
        "kind | arm": means(ablated, ["kind", "arm"]),
        "arm": means(ablated, ["arm"]),
        "share | arm": means(swept, ["share", "arm"]),
    }


def parted(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows of the ablation, and of the sweep."""
    return [r for r in rows if r["kind"] != SWEEP], [r for r in rows if r["kind"] == SWEEP]


def table(rows: Sequence[Row], by: str) -> list[str]:
    """Markdown: a row for each value of ``by`` and arm."""
    lines = [f"| {by} (n) | similarity | overlap | arm | " + " | ".join(KEYS) + " |"]
    lines.append("|" + "---|" * (4 + len(KEYS)))
    for name, cell in means(rows, [by, "arm"]).items():
        value, _, arm = name.partition(" | ")
        about = [f"{cell[key]['mean']:.2f}" for key in ("similarity", "overlap")]
        numbers = [shown(cell[key]) for key in KEYS]
        lines.append(f"| {value} ({cell['n']}) | " + " | ".join([*about, arm, *numbers]) + " |")
    return lines


def figure(rows: Sequence[Row]) -> Figure:
    """The ablation by kind of paraphrase; divergence and cost by the changed share."""
    ablated, swept = parted(rows)
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(12.5, 4), layout="constrained")
        left, middle, right = drawn.subplots(1, 3)
        _ablation(left, means(ablated, ["arm", "kind"]))
        found = means(swept, ["arm", "share"])
        shares = list(dict.fromkeys(row["share"] for row in swept))
        for axes, key in ((middle, "kl_nats"), (right, "flop_ratio")):
            for i, arm in enumerate(SWEPT):
                ends = [found[f"{arm} | {share}"][key] for share in shares]
                x = [share + 0.006 * (i - 1.5) for share in shares]
                _line(axes, x, ends, i, arm, upright=True)
            axes.xaxis.set_major_formatter(PercentFormatter(1))
            axes.set_xlabel("sentences replaced")
        middle.set(yscale="log", ylabel="KL(exact ‖ reuse), mean of 16 tokens [nats]")
        middle.legend(frameon=False, loc="lower right")
        right.set(ylabel="multiplications, reuse ÷ exact", ylim=(0, 1))
        n = len({row["id"] for row in ablated}), len({row["group"] for row in swept})
        drawn.supxlabel(
            f"Means, bars: 95 % bootstrap over documents; {n[0]} paraphrases, {n[1]} articles. "
            f"KL below {FLOOR:g} is left out.",
            fontsize=8,
            color=GREY,
            x=0.01,
            ha="left",
        )
        return drawn


def _ablation(axes: Axes, found: Mapping[str, Row]) -> None:
    kinds = list(dict.fromkeys(name.partition(" | ")[2] for name in found))
    for i, kind in enumerate(kinds):
        ends = [found[f"{arm} | {kind}"]["kl_nats"] for arm in ARMS]
        y = [j + 0.18 * (i - (len(kinds) - 1) / 2) for j in range(len(ARMS))]
        _line(axes, y, ends, i + len(SWEPT), kind, upright=False)
    axes.set(xscale="log", xlabel="KL(exact ‖ reuse), mean of 16 tokens [nats]")
    axes.set_yticks(range(len(ARMS)), list(ARMS))
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="lower right", fontsize=8)


def _line(
    axes: Axes,
    at: Sequence[float],
    ends: Sequence[Mapping[str, float]],
    i: int,
    label: str,
    upright: bool,
) -> None:
    """Means with their intervals, joined where they stand side by side; none below `FLOOR`."""
    kept = [(x, e) for x, e in zip(at, ends, strict=True) if e["mean"] >= FLOOR]
    at = [x for x, _ in kept]
    mean, low, high = ([max(e[k], FLOOR) for _, e in kept] for k in ("mean", "low", "high"))
    colour = (*METHOD_COLOURS, GREY)[i]
    marks: dict[str, Any] = {
        "color": colour,
        "marker": METHOD_MARKERS[i % len(METHOD_MARKERS)],
        "label": label,
    }
    if upright:
        axes.vlines(at, low, high, color=colour, linewidth=1.1)
        axes.plot(at, mean, markersize=5, **marks)
    else:
        axes.hlines(at, low, high, color=colour, linewidth=1.1)
        axes.plot(mean, at, linestyle="", markersize=5, **marks)


def check(cfg: DictConfig) -> None:
    """Raise `SettingError` for what cannot be measured."""
    check_keys(cfg, {str(k): None for k in OmegaConf.load(Path(__file__).with_suffix(".yaml"))})
    for kind in cfg.kinds:
        if kind not in REWORDED:
            raise SettingError("kinds", kind, f"names out of {', '.join(REWORDED)}")
    for share in cfg.shares:
        check_range("shares", share, 0.0, 1.0)
    for name in FILES.values():
        data_file(cfg, name)


def perform(cfg: DictConfig) -> None:
    check(cfg)
    torch.set_num_threads(cfg.threads)
    ablated = made(ROOT / cfg.data, cfg.kinds, cfg.n, cfg.max_words, cfg.seed)
    articles = list(read(data_file(cfg, FILES["xquad"])))
    swept = list(replaced(articles, cfg.shares, cfg.articles, cfg.sentences, cfg.seed))
    share = {pair.id: share for share, pair in swept}
    lm: LM = load(cfg.model, packaged=True)
    benches = {names: Bench(lm, cfg.system, arms(names)) for names in (tuple(ARMS), SWEPT)}

    def measure(pair: Pair) -> Iterator[Row]:
        names = SWEPT if pair.kind == SWEEP else tuple(ARMS)
        for arm, row in zip(names, benches[names].rows(pair), strict=True):
            yield row | {"arm": arm, "share": share.get(pair.id)}

    about = {"model": lm.name, "namespace": lm.namespace()}
    rows = collected(cfg, [*ablated, *(pair for _, pair in swept)], measure, **about)
    folder = record(cfg, rows, summarise(rows), {"semsharekv": figure(rows)}, **about)
    for part_of, by in zip(parted(rows), ("kind", "share"), strict=True):
        print("\n".join(["", *table(part_of, by)]))
    print(f"\nstudy: {folder}")


@hydra.main(version_base="1.3", config_path=".", config_name="semsharekv")
def main(cfg: DictConfig) -> None:
    attempt(perform, cfg)


if __name__ == "__main__":
    sys.exit(entry(main))
