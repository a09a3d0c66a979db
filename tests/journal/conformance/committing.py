"""Commits: atomic, one per revision, with their events."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from memstream_server.core.events import Event, EventType, Reason
from memstream_server.core.policy import DBGPT, with_value
from memstream_server.core.suspicions import ConflictDecision, ConflictReason, Suspicion
from memstream_server.core.values import Fragment, FragmentKind, Structured, Tier
from memstream_server.ports.journal.errors import AlreadyExists, StaleWrite
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import StoredConflict
from memstream_server.ports.journal.records import Recorded
from memstream_server.ports.journal.rows import Anchor, Row
from memstream_server.ports.journal.writing import Resolution
from tests.journal.samples import MODEL, fragment, image, record, row, transition


class Committing:
    """See suite.py."""

    async def test_fragment_fields_round_trip(self, journal: Journal) -> None:
        full = Fragment(
            id="Z",
            content="q\nt",
            tier=Tier.LONG_TERM,
            kind=FragmentKind.INSIGHT,
            structured=Structured(question="q", thought="t"),
            speaker="Joy",
            session="s",
            importance=0.75,
            observe_time_us=1,
            create_time_us=2,
            access_time_us=3,
            access_count=4,
            enhancement_count=5,
            duplicate_count=1,
            sources=("a", "b"),
            metadata=(("f", 1.0), ("i", 1), ("ok", True), ("s", "x")),
            expire_time_us=9,
            pinned=True,
            external_id="ext",
            model=MODEL,
            position=7,
            version=2,
            forget_time_us=11,
        )
        await journal.commit(transition(1, rows=(row(full),)))
        (read,) = await journal.get_fragments("u1", ["Z"])
        assert read == full
        assert [type(value) for _, value in read.metadata] == [float, int, bool, str]
        found = await image(journal)
        assert found.rows == (row(full),)
        assert found.next_position == 8

    async def test_suspicions_are_kept_until_a_fragment_leaves(self, journal: Journal) -> None:
        first, second, third = fragment(0), fragment(1), fragment(2)
        open_one = Suspicion(second.id, first.id, ConflictReason.DATE, 5)
        other = Suspicion(third.id, second.id, ConflictReason.PLACE, 6)
        rows = tuple(row(each) for each in (first, second, third))
        await journal.commit(transition(1, rows=rows, suspicions=(open_one, other)))
        assert (await image(journal)).suspicions == (open_one, other)
        assert await journal.list_conflicts("u1", False, ("", ""), 1) == [StoredConflict(open_one)]
        assert await journal.list_conflicts("u1", False, (second.id, first.id), 9) == [StoredConflict(other)]
        done = Resolution(second.id, first.id, ConflictDecision.BOTH, "asked", 7)
        await journal.commit(transition(2, resolutions=(done,)))
        decided = StoredConflict(open_one, ConflictDecision.BOTH, "asked", 7)
        assert await journal.list_conflicts("u1", True, ("", ""), 9) == [decided]
        assert await journal.get_conflict("u1", second.id, first.id) == decided
        apart = replace(open_one, apart=True)
        assert (await image(journal)).suspicions == (apart, other)
        await journal.commit(transition(3, removed=(second.id,)))
        assert [await journal.list_conflicts("u1", decided, ("", ""), 9) for decided in (False, True)] == [[], []]

    async def test_an_event_ends_a_suspicion(self, journal: Journal) -> None:
        old, new = fragment(0), fragment(1)
        await journal.commit(transition(1, rows=(row(old), row(new))))
        suspicion = Suspicion(new.id, old.id, ConflictReason.NAME, 5)
        await journal.commit(transition(2, suspicions=(suspicion,)))
        ended = Event(EventType.CONFLICT_ENDED, new.id, old.id)
        await journal.commit(transition(3, rows=(row(old.but(superseded_by=new.id)),), events=(ended,)))
        assert await journal.list_conflicts("u1", False, ("", ""), 9) == []

    async def test_a_pair_is_suspected_again_without_its_decision(self, journal: Journal) -> None:
        old, new = fragment(0), fragment(1)
        suspicion = Suspicion(new.id, old.id, time_us=5)
        done = Resolution(new.id, old.id, ConflictDecision.NEWER, "asked", 7)
        rows = (row(old), row(new))
        await journal.commit(transition(1, rows=rows, suspicions=(suspicion,), resolutions=(done,)))
        assert await journal.list_conflicts("u1", False, ("", ""), 9) == []
        again = replace(suspicion, time_us=9)
        await journal.commit(transition(2, suspicions=(again,)))
        assert await journal.list_conflicts("u1", False, ("", ""), 9) == [StoredConflict(again)]

    async def test_commit_at_wrong_revision_or_epoch_changes_nothing(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(0)),)))
        for stale in (
            transition(1),
            transition(3),
            replace(transition(2), epoch=2),
            replace(transition(2), memory="x"),
        ):
            with pytest.raises(StaleWrite):
                await journal.commit(replace(stale, removed=(fragment(0).id,)))
        found = await image(journal)
        assert (found.record.revision, len(found.rows)) == (2, 1)

    async def test_one_of_concurrent_commits_wins(self, journal: Journal) -> None:
        attempts = [journal.commit(transition(1, rows=(row(fragment(place)),))) for place in range(8)]
        results = await asyncio.gather(*attempts, return_exceptions=True)
        assert [result is None for result in results] == [True] + [False] * 7
        assert all(isinstance(result, StaleWrite) for result in results[1:])
        assert [one.fragment.position for one in (await image(journal)).rows] == [0]

    async def test_rejected_write_fails_alone_in_its_group(self, journal: Journal) -> None:
        await journal.create_memory(record("u2", "sad"), ())
        await journal.own_memory("u2")
        named = row(fragment(0, external_id="same"))
        writes = [
            journal.commit(transition(1, rows=(named,))),
            journal.commit(transition(2, rows=(row(fragment(1)), row(fragment(2, external_id="same"))))),
            journal.commit(transition(2, rows=(row(fragment(3)),))),
            journal.commit(replace(transition(1, rows=(named,)), memory="u2")),
        ]
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), AlreadyExists, type(None), type(None)]
        assert [one.fragment.position for one in (await image(journal)).rows] == [0, 3]
        assert [one.revision for one in await journal.list_events("u1", 0, 9)] == [1, 2, 3]
        assert len((await journal.load_memory("u2", MODEL, 9)).rows) == 1

    async def test_unwritable_value_fails_alone(self, journal: Journal) -> None:
        broken = fragment(0, metadata=(("x", object()),))
        results = await asyncio.gather(
            journal.commit(transition(1, rows=(row(broken),))),
            journal.commit(transition(1, rows=(row(fragment(1)),))),
            return_exceptions=True,
        )
        assert isinstance(results[0], TypeError)
        assert results[1] is None
        assert [one.fragment.position for one in (await image(journal)).rows] == [1]

    async def test_row_without_terms_and_vector_keeps_stored_ones(self, journal: Journal) -> None:
        before = row(fragment(0, Tier.SHORT_TERM))
        await journal.commit(transition(1, rows=(before,)))
        promoted = before.fragment.but(tier=Tier.LONG_TERM, importance=1.0)
        await journal.commit(transition(2, rows=(Row(promoted),)))
        assert (await image(journal)).rows == (Row(promoted, before.terms, before.vector),)

    async def test_fragment_without_model_loses_its_vector(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(0)),)))
        await journal.commit(transition(2, rows=(Row(fragment(0, content="other words", model="")),)))
        assert (await image(journal)).rows[0].vector is None
        assert await journal.get_vectors("u1", MODEL, [fragment(0).id]) == {}

    async def test_removed_fragment_leaves_no_rows(self, journal: Journal) -> None:
        held = row(fragment(0, Tier.SHORT_TERM, external_id="e"))
        await journal.commit(
            transition(1, rows=(held, row(fragment(1))), anchors=(Anchor(held.fragment.id, None, ()),))
        )
        await journal.commit(transition(2, removed=(held.fragment.id,)))
        found = await image(journal)
        assert [one.fragment.position for one in found.rows] == [1]
        assert found.short_term == ()
        assert found.next_position == 2, "a position is never given twice"
        assert await journal.get_vectors("u1", MODEL, [held.fragment.id]) == {}
        await journal.commit(transition(3, rows=(row(fragment(2, external_id="e")),)))

    async def test_any_number_of_rows_up_to_a_few_statements(self, journal: Journal) -> None:
        position, revision = 0, 1
        for count in (1, 2, 3, 7, 255, 256, 257, 600):
            rows = tuple(row(fragment(position + place)) for place in range(count))
            await journal.commit(transition(revision, rows=rows))
            position, revision = position + count, revision + 1
        rows = (await image(journal, 2_000)).rows
        assert [one.fragment.position for one in rows] == list(range(position))
        assert all(one == row(one.fragment) for one in rows)
        gone = tuple(one.fragment.id for one in rows[::2])
        await journal.commit(transition(revision, removed=gone))
        assert [one.fragment.position for one in (await image(journal)).rows] == list(range(1, position, 2))

    async def test_commit_changes_only_given_policy_labels_aggregate(self, journal: Journal) -> None:
        policy = with_value(DBGPT, "recall.alpha", 0.125)
        changed = transition(1, policy=policy, labels=(("a", "b"),), reflection_aggregate=2.5)
        await journal.commit(changed)
        expected = replace(
            record(),
            epoch=1,
            revision=2,
            policy=policy,
            labels=(("a", "b"),),
            reflection_aggregate=2.5,
            update_time_us=10,
            change_time_us=10,
        )
        assert await journal.get_memory("comedy", "joy") == expected
        await journal.commit(transition(2))
        expected = replace(expected, revision=3, change_time_us=20)
        assert await journal.get_memory("comedy", "joy") == expected
        assert (await image(journal)).record == expected

    async def test_events_are_read_in_order_after_revision(self, journal: Journal) -> None:
        happened = (
            Event(EventType.ENHANCED, "a", other="b", cosine=0.5, draw=0.25, importance=1.0),
            Event(EventType.PROMOTED, "a", from_tier=Tier.SHORT_TERM, to_tier=Tier.LONG_TERM, sources=("b", "c")),
            Event(EventType.DROPPED, "d", reason=Reason.CAPACITY),
        )
        await journal.commit(transition(1, events=happened))
        await journal.commit(transition(2))
        assert await journal.list_events("u1", 1, 10) == [Recorded(2, 10, happened), Recorded(3, 20, ())]
        assert [one.revision for one in await journal.list_events("u1", 0, 2)] == [1, 2]
        assert await journal.list_events("u1", 3, 10) == []

    async def test_events_are_found_by_the_fragments_they_concern(self, journal: Journal) -> None:
        """Those of a large transition, which is compressed, too; and no longer once the log is pruned."""
        named = Event(EventType.ENHANCED, "a", other="b")
        merged = Event(EventType.REFLECTED, "c", sources=("a", "b"))
        many = tuple(Event(EventType.OBSERVED, f"other-{number}") for number in range(60))
        for revision, events in enumerate(((named, merged), many, (*many, named), ()), 1):
            await journal.commit(transition(revision, events=events))
        of_b = [Recorded(2, 10, (named, merged)), Recorded(4, 30, (named,))]
        assert await journal.list_fragment_events("u1", "b", 0, 9) == (of_b, False)
        assert await journal.list_fragment_events("u1", "b", 0, 1) == (of_b[:1], True)
        assert await journal.list_fragment_events("u1", "b", 2, 1) == (of_b[1:], False)
        assert await journal.list_fragment_events("u1", "c", 0, 1) == ([Recorded(2, 10, (merged,))], False)
        assert await journal.list_fragment_events("u1", "unknown", 0, 1) == ([], False)
        await journal.prune_events("u1", 20, 100)
        assert await journal.list_fragment_events("u1", "b", 0, 9) == (of_b[1:], False)
        assert await journal.list_fragment_events("u1", "c", 0, 9) == ([], False)

    async def test_a_read_of_events_ends_after_a_large_transition(self, journal: Journal) -> None:
        """Each is decoded as a whole, in one step of a thread, for the one event that is wanted."""
        many = tuple(Event(EventType.OBSERVED, f"other-{number}") for number in range(3000))
        named = Event(EventType.ENHANCED, "a", other="b")
        for revision in range(1, 4):
            await journal.commit(transition(revision, events=(*many, named)))
        one, two, three = (Recorded(revision, 10 * revision - 10, (named,)) for revision in (2, 3, 4))
        assert await journal.list_fragment_events("u1", "b", 0, 9) == ([one], True)
        assert await journal.list_fragment_events("u1", "b", 2, 9) == ([two], True)
        assert await journal.list_fragment_events("u1", "b", 3, 9) == ([three], False)

    async def test_numpy_numbers_are_written_as_python_numbers(self, journal: Journal) -> None:
        seen = Event(EventType.ENHANCED, "a", cosine=np.float32(0.5), draw=np.float64(0.25))  # type: ignore[arg-type]
        await journal.commit(transition(1, events=(seen,), rows=(row(fragment(0, importance=np.float64(0.5))),)))
        ((recorded,),) = [one.events for one in await journal.list_events("u1", 1, 1)]
        assert (recorded.cosine, recorded.draw) == (0.5, 0.25)
        assert type((await image(journal)).rows[0].fragment.importance) is float

    async def test_prune_removes_oldest_events_without_gap(self, journal: Journal) -> None:
        for revision in range(1, 6):
            await journal.commit(transition(revision))
        kept = [one.revision for one in await journal.list_events("u1", 0, 10)]
        assert kept == [1, 2, 3, 4, 5, 6]
        assert await journal.prune_events("u1", 30, 2) == 2  # the memory's creation, at 1 µs, and revision 2, at 10
        assert await journal.prune_events("u1", 30, 10) == 1
        assert await journal.prune_events("u1", 30, 10) == 0
        assert [one.revision for one in await journal.list_events("u1", 0, 10)] == [4, 5, 6]
        await journal.commit(replace(transition(6), time_us=5))  # the clock jumped back
        assert await journal.prune_events("u1", 45, 10) == 2
        assert [one.revision for one in await journal.list_events("u1", 0, 10)] == [6, 7]
        assert await journal.prune_events("u1", 100, 10) == 2
        assert await journal.list_events("u1", 0, 10) == []
        assert (await image(journal)).record.revision == 7
        with pytest.raises(StaleWrite):
            await journal.prune_events("nobody", 100, 10)
