"""Reading, listing and counting fragments; due fragments; access statistics."""

from __future__ import annotations

from dataclasses import replace

from memstream_server.core.values import FragmentKind, Tier
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import Counts, IndexEntry
from memstream_server.ports.journal.rows import Row
from memstream_server.ports.journal.writing import Access, Accesses
from tests.journal.samples import MODEL, fragment, image, receipt, record, row, transition


class Reading:
    """See suite.py."""

    async def test_expiring_lists_live_unpinned_oldest_first(self, journal: Journal) -> None:
        rows = [
            fragment(0, expire_time_us=300),
            fragment(1, expire_time_us=100),
            fragment(2, expire_time_us=100, pinned=True),
            fragment(3, expire_time_us=100, forget_time_us=9),
            fragment(4),
            fragment(5, expire_time_us=301),
        ]
        await journal.commit(transition(1, rows=tuple(row(one) for one in rows)))
        await journal.create_memory(record("u2", "sad"), ())
        await journal.own_memory("u2")
        await journal.commit(replace(transition(1, rows=(row(fragment(0, expire_time_us=200)),)), memory="u2"))
        due = [("u1", rows[1].id), ("u2", fragment(0).id), ("u1", rows[0].id)]
        assert await journal.list_expired(300, 10) == due
        assert await journal.list_expired(300, 2) == due[:2]
        assert await journal.list_expired(99, 10) == []
        changed = (Row(rows[1].but(expire_time_us=None)), Row(rows[2].but(pinned=False)))
        await journal.commit(transition(2, rows=changed))
        assert await journal.list_expired(100, 10) == [("u1", rows[2].id)]
        await journal.delete_memory("u2")
        assert await journal.list_expired(300, 10) == [("u1", rows[2].id), ("u1", rows[0].id)]

    async def test_purgeable_lists_forgotten_oldest_first(self, journal: Journal) -> None:
        rows = [fragment(0, forget_time_us=30), fragment(1, forget_time_us=10), fragment(2), fragment(3)]
        await journal.commit(transition(1, rows=tuple(row(one) for one in rows)))
        await journal.create_memory(record("u2", "sad"), ())
        assert await journal.oldest_forgotten() == [("u1", 10)]
        assert [one.uid for one in await journal.get_records(["u2", "nobody", "u1"])] == ["u1", "u2"]
        assert await journal.list_purgeable("u1", 30, 10) == [rows[1].id, rows[0].id]
        assert await journal.list_purgeable("u1", 30, 1) == [rows[1].id]
        assert await journal.list_purgeable("u1", 29, 10) == [rows[1].id]
        assert await journal.list_purgeable("nobody", 30, 10) == []
        await journal.commit(transition(2, rows=(Row(rows[0].but(forget_time_us=None)),), removed=(rows[1].id,)))
        assert await journal.oldest_forgotten() == []

    async def test_touches_add_up_and_survive_commits(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(0, access_count=2)), row(fragment(1)))))
        await journal.add_accesses(
            Accesses("u1", 1, (Access(fragment(0).id, 1, 5_000), Access(fragment(0).id, 2, 4_000)))
        )
        await journal.add_accesses(Accesses("u1", 1, (Access(fragment(0).id, 1, 10), Access("nobody", 1, 1))))
        await journal.commit(transition(2, rows=(Row(fragment(0, importance=0.9)),)))
        touched, other = await journal.get_fragments("u1", [fragment(0).id, fragment(1).id])
        assert (touched.access_count, touched.access_time_us, touched.importance) == (6, 5_000, 0.9)
        assert (other.access_count, other.access_time_us) == (0, 1_001)
        assert [one.fragment.access_count for one in (await image(journal)).rows] == [6, 0]
        assert (await image(journal)).record.revision == 3

    async def test_fragments_keep_requested_order(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=tuple(row(fragment(place)) for place in range(700))))
        wanted = [fragment(place).id for place in (699, 3, 0)]
        assert [one.id for one in await journal.get_fragments("u1", [*wanted, "nobody"])] == wanted
        everything = [fragment(place).id for place in reversed(range(700))]
        assert [one.id for one in await journal.get_fragments("u1", everything)] == everything
        assert await journal.get_fragments("u2", wanted) == []
        assert await journal.get_fragments("u1", []) == []

    async def test_memories_with_same_ids_are_separate(self, journal: Journal) -> None:
        await journal.create_memory(record("u2", "sad"), ())
        await journal.own_memory("u2")
        await journal.commit(transition(1, rows=(row(fragment(0)),)))
        theirs = row(fragment(0, content="theirs"))
        await journal.commit(replace(transition(1, rows=(theirs,)), memory="u2"))
        await journal.commit(transition(2, removed=(fragment(0).id,)))
        assert await journal.get_fragments("u1", [fragment(0).id]) == []
        assert await journal.get_fragments("u2", [fragment(0).id]) == [theirs.fragment]
        assert len(await journal.get_vectors("u2", MODEL, [fragment(0).id])) == 1

    async def test_list_filters_and_pages(self, journal: Journal) -> None:
        rows = [
            fragment(0, Tier.SENSORY),
            fragment(1, Tier.SHORT_TERM, session="tuesday"),
            fragment(2, speaker="Joy"),
            fragment(3, kind=FragmentKind.INSIGHT),
            fragment(4, forget_time_us=9),
        ]
        await journal.commit(transition(1, rows=tuple(row(one) for one in rows)))

        async def listed(**query: object) -> list[int]:
            wanted = FragmentQuery(**query)  # type: ignore[arg-type]  # the test names fields of FragmentQuery
            return [one.position for one in await journal.list_fragments("u1", wanted)]

        assert await listed() == [0, 1, 2, 3]
        assert await listed(limit=2) == [0, 1]
        assert await listed(after=1, limit=2) == [2, 3]
        assert await listed(tiers=(Tier.SENSORY, Tier.SHORT_TERM)) == [0, 1]
        assert await listed(sessions=("tuesday",)) == [1]
        assert await listed(speakers=("Joy", "nobody")) == [2]
        assert await listed(speakers=(" JOY",), limit=1) == [2]
        assert await listed(speakers=("joy",), after=2) == []
        assert await listed(speakers=("joy",), sessions=("tuesday",)) == []
        assert await listed(kinds=("insight",), tiers=(Tier.LONG_TERM,)) == [3]
        assert await listed(forgotten=True) == [4]
        assert await listed(limit=0) == []

    async def test_counts_by_tier_and_kind(self, journal: Journal) -> None:
        rows = [
            fragment(0, Tier.SENSORY),
            fragment(1, Tier.SHORT_TERM),
            fragment(2),
            fragment(3, kind=FragmentKind.INSIGHT),
            fragment(4, forget_time_us=9),
        ]
        work = (IndexEntry("u1", fragment(2).id),)
        await journal.commit(transition(1, rows=tuple(row(one) for one in rows), index=work))
        await journal.receive(receipt(1, 3, 5, rejected=(2,)))
        assert await journal.count_fragments("u1") == Counts(1, 1, 2, insights=1, forgotten=1, pending=2, unindexed=1)
        assert await journal.count_fragments("nobody") == Counts()

    async def test_counts_exclude_expired(self, journal: Journal) -> None:
        rows = [
            fragment(0, Tier.SENSORY, expire_time_us=100),
            fragment(1, Tier.SHORT_TERM, expire_time_us=101),
            fragment(2, expire_time_us=-5),
            fragment(3, expire_time_us=100, pinned=True),
            fragment(4, expire_time_us=100, forget_time_us=9),
        ]
        await journal.commit(transition(1, rows=tuple(row(one) for one in rows)))
        assert await journal.count_fragments("u1") == Counts(1, 1, 2, forgotten=1)
        assert await journal.count_fragments("u1", 99) == Counts(1, 1, 1, forgotten=1)
        assert await journal.count_fragments("u1", 100) == Counts(0, 1, 1, forgotten=1)
