"""`memstream verify`: checks the suspicions of a memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Row, bindparam, select

from memstream_server.adapters.journal.sql.schema import conflicts, fragments
from memstream_server.core.suspicions import ConflictDecision, ConflictReason

if TYPE_CHECKING:
    from memstream_server.adapters.journal.verify.report import Report

_CONFLICTS = select(conflicts).where(conflicts.c.memory == bindparam("number"))
_there = select(fragments.c.id).where(fragments.c.memory == bindparam("number"))
_STRAYS = {
    side.name: select(side).where(conflicts.c.memory == bindparam("number"), side.not_in(_there))
    for side in (conflicts.c.newer, conflicts.c.older)
}
_REASONS, _DECISIONS = frozenset(ConflictReason), frozenset(ConflictDecision)


def check_conflicts(connection: Connection, memory: Row[Any], name: str, report: Report) -> None:
    """Each names two fragments of the memory, a known reason, and a known decision with its time. Raises DBAPIError."""
    for row in connection.execute(_CONFLICTS, {"number": memory.number}):
        report.count_checked("conflicts")
        if row.newer == row.older:
            report.add_violation("conflicts", "a suspicion names one fragment twice", name, row.newer)
        if row.reason not in _REASONS:
            report.add_violation("conflicts", f"its suspicion has the reason {row.reason!r}", name, row.newer)
        if row.decision and row.decision not in _DECISIONS:
            report.add_violation("conflicts", f"its suspicion has the decision {row.decision!r}", name, row.newer)
        if bool(row.decision) != (row.decide_time_us is not None):
            report.add_violation("conflicts", "its suspicion has a decision or its time, not both", name, row.newer)
    for side, statement in _STRAYS.items():
        for (id_,) in connection.execute(statement, {"number": memory.number}):
            report.add_violation("conflicts", f"is the {side} of a suspicion and is not in the memory", name, id_)
