"""Folding events step by step, and what it refuses."""

from __future__ import annotations

import pytest

from memstream_server.core.events import Event, EventType, Reason
from memstream_server.core.replay_events import Place, fold_all
from memstream_server.core.values import FragmentKind, Tier

OBSERVED = Event(EventType.OBSERVED, "a", to_tier=Tier.SHORT_TERM, importance=0.5)
OTHER = Event(EventType.OBSERVED, "b", to_tier=Tier.SHORT_TERM, importance=0.5)


def test_hits_come_and_go() -> None:
    hit = Event(EventType.ENHANCED, "a", other="b", cosine=0.9)
    assert fold_all([OBSERVED, OTHER, hit])["a"].enhancements == ("b",)
    taken_back = Event(EventType.WEAKENED, "a", other="b")
    assert fold_all([OBSERVED, OTHER, hit, taken_back])["a"].enhancement_count == 0


def test_a_forgotten_held_fragment_keeps_its_repeats_only() -> None:
    events = [
        OBSERVED,
        OTHER,
        Event(EventType.ENHANCED, "a", other="b", cosine=0.9),
        Event(EventType.REPEATED, "a", other="c"),
        Event(EventType.FORGOTTEN, "a", from_tier=Tier.SHORT_TERM, reason=Reason.REQUESTED),
    ]
    place = Place(Tier.SHORT_TERM, 0.5, enhancement_count=1, duplicate_count=1, forgotten=True)
    assert fold_all(events)["a"] == place


def test_an_insight_takes_over_what_merges_into_it() -> None:
    events = [
        Event(EventType.REFLECTED, "i", to_tier=Tier.LONG_TERM, importance=0.5, sources=("a",)),
        Event(EventType.REFLECTED, "j", to_tier=Tier.LONG_TERM, importance=0.9, sources=("b",)),
        Event(EventType.MERGED, "j", other="i", cosine=0.97, importance=0.9, sources=("a", "b")),
    ]
    place = Place(Tier.LONG_TERM, 0.9, kind=FragmentKind.INSIGHT, sources=("a", "b"))
    assert fold_all(events) == {"i": place}


def test_events_of_the_memory_and_echoes_move_nothing() -> None:
    events = [Event(EventType.MEMORY_CREATED, ""), OBSERVED, Event(EventType.ECHOED, "gone", other="c")]
    assert fold_all(events) == {"a": Place(Tier.SHORT_TERM, 0.5)}


def test_events_without_their_beginning_are_refused() -> None:
    with pytest.raises(KeyError):
        fold_all([Event(EventType.ADMITTED, "a", from_tier=Tier.SENSORY, to_tier=Tier.SHORT_TERM)])
    with pytest.raises(ValueError, match="lacks"):
        fold_all([Event(EventType.OBSERVED, "a")])
