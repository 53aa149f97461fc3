"""Write the support table into docs/models.md, from the self-checks of tiny models.

``python -m tests.support_table`` (or ``make support``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvsem.lm import LM
from tests.families import FAMILIES, family_lm

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- support: begin -->", "<!-- support: end -->"
CAPABILITIES = ("exact_prefix", "moved_chunk", "blend")


def table() -> str:
    """Markdown, one row a family."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "| family | for example | exact prefix | moved chunk | blend | reason |"
    yield "|---|---|---|---|---|---|"
    for name, family in FAMILIES.items():
        lm = family_lm(name)
        marks = [_mark(lm, capability) for capability in CAPABILITIES]
        yield f"| {' | '.join([name, family.like, *marks, _reason(lm)])} |"


def _mark(lm: LM, capability: str) -> str:
    if not lm.support[capability][0]:
        return "no"
    return "within its length" if lm.steady_tokens < lm.max_tokens else "yes"


def _reason(lm: LM) -> str:
    """Why the first thing is off that is."""
    reasons = [lm.support[capability] for capability in CAPABILITIES]
    return next((reason for ok, reason in reasons if not ok), "")


def committed(page: str) -> str:
    """What stands between the markers."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
