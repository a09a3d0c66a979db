"""The quota of a memory's fragments: which observations it still takes.

Every fragment counts that is kept, forgotten ones too, and what waits to be stored as if each of it became one. An
observation that says anew what its external id names adds nothing, and is always taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memstream_server.engine.errors import QUOTA_RETRY_S, BacklogFull, QuotaExceeded
from memstream_server.engine.requests import NewObservation, Refusal

if TYPE_CHECKING:
    from memstream_server.engine.memory.working_set import WorkingSet

_RESOURCE_EXHAUSTED = 8
"""The google.rpc.Code."""
_WAIT_S = 0.1


def fitting(
    items: Sequence[NewObservation | Refusal], working: WorkingSet, waiting: int, most: int
) -> Sequence[NewObservation | Refusal]:
    """`items` as they are, or in a new list those there is no room for refused; `waiting` are received and not stored.

    Raises BacklogFull while it is not known whether there is room: what waits may turn out to add nothing.
    """
    room = most - working.fragments
    new = list(_adding(items, working))
    if not any(new) or sum(new) <= room - waiting:
        return items
    if room > 0 and waiting:
        raise BacklogFull(
            f"the memory has room for {room} fragments, and {waiting} observations wait to be stored",
            retry_after_s=_WAIT_S,
        )
    return list(_refusing(items, new, max(0, room), full(most)))


def full(most: int) -> QuotaExceeded:
    """What is said of an observation beyond the quota."""
    return QuotaExceeded(
        f"the memory holds {most} fragments, the most that are allowed: erase some, or clear a tier",
        retry_after_s=QUOTA_RETRY_S,
        quota="memory_fragments_max",
        limit=most,
    )


def _adding(items: Sequence[NewObservation | Refusal], working: WorkingSet) -> Iterator[bool]:
    """Of each item whether it may become a fragment of its own."""
    said: set[str] = set()
    for item in items:
        if isinstance(item, Refusal):
            yield False
            continue
        key = item.external_id
        yield not key or (key not in said and not working.id_of(key))
        said.add(key)


def _refusing(
    items: Sequence[NewObservation | Refusal], new: Sequence[bool], room: int, error: QuotaExceeded
) -> Iterator[NewObservation | Refusal]:
    refused: set[str] = set()
    for item, adds in zip(items, new, strict=True):
        # What is said anew of a refused one would be the first of its external id.
        if isinstance(item, NewObservation) and (adds or item.external_id in refused):
            if room:
                room -= 1
            else:
                refused.update({item.external_id} - {""})
                item = Refusal(_RESOURCE_EXHAUSTED, error.reason, error.message, item.digest, error.details)
        yield item
