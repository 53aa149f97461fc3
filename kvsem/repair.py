"""A recompute rule at work on one request: what it may look at, and what is forwarded for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kvsem import rope
from kvsem.errors import KvsemError, SettingError
from kvsem.forward import KV, Arrived, Job, Watch
from kvsem.keys import chain_key
from kvsem.lm import LM
from kvsem.recompute.base import Adjusts, Needs, Recompute, Spread, Spreads, State
from kvsem.types import ChunkKV, Provenance, ReusePlan


@dataclass
class Repair:
    """``rule`` on the prompt ``ids``, whose reused KV is in place in ``kv``.

    `ready` runs all passes but the last and gives the job of that one, which may share a forward
    with other requests. ``multiplications``: of the passes so far, and of spreading.
    """

    lm: LM
    rule: Recompute
    ids: np.ndarray
    kv: KV
    state: State
    multiplications: int = 0
    layer_tokens: int = 0  # recomputed in passes before the last

    @classmethod
    def of(
        cls,
        lm: LM,
        rule: Recompute,
        plan: ReusePlan,
        entries: Mapping[str, ChunkKV],
        kv: KV,
        ids: np.ndarray,
        seed: int,
    ) -> Repair:
        """Applies the rule's ``adjust`` to the reused KV, which comes from ``entries``."""
        matched = torch.from_numpy(plan.matched)
        chunks = [(c.start, c.end) for c in plan.chunks]
        runs = sorted((r.target, r.target + r.length) for r in plan.runs)
        state = State(
            len(ids),
            matched,
            torch.from_numpy(plan.computed),
            [span for span in chunks if bool(matched[slice(*span)].any())],
            [span for span in runs if bool(matched[slice(*span)].any())],
            torch.from_numpy(plan.provenance == Provenance.SEMANTIC),
            _apart(plan, entries, ids),
            seed,
            n_layers=lm.n_layers,
        )
        repair = cls(lm, rule, ids, kv, state)
        if isinstance(rule, Adjusts) and bool(matched.any()):
            repair._adjust(rule)
        return repair

    @property
    def needs(self) -> Needs:
        return getattr(self.rule, "needs", Needs())

    @property
    def question(self) -> int:
        """Where the question begins: behind the last token that is not computed in any case."""
        known = (~self.state.new).nonzero()[:, 0]
        return int(known[-1]) + 1 if len(known) else 0

    def ready(self) -> tuple[Job, int]:
        """The last pass, and how many tokens its first layer computes."""
        if not bool(self.state.matched.any()):  # nothing to ask a rule about
            whole = self.state.new
            return Job(self.ids, self.kv, lambda _: whole), int(whole.sum())
        if self.needs.exact:
            self._compare()
        if self.needs.question_attention:
            self._look()
        for sweep in range(self.needs.sweeps - 1):
            self._sweep(sweep)
        self.state.sweep = self.needs.sweeps - 1
        return self._job()

    def computed(self, last: np.ndarray) -> np.ndarray:
        """bool ``[layers, n]``: what the last pass ran, and what was recomputed before it."""
        before = self.state.repaired
        return last if before is None else last | before.numpy()

    def unsettled(self, last: np.ndarray) -> np.ndarray | None:
        """bool ``[n]``: recomputed before the last pass only, over KV that has changed since."""
        before = self.state.repaired
        return None if before is None else before.numpy() & ~last.all(axis=0)

    # -- passes ---------------------------------------------------------------------------------

    def _job(self) -> tuple[Job, int]:
        """A pass by the rule, which is asked about the first layer now."""
        state, version, whole = self.state, -1, self.state.new
        state.previous, watch = None, None
        self._keep_reused()
        if self.needs.watch:
            watch = Watch(self.question)
            state.watched = watch.seen

        def select(layer: int) -> torch.Tensor:
            nonlocal whole, version
            if layer - 1 in self.needs.fresh_layers:
                keys, values = self.kv.read(layer - 1, state.n_tokens)
                state.fresh[layer - 1] = keys[0], values[0]
            chosen = self.rule.tokens(layer, state)
            # an unchanged set stays the same object; the version tells of changes made in place
            if chosen is not state.previous or chosen._version != version:
                whole, version = state.new | (chosen & state.matched), chosen._version
            state.previous = chosen
            return whole

        first = select(0)
        spread = self.rule.spread(state) if isinstance(self.rule, Spreads) else None
        job = Job(
            self.ids,
            self.kv,
            lambda layer: first if layer == 0 else select(layer),
            self._carry(spread, lambda: whole) if spread is not None else None,
            watch,
        )
        return job, int(first.sum())

    def _look(self) -> None:
        """The question over the assembled cache, with all that has no KV yet."""
        rows = self.state.new.nonzero()[:, 0].numpy()
        self.state.question_attention = self.lm.question_attention(
            self.ids, self.kv, rows, self.question
        )
        ran = np.zeros((self.lm.n_layers, len(self.ids)), dtype=bool)
        ran[:, rows] = True
        self.multiplications += self.lm.multiplications(ran)

    def _sweep(self, sweep: int) -> None:
        """A pass ahead of the last one, and what the question looks at in it."""
        self.state.sweep, watch = sweep, Watch(self.question)
        job, _ = self._job()
        _, computed = self.lm.prefill_many([job._replace(watch=watch)])[0]
        self.state.question_attention = torch.stack(watch.seen).cpu()
        self.multiplications += self.lm.multiplications(computed)
        self.layer_tokens += int((computed & self.state.matched.numpy()).sum())
        last = torch.from_numpy(computed[-1]) & self.state.matched
        self.state.repaired = last if self.state.repaired is None else self.state.repaired | last

    def _compare(self) -> None:
        """What every token is really off by: for oracles, and counted like everything else."""
        n, everything = self.state.n_tokens, torch.ones(self.state.n_tokens, dtype=torch.bool)
        exact = self.lm.buffer(n)
        _, computed = self.lm.prefill(self.ids, exact, lambda _: everything)
        self.multiplications += self.lm.multiplications(computed)
        errors = []
        for layer in range(self.lm.n_layers):
            pairs = zip(self.kv.read(layer, n), exact.read(layer, n), strict=True)
            squares = [(a[0].float() - b[0].float()).square().sum(dim=(0, 2)) for a, b in pairs]
            errors.append(torch.stack(squares).sum(0).sqrt().cpu())
        self.state.kv_error = torch.stack(errors) * self.state.matched

    # -- reused KV ------------------------------------------------------------------------------

    def _adjust(self, rule: Adjusts) -> None:
        at = self.state.matched.nonzero()[:, 0]
        there = at.to(self.lm.device)
        for layer in range(self.lm.n_layers):
            keys, values = (t[0][:, there] for t in self.kv.read(layer, self.state.n_tokens))
            keys, values = rule.adjust(layer, keys, values, self.state)
            self.kv.write(layer, at, keys[None], values[None])

    def _keep_reused(self) -> None:
        for layer in self.needs.fresh_layers:
            if layer >= self.lm.n_layers:
                raise SettingError(
                    "recompute: layer", layer, f"a layer from 0 to {self.lm.n_layers - 1}"
                )
            keys, values = (t[0].clone() for t in self.kv.read(layer, self.state.n_tokens))
            self.state.reused[layer] = keys, values

    def _carry(self, spread: Spread, rows: Callable[[], torch.Tensor]) -> Arrived:
        """What `Spread` asks for, whenever K and V of a layer's ``rows`` arrive."""
        span, sources = spread.span, spread.sources
        back, there = (
            self.lm.angles(at) for at in (sources.tolist(), [*range(*span.indices(span.stop))])
        )
        self.multiplications += spread.per_column * sum(
            s.kv_heads * (s.key_dim + s.value_dim) for s in self.lm.shapes
        )
        spread = spread.to(self.lm.device)

        def arrived(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            present = rows()
            if not bool(present[sources].all()):
                raise KvsemError(f"a source of the spread is not recomputed at layer {layer}")
            at = (present.cumsum(0) - 1)[sources].to(self.lm.device)
            kind, pairs = self.lm.layer_types[layer], self.lm.pairs[layer]
            reused = [t[0] for t in self.kv.read(layer, self.state.n_tokens)]
            off_keys, off_values = (
                fresh[0].index_select(1, at).float() - old.index_select(1, spread.sources).float()
                for fresh, old in zip((keys, values), reused, strict=True)
            )
            cos, sin = back[kind]
            off_keys = rope.shift(off_keys, cos, -sin, pairs)
            carried = spread.carry(_flat(off_keys), _flat(off_values))
            by_keys, by_values = (
                _by_head(t, len(old)) for t, old in zip(carried, reused, strict=True)
            )
            by = rope.shift(by_keys, *there[kind], pairs), by_values
            new = (
                (old[:, span] + more).to(old.dtype)[None]
                for old, more in zip(reused, by, strict=True)
            )
            self.kv.write(layer, span, *new)

        return arrived


def _flat(heads: torch.Tensor) -> torch.Tensor:
    """``[kv_heads, tokens, dim]`` → ``[tokens, kv_heads x dim]``."""
    return heads.transpose(0, 1).flatten(1)


def _by_head(flat: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The other way round."""
    return flat.view(len(flat), kv_heads, -1).transpose(0, 1)


def _apart(plan: ReusePlan, entries: Mapping[str, ChunkKV], ids: np.ndarray) -> torch.Tensor:
    """`State.apart`. Ahead of a chunk its entry's donor has the same tokens, or no more of them
    than the system prompt; inside, those that were aligned, whether they are reused or not."""
    apart = torch.zeros(plan.n_tokens)
    head = next((c.end for c in plan.chunks if c.kind == "system"), 0)
    for chunk in plan.chunks:
        kinds = plan.provenance[chunk.start : chunk.end]
        if not (kinds == Provenance.SEMANTIC).any():
            continue
        own = [run for run in plan.runs if chunk.start <= run.target < chunk.end]
        entry = entries[own[0].entry]
        follows = chain_key(entry.namespace, ids[: entry.position]) == entry.context_key
        shared = entry.position if follows else min(head, entry.position)
        aligned = np.cumsum(kinds != Provenance.NEW)
        for run in own:
            here, there = run.target, entry.position + run.source
            inside = int(aligned[here - chunk.start]) - 1
            both = min(shared + inside, here, there)
            only_one = here + there - 2 * both
            ahead = only_one + both + torch.arange(run.length)
            apart[here : here + run.length] = only_one / ahead.clamp_min(1)
    return apart
