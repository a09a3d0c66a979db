"""Event replay: the place of every fragment of a memory, from its events alone.

A replay of all events equals the places read from the tiers and the long-term listing (`place_of`), except for
access statistics. A watcher that replays events needs no other reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import isclose

from memstream_server.core.events import Event, EventType
from memstream_server.core.values import Enhancement, Fragment, FragmentKind, Tier


@dataclass(frozen=True, slots=True)
class Place:
    """What the events say about one fragment that is present, or forgotten and restorable."""

    tier: Tier
    importance: float
    kind: FragmentKind = FragmentKind.OBSERVATION
    enhancements: tuple[str, ...] = ()
    """Ids of its enhancers while it is held; a promotion moves them to `sources`."""
    enhancement_count: int = 0
    """Hits and repeats; kept after a promotion."""
    duplicate_count: int = 0
    sources: tuple[str, ...] = ()
    forgotten: bool = False
    superseded_by: str = ""


def place_of(fragment: Fragment, enhancements: Iterable[Enhancement] = ()) -> Place:
    """The place of a fragment in the state or a listing; `enhancements` of a held fragment."""
    return Place(
        tier=fragment.tier,
        importance=fragment.importance,
        kind=fragment.kind,
        enhancements=tuple(done.id for done in enhancements),
        enhancement_count=fragment.enhancement_count,
        duplicate_count=fragment.duplicate_count,
        sources=fragment.sources,
        forgotten=fragment.forget_time_us is not None,
        superseded_by=fragment.superseded_by,
    )


def fold_all(events: Iterable[Event]) -> dict[str, Place]:
    """Places by fragment id after all `events`, beginning with the memory's first."""
    places: dict[str, Place] = {}
    for event in events:
        fold_event(places, event)
    return places


GONE = frozenset({EventType.FILTERED, EventType.DROPPED, EventType.MERGED, EventType.ERASED})
"""These remove the fragment."""
_ELSEWHERE = frozenset(
    {
        EventType.ECHOED,
        EventType.MODEL_ASKED,
        EventType.MEMORY_CREATED,
        EventType.MEMORY_UPDATED,
        EventType.CONFLICT_SUSPECTED,
        EventType.CONFLICT_RESOLVED,
        EventType.CONFLICT_ENDED,
        EventType.RECALLED,
    }
)
"""These concern the memory, or a fragment that may be removed by now: they change no place."""


def fold_event(places: dict[str, Place], event: Event) -> None:
    """Apply the next event, in place. Raises KeyError if earlier events of the fragment are missing."""
    if event.type in (EventType.OBSERVED, EventType.REFLECTED, EventType.IMPORTED):
        places[event.fragment] = _new_place(event)
        return
    if event.type is EventType.MERGED:
        places[event.other] = _apply_attributes(places[event.other], event)
    if event.type in GONE:
        del places[event.fragment]
    elif event.type not in _ELSEWHERE:
        places[event.fragment] = _apply_move(places[event.fragment], event)


def fold_known(places: dict[str, Place], event: Event) -> None:
    """As `fold`, for a log whose beginning was pruned: ignores events of fragments from before it."""
    if event.type in (EventType.OBSERVED, EventType.REFLECTED):
        places[event.fragment] = _new_place(event)
        return
    if event.type is EventType.MERGED and event.other in places:
        places[event.other] = _apply_attributes(places[event.other], event)
    if event.type in GONE:
        places.pop(event.fragment, None)
    elif event.type not in _ELSEWHERE and event.fragment in places:
        places[event.fragment] = _apply_move(places[event.fragment], event)


def list_differences(told: Place, listed: Place) -> list[str]:
    """Descriptions of the fields in which a replay and a listing differ; importances are compared to 1e-6."""
    return [
        f"{item.name} is {_field_text(there)}, its events say {_field_text(said)}"
        for item in fields(Place)
        if not _is_same(said := getattr(told, item.name), there := getattr(listed, item.name))
    ]


def _is_same(said: object, there: object) -> bool:
    if isinstance(said, float) and isinstance(there, float):
        return isclose(said, there, rel_tol=0, abs_tol=1e-6)
    return said == there


def _field_text(value: object) -> str:
    return (" ".join(value) or "nothing") if isinstance(value, tuple) else str(value)


def _new_place(event: Event) -> Place:
    if event.to_tier is None or event.importance is None:
        raise ValueError(f"{event.type} of {event.fragment} lacks its tier or importance")
    if event.imported is not None:
        had = event.imported
        return Place(
            tier=event.to_tier,
            importance=event.importance,
            kind=had.kind,
            enhancements=had.enhancements,
            enhancement_count=had.enhancement_count,
            duplicate_count=had.duplicate_count,
            sources=event.sources,
            forgotten=had.forgotten,
        )
    kind = FragmentKind.INSIGHT if event.type is EventType.REFLECTED else FragmentKind.OBSERVATION
    return Place(tier=event.to_tier, importance=event.importance, kind=kind, sources=event.sources)


def _apply_attributes(place: Place, event: Event) -> Place:
    importance = place.importance if event.importance is None else event.importance
    return replace(place, importance=importance, sources=event.sources or place.sources)


def _apply_move(place: Place, event: Event) -> Place:
    match event.type:
        case EventType.ADMITTED:
            return replace(place, tier=event.to_tier or place.tier)
        case EventType.RESTORED:
            return replace(place, tier=event.to_tier or place.tier, forgotten=False)
        case EventType.ENHANCED:
            return _with_enhancements(place, (*place.enhancements, event.other))
        case EventType.WEAKENED:
            return _without_enhancement(place, event.other)
        case EventType.REPEATED:
            return replace(
                place, duplicate_count=place.duplicate_count + 1, enhancement_count=place.enhancement_count + 1
            )
        case EventType.PROMOTED:
            return replace(_apply_attributes(place, event), tier=event.to_tier or place.tier, enhancements=())
        case EventType.UPDATED | EventType.RATED:
            return _apply_attributes(place, event)
        case EventType.FORGOTTEN:
            return _forget_place(place)
        case EventType.SUPERSEDED:
            return replace(place, superseded_by=event.other)
        case EventType.SUPERSESSION_UNDONE:
            return replace(place, superseded_by="")
        case _:
            return place


def _with_enhancements(place: Place, enhancements: tuple[str, ...]) -> Place:
    return replace(place, enhancements=enhancements, enhancement_count=len(enhancements) + place.duplicate_count)


def _without_enhancement(place: Place, other: str) -> Place:
    """Remove an enhancement from a held fragment, or the corresponding source from a promoted one."""
    if other in place.enhancements:
        return _with_enhancements(place, tuple(id_ for id_ in place.enhancements if id_ != other))
    sources = tuple(id_ for id_ in place.sources if id_ != other)
    return replace(place, sources=sources, enhancement_count=max(0, place.enhancement_count - 1))


def _forget_place(place: Place) -> Place:
    """Forgetting removes the enhancements of a held fragment; a long-term fragment keeps its count."""
    left = place if place.tier is Tier.LONG_TERM else _with_enhancements(place, ())
    return replace(left, forgotten=True)
