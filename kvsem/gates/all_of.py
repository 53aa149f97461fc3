"""Several gates, all of which must accept."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsem.errors import SettingError
from kvsem.gates.base import Candidate, Decision, Gate
from kvsem.model import Model, hand
from kvsem.types import Span


@dataclass
class AllOf:
    """Asks ``gates`` in order: the first refusal counts, with its reason; where all accept, what
    any of them wants computed is computed. Cheap gates go first."""

    gates: Sequence[Gate]

    def __post_init__(self) -> None:
        self.gates = tuple(self.gates)
        if not self.gates:
            raise SettingError("gates", [], "at least one gate")

    def use(self, model: Model) -> None:
        """Give ``model`` to the gates that want one."""
        for gate in self.gates:
            hand(gate, model)

    def accept(self, text: str, candidate: Candidate) -> Decision:
        """Refuses as the first gate that does."""
        compute: list[Span] = []
        for gate in self.gates:
            decision = gate.accept(text, candidate)
            if not decision.accepted:
                return decision
            compute += decision.compute
        return Decision(True, compute=tuple(dict.fromkeys(compute)))
