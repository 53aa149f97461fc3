"""The table in docs/models.md is what the self-checks say today (I2: no silent support)."""

from __future__ import annotations

from tests.families import FAMILIES
from tests.support_table import PAGE, committed, table


def test_the_committed_table_is_what_the_self_checks_say() -> None:
    """`make support` writes it."""
    assert committed(PAGE.read_text(encoding="utf-8")) == table()


def test_every_family_has_a_row_and_every_no_a_reason() -> None:
    rows = [line.strip("| ").split(" | ") for line in table().splitlines()[2:]]
    assert [row[0] for row in rows] == list(FAMILIES)
    for _, _, *marks, reason in (row if len(row) == 6 else [*row, ""] for row in rows):
        assert set(marks) <= {"yes", "no", "within its length"}
        assert ("no" in marks) == bool(reason.strip())
