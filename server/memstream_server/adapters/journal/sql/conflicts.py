"""Suspicions in the journal: entered, resolved and removed by commits; listed by pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import BindParameter, Connection, bindparam, delete, or_, select, tuple_

from memstream_server.adapters.journal.sql import bulk
from memstream_server.adapters.journal.sql.bulk import IDS_MAX
from memstream_server.adapters.journal.sql.reads import find_number
from memstream_server.adapters.journal.sql.schema import conflicts
from memstream_server.core.events import Event
from memstream_server.core.suspicions import APART, ConflictDecision, ConflictReason, Suspicion
from memstream_server.ports.journal.reading import StoredConflict
from memstream_server.ports.journal.writing import Commit

_INSERT = bulk.build_insert(conflicts, ("memory", "newer", "older"))
_RESOLVE = bulk.build_update(
    "conflicts",
    ("memory", "newer", "older", "decision", "note", "at"),
    "decision = given.decision, note = given.note, decide_time_us = given.at",
    "conflicts.memory = given.memory AND conflicts.newer = given.newer AND conflicts.older = given.older",
)
_number: BindParameter[int] = bindparam("m")
_ids: BindParameter[Any] = bindparam("ids", expanding=True)
_REMOVE = tuple(
    delete(conflicts).where(conflicts.c.memory == _number, side.in_(_ids))
    for side in (conflicts.c.newer, conflicts.c.older)
)
_END = delete(conflicts).where(
    conflicts.c.memory == _number, conflicts.c.newer == bindparam("one"), conflicts.c.older == bindparam("other")
)
_ALL = select(conflicts).where(conflicts.c.memory == _number).order_by(conflicts.c.newer, conflicts.c.older)
KNOWN_PAIRS = (
    select(conflicts.c.newer, conflicts.c.older, conflicts.c.reason, conflicts.c.time_us, conflicts.c.decision)
    .where(
        conflicts.c.memory == bindparam("number"), or_(*(conflicts.c.decision == one for one in ("", *sorted(APART))))
    )
    .order_by(conflicts.c.newer, conflicts.c.older)
)
_PAIR = tuple_(conflicts.c.newer, conflicts.c.older)
_after = tuple_(bindparam("newer"), bindparam("older"))
_PAGE = (
    select(conflicts)
    .where(conflicts.c.memory == _number, _after < _PAIR)
    .order_by(conflicts.c.newer, conflicts.c.older)
    .limit(bindparam("limit"))
)
_PAGES = {
    decided: _PAGE.where((conflicts.c.decision != "") if decided else (conflicts.c.decision == ""))
    for decided in (False, True)
}
_ONE = select(conflicts).where(
    conflicts.c.memory == _number, conflicts.c.newer == bindparam("newer"), conflicts.c.older == bindparam("older")
)


# ---- writes: removals come first, then new ones, then decisions


def remove_conflicts(connection: Connection, number: int, ids: Sequence[str]) -> None:
    """Remove those that name one of these fragments."""
    for start in range(0, len(ids), IDS_MAX):
        for statement in _REMOVE:
            connection.execute(statement, {"m": number, "ids": ids[start : start + IDS_MAX]})


def end_conflicts(connection: Connection, ended: Sequence[tuple[int, Event]]) -> None:
    """Remove the pairs that these events end, by the numbers of their memories."""
    connection.execute(_END, [{"m": number, "one": one.fragment, "other": one.other} for number, one in ended])


def enter_conflicts(connection: Connection, commits: Sequence[tuple[int, Commit]]) -> None:
    """Enter the commits' suspicions."""
    new = [
        (number, one.newer, one.older, one.reason.value, one.time_us, "", "", None)
        for number, commit in commits
        for one in commit.suspicions
    ]
    bulk.write_rows(connection, _INSERT, new)


def resolve_conflicts(connection: Connection, commits: Sequence[tuple[int, Commit]]) -> None:
    """Note the commits' decisions about suspicions."""
    decided = [
        (number, one.newer, one.older, one.decision.value, one.note, one.time_us)
        for number, commit in commits
        for one in commit.resolutions
    ]
    bulk.write_rows(connection, _RESOLVE, decided)


# ---- reads


def make_suspicions(rows: Sequence[Sequence[Any]]) -> tuple[Suspicion, ...]:
    """The suspicions of rows of `KNOWN_PAIRS`."""
    return tuple(
        [Suspicion(newer, older, ConflictReason(reason), at, bool(end)) for newer, older, reason, at, end in rows]
    )


def read_by_newer(connection: Connection, number: int) -> dict[str, tuple[StoredConflict, ...]]:
    """All suspicions of a memory by the id of the newer fragment."""
    found: dict[str, tuple[StoredConflict, ...]] = {}
    for row in connection.execute(_ALL, {"m": number}):
        found[row.newer] = (*found.get(row.newer, ()), _to_conflict(row))
    return found


def list_conflicts(
    connection: Connection, uid: str, decided: bool, after: tuple[str, str], limit: int
) -> list[StoredConflict]:
    number = find_number(connection, uid)
    if number is None:
        return []
    values = {"m": number, "newer": after[0], "older": after[1], "limit": limit}
    return [_to_conflict(row) for row in connection.execute(_PAGES[decided], values)]


def get_conflict(connection: Connection, uid: str, newer: str, older: str) -> StoredConflict | None:
    values = {"m": find_number(connection, uid), "newer": newer, "older": older}
    found = connection.execute(_ONE, values).first()
    return None if found is None else _to_conflict(found)


def _to_conflict(row: Any) -> StoredConflict:
    suspicion = Suspicion(row.newer, row.older, ConflictReason(row.reason), row.time_us)
    decision = ConflictDecision(row.decision) if row.decision else None
    return StoredConflict(suspicion, decision, row.note, row.decide_time_us)
