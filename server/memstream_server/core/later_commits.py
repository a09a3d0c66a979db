"""What the log says about the commits after an image: which fragments differ from it, and which it must not hold.

Rule 1. A commit's events name each fragment that the commit writes, or the fragment is linked by supersession to one
that they name.
Rule 2. Content or attributes of a fragment are replaced only by an event that `replaced_by` returns.
"""

from __future__ import annotations

from collections.abc import Iterable

from memstream_server.core.events import Event, EventType
from memstream_server.core.supersession import Links

_REPLACE = frozenset({EventType.FILTERED, EventType.DROPPED, EventType.MERGED, EventType.ERASED, EventType.UPDATED})


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
