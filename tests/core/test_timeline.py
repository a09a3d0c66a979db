"""A memory as of an earlier revision: what its log and its versions give, and what they cannot give."""

from __future__ import annotations

import pytest

from memstream_server.core.events import Event, EventType, Reason
from memstream_server.core.suspicions import ConflictDecision, ConflictReason
from memstream_server.core.timeline import Loss, NotKept, Timeline
from memstream_server.core.values import Fragment, Tier

SECOND_US = 1_000_000
PRESENT = 0


def observed(id_: str, *, importance: float = 0.5) -> Event:
    return Event(EventType.OBSERVED, id_, to_tier=Tier.SENSORY, importance=importance)


def updated(id_: str) -> Event:
    return Event(EventType.UPDATED, id_, importance=0.9)


def timeline_of(at: int, *steps: list[Event], first: int = 1, merges: bool = False) -> Timeline:
    """The timeline of one transition a second; `first` is the revision of the first one that the log still has."""
    timeline = Timeline(at, merges=merges)
    for revision, events in enumerate(steps, first):
        timeline.add(revision, revision * SECOND_US, events)
    return timeline


def test_a_fragment_observed_later_is_absent() -> None:
    timeline = timeline_of(1, [observed("a")], [observed("b")])
    assert timeline.find_base("a") == PRESENT
    assert timeline.find_base("b") is None
    assert (timeline.head, timeline.time_us) == (2, SECOND_US)


def test_a_change_is_undone_by_the_version_it_replaced() -> None:
    timeline = timeline_of(1, [observed("a")], [updated("a")], [updated("a")])
    timeline.set_versions({"a": {2, 3}})
    assert timeline.find_base("a") == 2
    assert timeline.changed_ids() == ["a"]
    present = Fragment("a", "third", importance=0.9, access_count=7, version=3)
    was = timeline.rebuild(present, Fragment("a", "first", version=1))
    assert (was.content, was.importance, was.access_count, was.version) == ("first", 0.5, 7, 0)


def test_a_change_without_its_version_is_not_kept() -> None:
    timeline = timeline_of(1, [observed("a"), observed("b")], [updated("a")], [updated("a")], [updated("b")])
    timeline.set_versions({"a": {3}})
    with pytest.raises(NotKept):
        timeline.find_base("a")
    assert timeline.find_oldest("a") == 2
    assert timeline.find_oldest("b") == timeline.find_oldest() == 4
    timeline.set_versions({"a": {2, 3}, "b": {4}})
    assert timeline.find_oldest() == 0


def test_a_replay_takes_a_lost_version_as_absent() -> None:
    timeline = timeline_of(1, [observed("a")], [updated("a")])
    timeline.skips_lost = True
    assert timeline.find_base("a") is None
    assert timeline.list_missing() == {"a": Loss.VERSION_NOT_KEPT}


def test_a_removed_fragment_counts_as_removed() -> None:
    gone = Event(EventType.DROPPED, "a", reason=Reason.CAPACITY)
    timeline = timeline_of(1, [observed("a"), observed("b")], [gone])
    assert timeline.find_base("a") is None
    assert timeline.list_missing() == {"a": Loss.REMOVED}
    forgotten_before = timeline_of(2, [observed("a")], [Event(EventType.FORGOTTEN, "a")], [gone])
    assert forgotten_before.list_missing() == {}


def test_words_erased_from_a_fragment_leave_it_absent() -> None:
    """An erasure weakens those that held its words, and takes their versions."""
    erasure = [Event(EventType.ERASED, "b", reason=Reason.REQUESTED), Event(EventType.WEAKENED, "a", "b"), updated("a")]
    timeline = timeline_of(1, [observed("a"), observed("b")], erasure)
    assert timeline.find_base("a") is None
    assert timeline.find_base("b") is None
    assert timeline.list_missing() == {"a": Loss.ERASED, "b": Loss.ERASED}
    assert timeline.find_oldest() == 0  # nothing older would give it back


def test_a_change_after_an_erasure_needs_its_version() -> None:
    erasure = [Event(EventType.ERASED, "b", reason=Reason.REQUESTED), Event(EventType.WEAKENED, "a", "b")]
    timeline = timeline_of(2, [observed("a"), observed("b")], erasure, [updated("a")])
    with pytest.raises(NotKept):
        timeline.find_base("a")
    assert timeline.find_oldest("a") == 3
    assert timeline.list_missing() == {}


def test_what_cannot_be_known_does_not_count_as_removed() -> None:
    erasure = [Event(EventType.ERASED, "b", reason=Reason.REQUESTED), Event(EventType.WEAKENED, "a", "b")]
    timeline = timeline_of(1, [observed("a"), observed("b")], erasure, [updated("a")])
    with pytest.raises(NotKept):
        timeline.find_base("a")
    assert timeline.list_missing() == {"b": Loss.ERASED}


@pytest.mark.parametrize(("merges", "lost"), [(True, True), (False, False)])
def test_an_old_promotion_may_have_replaced_content(merges: bool, lost: bool) -> None:
    """Logs from before `merges` was recorded: the policy and the sources say it."""
    promotion = Event(EventType.PROMOTED, "a", to_tier=Tier.LONG_TERM, sources=("b",))
    timeline = timeline_of(1, [observed("a")], [promotion], merges=merges)
    if lost:
        with pytest.raises(NotKept):
            timeline.find_base("a")
    else:
        assert timeline.find_base("a") == PRESENT
    recorded = timeline_of(
        1, [observed("a")], [Event(EventType.PROMOTED, "a", sources=("b",), merges=False)], merges=True
    )
    assert recorded.find_base("a") == PRESENT


