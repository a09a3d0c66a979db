"""`memstream verify`: checks a memory's versions against its fragments and its event log."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Connection, Row, Select, bindparam, func, select

from memstream_server.adapters.journal.sql import codec
from memstream_server.adapters.journal.sql.bulk import PAGE_ROWS, fetch_rows
from memstream_server.adapters.journal.sql.schema import events, fragments, key_range, row_key, versions
from memstream_server.adapters.journal.sql.vector_forms import has_valid_length
from memstream_server.core.events import EventType
from memstream_server.ports.journal.errors import JournalError

if TYPE_CHECKING:
    from memstream_server.adapters.journal.verify.report import Report

CHECK = "versions"
_low, _high, _limit, _after = (
    bindparam("low", type_=BigInteger),
    bindparam("high", type_=BigInteger),
    bindparam("limit", type_=BigInteger),
    bindparam("after", type_=BigInteger),
)
_VERSIONS: Select[*tuple[Any, ...]] = (
    select(
        versions.c.key,
        versions.c.replaced,
        fragments.c.id,
        versions.c.event,
        versions.c.payload,
        versions.c.terms,
        versions.c.model,
        func.length(versions.c.vector, type_=BigInteger),
    )
    .outerjoin(fragments, fragments.c.key == versions.c.key)
    .where(
        versions.c.key.between(_low, _high),
        (versions.c.key > _low) | (versions.c.replaced > _after),
    )
    .order_by(versions.c.key, versions.c.replaced)
    .limit(_limit)
)
_EVENTS = select(events.c.payload).where(events.c.key == bindparam("key"))


def check_versions(
    connection: Connection, memory: Row[Any], name: str, report: Report, computed: Collection[str]
) -> None:
    """Each version must be readable, belong to a fragment, and be replaced by an event of it that the log names."""
    low, high = key_range(memory.number)
    after = -1
    while True:
        rows = fetch_rows(connection, _VERSIONS, {"low": low, "high": high, "after": after, "limit": PAGE_ROWS})
        for row in rows:
            report.count_checked(CHECK)
            for text in _find_faults(connection, memory, row, computed):
                report.add_violation(CHECK, text, name, row[2] or "")
        if len(rows) < PAGE_ROWS:
            return
        low, after = rows[-1][0], rows[-1][1]


def _find_faults(connection: Connection, memory: Row[Any], row: list[Any], computed: Collection[str]) -> list[str]:
    _, replaced, id_, event, payload, terms, model, vector_bytes = row
    if id_ is None:
        return [f"a version that revision {replaced} replaced has no fragment"]
    found = []
    try:
        fragment = codec.decode_fragment(payload, 0, 0)
        codec.decode_terms(terms)
        if fragment.id != id_:
            found.append(f"its version {replaced} is of the fragment {fragment.id}")
        if fragment.version >= replaced:
            found.append(f"its version {replaced} was written at revision {fragment.version}")
    except (JournalError, ValueError) as error:
        found.append(f"its version {replaced} cannot be read: {error}")
    if vector_bytes is not None and not has_valid_length(vector_bytes, None, computed=model in computed):
        found.append(f"the vector of its version {replaced} has {vector_bytes} bytes")
    if replaced > memory.revision:
        found.append(f"its version {replaced} is above the memory's revision")
    elif not _is_logged(connection, row_key(memory.number, replaced), id_, event):
        found.append(f"its version {replaced} was replaced ({event}), and the events of that revision do not say so")
    return found


def _is_logged(connection: Connection, key: int, fragment: str, event: str) -> bool:
    """Whether the log has that event; true if it no longer has the revision."""
    payload = connection.execute(_EVENTS, {"key": key}).scalar_one_or_none()
    if payload is None:
        return True
    try:
        return any(one.fragment == fragment and one.type is EventType(event) for one in codec.decode_events(payload))
    except (JournalError, ValueError):
        return False
