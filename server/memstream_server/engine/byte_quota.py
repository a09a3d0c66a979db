"""The quotas of stored bytes of a namespace: what is refused once they are used up.

The journal counts what is stored. A write that stores content is refused once its namespace has reached its quota; the
write that reaches it is taken whole, so the excess is what was in flight. Reads, and what removes or marks, go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstream_server.engine.errors import NOT_READ, QUOTA_RETRY_S, JournalUnavailable, QuotaExceeded
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import NamespaceBytes

if TYPE_CHECKING:
    from memstream_server.engine.settings import Limits
    from memstream_server.ports.journal.port import Journal


async def check_bytes(journal: Journal, limits: Limits, namespace: str, *staged: str) -> None:
    """Raises QuotaExceeded if the namespace may store no more, JournalUnavailable if that cannot be read.

    staged: names under which unpublished parts count (`staged_name`).
    """
    if (full := await find_full(journal, limits, namespace, *staged)) is not None:
        raise full


async def find_full(journal: Journal, limits: Limits, namespace: str, *staged: str) -> QuotaExceeded | None:
    """The error for a write that stores content; None if it may. Without a quota nothing is read."""
    most = limits.namespace_bytes_max
    if not most:
        return None
    stored = await _read_bytes(journal, namespace, *staged)
    used = sum(one.total for one in stored.values())
    return None if used < most else _quota_error(namespace, "namespace_bytes_max", most, "delete, erase or purge some")


async def find_receipts_full(journal: Journal, limits: Limits, namespace: str) -> QuotaExceeded | None:
    """The error for a recall that asks for a receipt; None if one may be kept."""
    most, of_all = limits.namespace_receipts_bytes_max, limits.namespace_bytes_max
    if not (most or of_all):
        return None
    used = (await _read_bytes(journal, namespace)).get(namespace, NamespaceBytes())
    if most and used.receipts >= most:
        remedy = "lower history.receipts of its memories"
        return _quota_error(namespace, "namespace_receipts_bytes_max", most, remedy, " of receipts")
    if of_all and used.total >= of_all:
        return _quota_error(namespace, "namespace_bytes_max", of_all, "delete, erase or purge some")
    return None


async def _read_bytes(journal: Journal, *names: str) -> dict[str, NamespaceBytes]:
    try:
        return await journal.read_bytes(names)
    except JournalError as error:
        raise JournalUnavailable(NOT_READ, retry_after_s=0.5) from error


def _quota_error(namespace: str, quota: str, most: int, remedy: str, kind: str = "") -> QuotaExceeded:
    return QuotaExceeded(
        f"namespace {namespace} has reached its quota of {most} stored bytes{kind}: {remedy}",
        retry_after_s=QUOTA_RETRY_S,
        quota=quota,
        limit=most,
    )
