"""Folding events: where every fragment of a memory is, from its events alone.

What folds out of all events of a memory equals what its tiers and its long-term listing give (`place_of`),
access statistics excepted. A watcher that keeps places needs no other reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from memstream_server.core.events import Event, EventType
from memstream_server.core.values import Enhancement, Fragment, FragmentKind, Tier


@dataclass(frozen=True, slots=True)
class Place:
    """What events tell about one fragment that is still there (or forgotten, and restorable)."""

    tier: Tier
    importance: float
    kind: FragmentKind = FragmentKind.OBSERVATION
    enhancements: tuple[str, ...] = ()
    """Ids of its enhancers while it is held; once promoted they are among `sources`."""
    enhancement_count: int = 0
    """Hits and repeats; stays after promotion."""
    duplicate_count: int = 0
    sources: tuple[str, ...] = ()
    forgotten: bool = False


def place_of(fragment: Fragment, enhancements: Iterable[Enhancement] = ()) -> Place:
    """The place of a fragment as the state or a listing has it; `enhancements` are those of a held one."""
    return Place(
        tier=fragment.tier,
        importance=fragment.importance,
        kind=fragment.kind,
        enhancements=tuple(done.id for done in enhancements),
        enhancement_count=fragment.enhancement_count,
        duplicate_count=fragment.duplicate_count,
        sources=fragment.sources,
        forgotten=fragment.forget_time_us is not None,
    )


def fold_all(events: Iterable[Event]) -> dict[str, Place]:
    """Places by fragment id after all `events`, which begin with the memory's first."""
    places: dict[str, Place] = {}
    for event in events:
        fold(places, event)
    return places


_GONE = frozenset({EventType.FILTERED, EventType.DROPPED, EventType.MERGED, EventType.ERASED})
_ELSEWHERE = frozenset({EventType.ECHOED, EventType.MODEL_ASKED, EventType.MEMORY_CREATED, EventType.MEMORY_UPDATED})
"""Tell of the memory, or of a fragment that may be gone by now: they move none."""


def fold(places: dict[str, Place], event: Event) -> None:
    """Apply the next event, in place. Raises KeyError on one whose predecessors are missing."""
    if event.type in (EventType.OBSERVED, EventType.REFLECTED):
        places[event.fragment] = _new(event)
        return
    if event.type is EventType.MERGED:
        places[event.other] = _told(places[event.other], event)
    if event.type in _GONE:
        del places[event.fragment]
    elif event.type not in _ELSEWHERE:
        places[event.fragment] = _moved(places[event.fragment], event)


def _new(event: Event) -> Place:
    if event.to_tier is None or event.importance is None:
        raise ValueError(f"{event.type} of {event.fragment} lacks its tier or importance")
    kind = FragmentKind.INSIGHT if event.type is EventType.REFLECTED else FragmentKind.OBSERVATION
    return Place(tier=event.to_tier, importance=event.importance, kind=kind, sources=event.sources)


def _told(place: Place, event: Event) -> Place:
    importance = place.importance if event.importance is None else event.importance
    return replace(place, importance=importance, sources=event.sources or place.sources)


def _moved(place: Place, event: Event) -> Place:
    match event.type:
        case EventType.ADMITTED:
            return replace(place, tier=event.to_tier or place.tier)
        case EventType.RESTORED:
            return replace(place, tier=event.to_tier or place.tier, forgotten=False)
        case EventType.ENHANCED:
            return _counted(place, (*place.enhancements, event.other))
        case EventType.WEAKENED:
            return _counted(place, tuple(id_ for id_ in place.enhancements if id_ != event.other))
        case EventType.REPEATED:
            again = replace(place, duplicate_count=place.duplicate_count + 1)
            return _counted(again, place.enhancements)
        case EventType.PROMOTED:
            return replace(_told(place, event), tier=event.to_tier or place.tier, enhancements=())
        case EventType.UPDATED | EventType.RATED:
            return _told(place, event)
        case EventType.FORGOTTEN:
            return _forgotten(place)
        case _:
            return place


def _counted(place: Place, enhancements: tuple[str, ...]) -> Place:
    return replace(place, enhancements=enhancements, enhancement_count=len(enhancements) + place.duplicate_count)


def _forgotten(place: Place) -> Place:
    """A held fragment loses its enhancements when it is forgotten; one in long-term keeps its count."""
    left = place if place.tier is Tier.LONG_TERM else _counted(place, ())
    return replace(left, forgotten=True)
