"""`memstream verify`: checks the receipts of recalls of a memory against its event log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Row, bindparam, select

from memstream_server.adapters.journal.sql import codec
from memstream_server.adapters.journal.sql.schema import events, key_position, key_range, recall_receipts
from memstream_server.core.events import EventType
from memstream_server.ports.journal.errors import JournalError

if TYPE_CHECKING:
    from memstream_server.adapters.journal.verify.report import Report

CHECK = "recall_receipts"
_RECEIPTS = (
    select(recall_receipts.c.key, recall_receipts.c.id, recall_receipts.c.payload, events.c.payload)
    .outerjoin(events, events.c.key == recall_receipts.c.key)
    .where(recall_receipts.c.key.between(bindparam("low"), bindparam("high")))
    .order_by(recall_receipts.c.key)
)


def check_recall_receipts(connection: Connection, memory: Row[Any], name: str, report: Report) -> None:
    """Each must be readable, of an earlier revision, and named by the RECALLED of its revision. Raises DBAPIError."""
    low, high = key_range(memory.number)
    for key, id_, payload, logged in connection.execute(_RECEIPTS, {"low": low, "high": high}):
        report.count_checked(CHECK)
        for text in _find_faults(key_position(key), id_, payload, logged, memory.revision):
            report.add_violation(CHECK, f"the receipt {id_} {text}", name)


def _find_faults(written: int, id_: str, payload: bytes, logged: bytes | None, revision: int) -> list[str]:
    """`logged`: the events of the revision that wrote it; None if the log no longer has it."""
    try:
        receipt = codec.decode_recall_receipt(payload)
        happened = () if logged is None else codec.decode_events(logged)
    except (JournalError, ValueError) as error:
        return [f"cannot be read: {error}"]
    found = []
    if receipt.id != id_:
        found.append(f"says that it is {receipt.id}")
    if written > revision:
        found.append("is above the memory's revision")
    if receipt.revision >= written:
        found.append(f"ranks revision {receipt.revision}, and was written by revision {written}")
    if logged is not None and not any(one.type is EventType.RECALLED and one.receipt == id_ for one in happened):
        found.append("is not named by an event of its revision")
    if not {one.id for one in receipt.ranking}.issuperset(receipt.erased):
        found.append("marks a fragment as erased that it does not rank")
    return found
