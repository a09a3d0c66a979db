"""What happened to a memory after its image was written: whether the image may be used, and the rows that it lacks.

Rule 1. No other process has owned the memory since (`Images.read`): all later commits are of this process.
Rule 2. An image is of this history if the log has the commit of its revision, with its time, or was pruned up to it.
Rule 3. No row is applied to an image that holds what a later commit replaced or removed: a commit removes such an image
before (`outdates_image`).
Rule 4. A commit's events name each fragment that the commit writes, or the fragment is linked by supersession to one
that they name.
Rule 5. Content or attributes of a fragment are replaced only by an event that `replaced_by` returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from memstream_server.core.events import Event, EventType
from memstream_server.core.supersession import Links
from memstream_server.ports.images import Image, Images
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import Changes
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.journal.rows import RowBlock
from memstream_server.ports.journal.writing import Commit

if TYPE_CHECKING:
    from memstream_server.core.columns import Columns


CHANGED_MIN, CHANGED_SHARE = 64, 8
"""More changed fragments than this number, and than one in so many of the image: loading the rows is as fast."""
COMMITS_PER_CHANGE = 4
"""So many times as many commits may have made the changes; reading the log takes time too."""

_NO_LINKS = Links()
_REPLACE = frozenset({EventType.FILTERED, EventType.DROPPED, EventType.MERGED, EventType.ERASED, EventType.UPDATED})


def read_changes(image: Image, links: Links, record: MemoryRecord, changes: Changes) -> list[RowBlock] | None:
    """The fragments that differ from the image, by position. None if the image cannot be used."""
    key, ids = image.key, image.parts.values["ids"]
    most = max(CHANGED_MIN, len(ids) // CHANGED_SHARE)
    later = record.revision - key.revision
    if not 0 <= later <= COMMITS_PER_CHANGE * most:
        return None
    if later == 0:
        return [] if changes.time_us in (0, key.time_us) else None
    log = changes.read_log(key.revision, later + 1)
    if len(log) <= later or (log[0].revision, log[0].time_us) != (key.revision, key.time_us):
        return None
    events = [event for one in log[1:] for event in one.events]
    if erases(events) or not replaced_by(events).isdisjoint(ids):
        return None
    changed = changed_by(events, links)
    return list(changes.read_blocks(changed)) if len(changed) <= most else None


def outdates_image(commit: Commit, columns: Columns, image_count: int) -> bool:
    """Whether the memory's image, of the first `image_count` slots, holds what the commit replaces or removes, or
    whether the commit's events do not name all that it writes.
    """
    if commit.erased or erases(commit.events):
        return True
    gone = {*commit.removed, *commit.forgotten_versions, *(one.fragment for one in commit.replaced)}
    gone |= replaced_by(commit.events) | {row.fragment.id for row in commit.rows if row.replaces}
    if any((slot := columns.slot(id_)) is not None and slot < image_count for id_ in gone):
        return True
    return not {row.fragment.id for row in commit.rows} <= changed_by(commit.events, _NO_LINKS)


async def drop_outdated_images(images: Images, journal: Journal) -> None:
    """Remove the images of memories that are gone, or that another process has owned since: it may have erased what
    they hold. Raises JournalError.
    """
    held = images.list_epochs()
    epochs = await journal.read_epochs(list(held)) if held else {}
    for memory, epoch in held.items():
        if epochs.get(memory) != epoch:
            images.drop(memory, epoch)


def replaced_by(events: Iterable[Event]) -> set[str]:
    """Ids of the fragments that left, or of which something was replaced."""
    return {event.fragment for event in events if event.type in _REPLACE or _may_merge(event)}


def erases(events: Iterable[Event]) -> bool:
    """Whether something left for good by request, or after the grace period."""
    return any(event.type is EventType.ERASED for event in events)


def changed_by(events: Iterable[Event], links: Links) -> set[str]:
    """Ids of the fragments whose rows may have changed; some are of no fragment. `links`: those before the events."""
    named = {id_ for event in events for id_ in (event.fragment, event.other) if id_}
    return links.connected(named)


def _may_merge(event: Event) -> bool:
    return event.type is EventType.PROMOTED and event.merges is not False
