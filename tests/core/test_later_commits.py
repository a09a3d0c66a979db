"""What the log says about commits after an image, and what the indexes of an image hold."""

from __future__ import annotations

import pytest

from memstream_server.core.columns import Columns
from memstream_server.core.events import Event, EventType
from memstream_server.core.identity import IdentityIndex
from memstream_server.core.replay_events import list_differences, place_of
from memstream_server.core.supersession import Links
from memstream_server.core.values import Fragment, Tier
from memstream_server.engine.memory.image_changes import changed_by, erases, replaced_by

REPLACING = {EventType.FILTERED, EventType.DROPPED, EventType.MERGED, EventType.ERASED, EventType.UPDATED}


@pytest.mark.parametrize("kind", EventType)
def test_events_that_replace_something_are_known(kind: EventType) -> None:
    event = Event(kind, "a")
    assert replaced_by([event]) == ({"a"} if kind in REPLACING | {EventType.PROMOTED} else set())
    assert erases([Event(EventType.PROMOTED, "b"), event]) is (kind is EventType.ERASED)


def test_promotion_without_a_merge_replaces_nothing() -> None:
    assert replaced_by([Event(EventType.PROMOTED, "a", merges=False)]) == set()
    assert replaced_by([Event(EventType.PROMOTED, "a", merges=True)]) == {"a"}


def test_linked_fragments_may_have_changed() -> None:
    links = Links()
    links.unpack({"newer": {"old": "mid", "mid": "new"}, "older": {"new": ("mid",), "mid": ("old",)}})
    assert changed_by([Event(EventType.UPDATED, "old", "other")], links) == {"old", "mid", "new", "other"}
    assert changed_by([], links) == set()
    restored = Links()
    restored.unpack(links.pack())
    assert changed_by([Event(EventType.UPDATED, "new")], restored) == {"old", "mid", "new"}


def test_packed_identities_find_the_same_slots() -> None:
    identities, restored = IdentityIndex(), IdentityIndex()
    identities.extend([7, 3, 7, 9])
    identities.set(3, 3)
    restored.unpack(identities.pack())
    assert restored.hashes.tolist() == [7, 3, 7, 3]
    assert [restored.find(value) for value in (7, 3, 9)] == [[0, 2], [1, 3], []]
    restored.set(0, 3)
    restored.settle()
    assert [restored.find(value) for value in (7, 3)] == [[2], [0, 1, 3]]


def test_accesses_are_set_by_id_and_by_position() -> None:
    columns = Columns()
    columns.extend([Fragment(name, "", position=at, access_time_us=5) for at, name in enumerate("abc", 10)])
    assert columns.in_order()
    columns.set_accesses([10, 12], [9, 3])
    assert columns.access_us.tolist() == [9, 5, 5]
    columns.set_access_times({"b": 1, "gone": 2})
    assert columns.access_us.tolist() == [9, 1, 5]
    columns.append(Fragment("d", "", position=1))
    assert not columns.in_order()


def test_differences_name_the_field_and_both_values() -> None:
    replayed = place_of(Fragment("a", "", tier=Tier.LONG_TERM, importance=0.5, sources=("x", "y")))
    assert (
        list_differences(
            replayed, place_of(Fragment("a", "", tier=Tier.LONG_TERM, importance=0.5000001, sources=("x", "y")))
        )
        == []
    )
    listed = place_of(Fragment("a", "", tier=Tier.SHORT_TERM, importance=0.6))
    assert list_differences(replayed, listed) == [
        f"tier is {Tier.SHORT_TERM}, its events say {Tier.LONG_TERM}",
        "importance is 0.6, its events say 0.5",
        "sources is nothing, its events say x y",
    ]
