"""The quota of fragments per memory: which observations are admitted.

Every kept fragment counts, including forgotten ones, and every waiting observation counts as a new fragment. An
observation that updates an existing external id adds nothing and is always admitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memstream_server.engine.errors import QUOTA_RETRY_S, BacklogFull, QuotaExceeded
from memstream_server.engine.requests import NewObservation, Refusal

if TYPE_CHECKING:
    from memstream_server.engine.memory.working_set import WorkingSet

_RESOURCE_EXHAUSTED = 8
"""The google.rpc.Code RESOURCE_EXHAUSTED."""
_WAIT_S = 0.1


def refuse_excess(
    items: Sequence[NewObservation | Refusal], working: WorkingSet, waiting: int, most: int
) -> Sequence[NewObservation | Refusal]:
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
    return list(_refuse_beyond(items, new, max(0, room), quota_error(most)))


def refuse_all(items: Sequence[NewObservation | Refusal], error: QuotaExceeded) -> list[NewObservation | Refusal]:
    """All items refused, updates too: the namespace may store no more."""
    return [item if isinstance(item, Refusal) else _refuse(item, error) for item in items]


def quota_error(most: int) -> QuotaExceeded:
    """The error for an observation beyond the quota."""
    return QuotaExceeded(
        f"the memory has reached its quota of {most} fragments: erase some, or clear a tier",
        retry_after_s=QUOTA_RETRY_S,
        quota="memory_fragments_max",
        limit=most,
    )


def _find_additions(items: Sequence[NewObservation | Refusal], working: WorkingSet) -> Iterator[bool]:
    """For each item, whether it may become a new fragment."""
    said: set[str] = set()
    for item in items:
        if isinstance(item, Refusal):
            yield False
            continue
        key = item.external_id
        yield not key or (key not in said and not working.id_of(key))
        said.add(key)


def _refuse_beyond(
    items: Sequence[NewObservation | Refusal], new: Sequence[bool], room: int, error: QuotaExceeded
) -> Iterator[NewObservation | Refusal]:
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


def _refuse(item: NewObservation, error: QuotaExceeded) -> Refusal:
    return Refusal(_RESOURCE_EXHAUSTED, error.reason, error.message, item.digest, error.details)