def test_a_forgotten_fragment_keeps_when_it_was() -> None:
    forgotten = [observed("a")], [Event(EventType.FORGOTTEN, "a")]
    still = timeline_of(2, *forgotten).rebuild(Fragment("a", "x", forget_time_us=2_000_001), None)
    assert still.forget_time_us == 2_000_001  # exact, because nothing has restored it since
    back = timeline_of(2, *forgotten, [Event(EventType.RESTORED, "a")]).rebuild(Fragment("a", "x"), None)
    assert back.forget_time_us == 2 * SECOND_US
    before = timeline_of(1, *forgotten).rebuild(Fragment("a", "x", forget_time_us=2_000_001), None)
    assert before.forget_time_us is None


def test_a_repeat_is_undone_by_the_expiry_it_replaced() -> None:
    repeat = Event(EventType.REPEATED, "a", "b", expire_time_us=5)
    present = Fragment("a", "x", expire_time_us=9, duplicate_count=1, enhancement_count=1)
    was = timeline_of(1, [observed("a")], [repeat]).rebuild(present, None)
    assert (was.expire_time_us, was.duplicate_count, was.enhancement_count) == (5, 0, 0)


def test_a_vector_filled_in_later_was_missing() -> None:
    filled = [Event(EventType.UNVECTORED, "a")], [Event(EventType.VECTORED, "a")]
    present = Fragment("a", "x", model="hashing")
    assert timeline_of(1, [observed("a")], *filled).rebuild(present, None).model == ""
    assert timeline_of(3, [observed("a")], *filled).rebuild(present, None).model == "hashing"


def test_supersessions_are_those_of_the_revision() -> None:
    steps = (
        [observed("old"), observed("new")],
        [Event(EventType.SUPERSEDED, "old", "new")],
        [Event(EventType.SUPERSESSION_UNDONE, "old", "new")],
    )
    old, new = Fragment("old", "Paris"), Fragment("new", "Rome")
    during, after = timeline_of(2, *steps), timeline_of(3, *steps)
    assert during.rebuild(old, None).superseded_by == "new"
    assert during.rebuild(old, None).supersede_time_us == 2 * SECOND_US
    assert during.rebuild(new, None).supersedes == ("old",)
    assert after.rebuild(old, None) == old.but(importance=0.5)
    assert after.rebuild(new, None).supersedes == ()


def test_a_forgotten_fragment_keeps_what_it_superseded() -> None:
    steps = (
        [observed("old"), observed("new")],
        [Event(EventType.SUPERSEDED, "old", "new")],
        [Event(EventType.FORGOTTEN, "new")],
        [Event(EventType.SUPERSESSION_UNDONE, "old", "new")],
    )
    assert timeline_of(4, *steps).rebuild(Fragment("new", "Rome"), None).supersedes == ("old",)


def test_suspicions_are_those_of_the_revision() -> None:
    suspected = Event(EventType.CONFLICT_SUSPECTED, "new", "old", conflict_reason=ConflictReason.PLACE)
    resolved = Event(EventType.CONFLICT_RESOLVED, "new", "old", conflict_decision=ConflictDecision.BOTH)
    steps = [observed("old")], [observed("new"), suspected], [resolved]
    (one,) = timeline_of(2, *steps).suspicions
    assert (one.newer, one.older, one.reason, one.time_us) == ("new", "old", ConflictReason.PLACE, 2 * SECOND_US)
    (apart,) = timeline_of(3, *steps).suspicions
    assert (apart.newer, apart.older, apart.apart) == ("new", "old", True)
    assert list(timeline_of(3, *steps, [updated("old")]).suspicions) == [apart]
    ended = Event(EventType.CONFLICT_ENDED, "new", "old")
    assert not timeline_of(4, *steps, [ended]).suspicions
    assert not timeline_of(3, *steps[:2], [updated("old")]).suspicions


def test_of_a_pruned_log_only_what_it_saw_is_known() -> None:
    """Revisions 1 to 9 were pruned: fragments from before them have no beginning in the log."""
    timeline = timeline_of(
        11,
        [observed("a")],
        [Event(EventType.RATED, "a", importance=0.7), Event(EventType.RATED, "before", importance=0.2)],
        [Event(EventType.SUPERSEDED, "older", "oldest")],
        [Event(EventType.ECHOED, "quiet", "x")],
        first=10,
    )
    assert timeline.find_base("a") == PRESENT
    assert timeline.rebuild(Fragment("a", "x"), None).importance == 0.7
    untouched = Fragment("quiet", "x", importance=0.3)
    assert timeline.rebuild(untouched, None) == untouched
    for changed in ("older", "oldest"):
        with pytest.raises(NotKept):
            timeline.find_base(changed)
    assert timeline.find_oldest() == 12
    assert timeline_of(4, [observed("a")], [updated("b")], first=10).find_oldest() == 11


def test_a_pruned_log_follows_merges_and_departures() -> None:
    insight = Event(EventType.REFLECTED, "insight", to_tier=Tier.LONG_TERM, importance=0.5)
    timeline = timeline_of(
        12,
        [insight, observed("a"), observed("b")],
        [Event(EventType.MERGED, "a", "insight", importance=0.8, sources=("a",))],
        [Event(EventType.MERGED, "unseen", "unknown"), Event(EventType.DROPPED, "b")],
        [Event(EventType.DROPPED, "insight")],
        first=10,
    )
    was = timeline.rebuild(Fragment("insight", "x"), None)
    assert (was.importance, was.sources) == (0.8, ("a",))
    assert timeline.find_base("insight") is None
    assert timeline.list_missing() == {"insight": Loss.REMOVED}
