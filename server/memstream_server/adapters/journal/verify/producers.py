"""`memstream verify`: checks a memory's producers, their receipts and the receipts that are not yet stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Connection, Row, bindparam, func, select

from memstream_server.adapters.journal.sql import codec
from memstream_server.adapters.journal.sql.bulk import PAGE_ROWS, fetch_pages, fetch_rows
from memstream_server.adapters.journal.sql.schema import key_position, key_range, observations, producers, receipts
from memstream_server.adapters.journal.sql.writes import SEQUENCES_KEPT
from memstream_server.ports.journal.errors import JournalError

if TYPE_CHECKING:
    from memstream_server.adapters.journal.verify.report import Report

_PRODUCERS = select(producers.c.name, producers.c.received, producers.c.stored).where(
    producers.c.memory == bindparam("number")
)
_RECEIPTS = (
    select(receipts.c.first_sequence, receipts.c.last_sequence, func.length(receipts.c.hashes, type_=BigInteger))
    .where(
        receipts.c.memory == bindparam("number"),
        receipts.c.producer == bindparam("producer"),
        receipts.c.last_sequence > bindparam("after"),
    )
    .order_by(receipts.c.last_sequence)
    .limit(PAGE_ROWS)
)
_STRANGERS = (
    select(receipts.c.producer)
    .where(
        receipts.c.memory == bindparam("number"),
        receipts.c.producer.not_in(select(producers.c.name).where(producers.c.memory == bindparam("number"))),
    )
    .distinct()
)
_PENDING = (
    select(
        observations.c.key,
        observations.c.producer,
        observations.c.first_sequence,
        observations.c.count,
        observations.c.payload,
    )
    .where(observations.c.key.between(bindparam("low"), bindparam("high")))
    .order_by(observations.c.key)
    .limit(bindparam("limit", type_=BigInteger))
)


def check_producers(
    connection: Connection, memory: Row[Any], name: str, report: Report, *, is_erased: bool = False
) -> None:
    """Raises DBAPIError and JournalError for unreadable rows.

    is_erased: an erasure may have removed the receipts of stored observations, whose hashes are traces of their words.
    """
    known: dict[str, tuple[int, int]] = {}
    for producer, received, stored in connection.execute(_PRODUCERS, {"number": memory.number}):
        known[producer] = received, stored
        report.count_checked("producers")
        if not 0 <= stored <= received:
            report.add_violation("producers", f"producer {producer} has {received} received and {stored} stored", name)
        removable = stored if is_erased else 0
        _check_receipts(connection, memory.number, producer, (received, removable), name, report)
    for stranger in connection.execute(_STRANGERS, {"number": memory.number}).scalars():
        report.add_violation(
            "receipts", f"there are receipts of {stranger}, which is not a producer of this memory", name
        )
    _check_pending(connection, memory, known, name, report)


def _check_receipts(
    connection: Connection, number: int, producer: str, reached: tuple[int, int], name: str, report: Report
) -> None:
    """Receipts detect repeats: those of the latest SEQUENCES_KEPT numbers must exist.

    reached: (last number received, last number whose receipt may have been removed by an erasure).
    """
    received, removable = reached
    last = begun = 0
    more = True
    while more:
        rows = fetch_rows(connection, _RECEIPTS, {"number": number, "producer": producer, "after": last})
        for first, final, hashed in rows:
            report.count_checked("receipts")
            begun = begun or first
            if last and first != last + 1:
                report.add_violation("receipts", f"producer {producer}: {first} follows {last}", name)
            if hashed != (final - first + 1) * codec.HASH_WIDTH:
                text = f"producer {producer}: {first} to {final} has {hashed} bytes of hashes"
                report.add_violation("receipts", text, name)
            last = final
        more = len(rows) == PAGE_ROWS
    if last != received and not (last == 0 and removable == received):
        report.add_violation("receipts", f"producer {producer}: receipts end at {last}, {received} were received", name)
    if begun > max(1, received - SEQUENCES_KEPT + 1, removable + 1):
        report.add_violation(
            "receipts", f"producer {producer}: receipts begin at {begun}, later ones than must be kept", name
        )


def _check_pending(
    connection: Connection, memory: Row[Any], known: dict[str, tuple[int, int]], name: str, report: Report
) -> None:
    for key, producer, first, count, payload in fetch_pages(connection, _PENDING, *key_range(memory.number)):
        report.count_checked("pending")
        where = f"the receipt at position {key_position(key)}"
        try:
            receipt = codec.decode_receipt(payload)
        except JournalError as error:
            report.add_violation("pending", f"{where} cannot be read: {error}", name)
            continue
        if (receipt.producer, receipt.first_sequence) != (producer, first) or len(receipt.fragments) != count:
            report.add_violation("pending", f"{where} differs from its columns", name)
        if receipt.position != key_position(key):
            report.add_violation("pending", f"{where} has position {receipt.position} in its record", name)
        if any(one.position >= memory.next_position for one in receipt.fragments):
            report.add_violation("pending", f"{where} has positions that are not assigned yet", name)
        if not producer:
            continue
        if producer not in known:
            report.add_violation(
                "pending", f"{where} belongs to {producer}, which is not a producer of this memory", name
            )
            continue
        received, stored = known[producer]
        last = receipt.last_sequence
        if last > received or last <= stored:
            text = f"{where} has {first} to {last} of {producer}, which has {received} received and {stored} stored"
            report.add_violation("pending", text, name)
