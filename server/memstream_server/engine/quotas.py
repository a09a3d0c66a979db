"""Quotas: what is refused once a namespace's bytes or a memory's fragments are used up.

Rule 1. The journal counts the bytes. A write that stores content is refused once its namespace has reached its quota;
the write that reaches it is taken whole, so the excess is what was in flight. Reads, and what removes or marks, go on.
Rule 2. Every kept fragment counts, including forgotten ones, and every waiting observation counts as a new fragment. An
observation that updates an existing external id adds nothing and is always admitted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memstream_server.engine.errors import NOT_READ, QUOTA_RETRY_S, BacklogFull, JournalUnavailable, QuotaExceeded
from memstream_server.engine.requests import NewObservation, RejectedObservation
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import NamespaceBytes

if TYPE_CHECKING:
    from memstream_server.engine.memory.producers import Producers
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.settings import EngineLimits
    from memstream_server.ports.journal.port import Journal


_RESOURCE_EXHAUSTED = 8
"""The google.rpc.Code RESOURCE_EXHAUSTED."""
_WAIT_S = 0.1


async def check_bytes(journal: Journal, limits: EngineLimits, namespace: str, *staged: str) -> None:
    """Raises QuotaExceeded if the namespace may store no more, JournalUnavailable if that cannot be read.

    staged: names under which unpublished parts count (`staged_name`).
    """
    if (full := await find_full(journal, limits, namespace, *staged)) is not None:
        raise full


async def find_full(journal: Journal, limits: EngineLimits, namespace: str, *staged: str) -> QuotaExceeded | None:
    """The error for a write that stores content; None if it may. Without a quota nothing is read."""
    most = limits.namespace_bytes_max
    if not most:
        return None
    stored = await _read_bytes(journal, namespace, *staged)
    used = sum(one.total for one in stored.values())
    return None if used < most else _bytes_error(namespace, "namespace_bytes_max", most, "delete, erase or purge some")


async def find_receipts_full(journal: Journal, limits: EngineLimits, namespace: str) -> QuotaExceeded | None:
    """The error for a recall that asks for a receipt; None if one may be kept."""
    most, of_all = limits.namespace_receipts_bytes_max, limits.namespace_bytes_max
    if not (most or of_all):
        return None
    used = (await _read_bytes(journal, namespace)).get(namespace, NamespaceBytes())
    if most and used.receipts >= most:
        remedy = "lower history.receipts of its memories"
        return _bytes_error(namespace, "namespace_receipts_bytes_max", most, remedy, " of receipts")
    if of_all and used.total >= of_all:
        return _bytes_error(namespace, "namespace_bytes_max", of_all, "delete, erase or purge some")
    return None


async def _read_bytes(journal: Journal, *names: str) -> dict[str, NamespaceBytes]:
    try:
        return await journal.read_bytes(names)
    except JournalError as error:
        raise JournalUnavailable(NOT_READ, retry_after_s=0.5) from error


def _bytes_error(namespace: str, quota: str, most: int, remedy: str, kind: str = "") -> QuotaExceeded:
    return QuotaExceeded(
        f"namespace {namespace} has reached its quota of {most} stored bytes{kind}: {remedy}",
        retry_after_s=QUOTA_RETRY_S,
        quota=quota,
        limit=most,
    )


def refuse_excess(
    items: Sequence[NewObservation | RejectedObservation], working: WorkingSet, waiting: int, most: int
) -> Sequence[NewObservation | RejectedObservation]:
    """`items` unchanged, or a new list in which those beyond the quota are refused. `waiting`: received and not yet
    stored.

    Raises BacklogFull if the result depends on waiting observations, which may add nothing.
    """
    room = most - working.fragment_count
    new = list(_find_additions(items, working))
    if not any(new) or sum(new) <= room - waiting:
        return items
    if room > 0 and waiting:
        raise BacklogFull(
            f"the memory's quota allows {room} more fragments, and {waiting} observations wait to be stored",
            retry_after_s=_WAIT_S,
        )
    return list(_refuse_beyond(items, new, max(0, room), fragments_error(most)))


@contextlib.contextmanager
def admit_puts(given: Sequence[NewObservation], working: WorkingSet, producers: Producers, most: int) -> Iterator[None]:
    """Admit observations that are stored without a receipt; they count towards the quota during the block."""
    if most and refuse_excess(given, working, producers.backlog + producers.puts, most) is not given:
        raise fragments_error(most)
    producers.puts += len(given)
    try:
        yield
    finally:
        producers.puts -= len(given)


def refuse_all(
    items: Sequence[NewObservation | RejectedObservation], error: QuotaExceeded
) -> list[NewObservation | RejectedObservation]:
    """All items refused, updates too: the namespace may store no more."""
    return [item if isinstance(item, RejectedObservation) else _refuse(item, error) for item in items]


def fragments_error(most: int) -> QuotaExceeded:
    """The error for an observation beyond the quota."""
    return QuotaExceeded(
        f"the memory has reached its quota of {most} fragments: erase some, or clear a tier",
        retry_after_s=QUOTA_RETRY_S,
        quota="memory_fragments_max",
        limit=most,
    )


def _find_additions(items: Sequence[NewObservation | RejectedObservation], working: WorkingSet) -> Iterator[bool]:
    """For each item, whether it may become a new fragment."""
    said: set[str] = set()
    for item in items:
        if isinstance(item, RejectedObservation):
            yield False
            continue
        key = item.external_id
        yield not key or (key not in said and not working.id_of(key))
        said.add(key)


def _refuse_beyond(
    items: Sequence[NewObservation | RejectedObservation], new: Sequence[bool], room: int, error: QuotaExceeded
) -> Iterator[NewObservation | RejectedObservation]:
    refused: set[str] = set()
    for item, adds in zip(items, new, strict=True):
        # After a refused one, an update of the same external id would become its first fragment.
        if isinstance(item, NewObservation) and (adds or item.external_id in refused):
            if room:
                room -= 1
            else:
                refused.update({item.external_id} - {""})
                item = _refuse(item, error)
        yield item


def _refuse(item: NewObservation, error: QuotaExceeded) -> RejectedObservation:
    return RejectedObservation(_RESOURCE_EXHAUSTED, error.reason, error.message, item.digest, error.details)
