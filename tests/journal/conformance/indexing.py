"""The index's outbox, and jobs."""

from __future__ import annotations

from dataclasses import replace

from memstream_server.core.values import Tier
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import Indexable, IndexEntry, Job, Made, Space, Spaces
from memstream_server.ports.journal.rows import Row
from tests.journal.samples import MODEL, fragment, record, row, transition, vector


class Indexing:
    """See suite.py."""

    async def test_outbox_returns_current_rows_until_done(self, journal: Journal) -> None:
        live, forgotten, erased = fragment(0), fragment(1), fragment(2)
        entries = tuple(IndexEntry("u1", one.id) for one in (live, forgotten, erased))
        await journal.commit(transition(1, rows=(row(live), row(forgotten), row(erased)), index=entries))
        later = forgotten.but(forget_time_us=5)
        await journal.commit(transition(2, rows=(Row(later),), removed=(erased.id,)))
        found = await journal.read_outbox(10)
        assert [(entry.memory, entry.fragment, entry.delete) for entry, _ in found] == [
            ("u1", one.id, False) for one in (live, forgotten, erased)
        ]
        assert [what for _, what in found] == [Indexable(MODEL, vector(0)), None, None]
        assert await journal.outbox_size() == 3
        assert await journal.outbox_last() == found[2][0].id
        assert [entry for entry, _ in await journal.read_outbox(1)] == [found[0][0]]
        await journal.outbox_done([found[1][0].id])
        assert [entry for entry, _ in await journal.read_outbox(9)] == [found[0][0], found[2][0]]
        await journal.outbox_done([found[0][0].id, found[2][0].id])
        assert (await journal.outbox_size(), await journal.outbox_last()) == (0, 0)

    async def test_missing_vectors_are_counted_in_the_space_in_force(self, journal: Journal) -> None:
        await journal.create_memory(record("u2", "sad"), ())
        rows = (
            row(fragment(0)),
            Row(fragment(1, model="")),
            Row(fragment(2, Tier.SHORT_TERM, model="")),
            Row(fragment(3, model="", forget_time_us=5)),
        )
        await journal.set_space(Space(MODEL, 4, 1))
        await journal.commit(transition(1, rows=rows))
        assert await journal.count_unvectored() == (await journal.count_fragments("u1")).unvectored == 2
        assert (await journal.count_fragments("u2")).unvectored == 0
        assert await journal.list_unvectored_memories() == [("u1", 2)]
        made = [Made(fragment(0).id, 0, None), Made(fragment(1).id, 0, b"12345678"), Made(fragment(2).id, 7, None)]
        assert await journal.add_vectors("u1", "other-2", made) == 2
        assert await journal.count_unvectored() == 2
        await journal.set_spaces(Spaces(in_force=Space("other-2", 2, 1), next=None, old=None))
        assert await journal.count_unvectored() == 2
        listed = await journal.list_fragments("u1", FragmentQuery(limit=9, forgotten=False))
        assert [one.id for one in listed if not one.model] == [fragment(0).id, fragment(2).id]
        await journal.commit(transition(2, rows=(Row(fragment(0, model="other-2"), None, b"12345678"),)))
        assert await journal.count_unvectored() == 1

    async def test_jobs_are_entered_once_for_each_memory(self, journal: Journal) -> None:
        await journal.create_memory(record("u2", "sad"), ())
        jobs = [Job("j1", "u1", "backfill", "{}", 1), Job("j2", "u2", "backfill", "{}", 2)]
        await journal.enter_jobs("backfill", [*jobs, Job("j3", "nobody", "backfill", "{}", 3)])
        assert await journal.list_jobs(9) == jobs
        await journal.enter_jobs("backfill", [replace(jobs[0], id="j4")])
        await journal.enter_jobs("rating", [Job("j5", "u1", "rating", "{}", 4)])
        assert [one.id for one in await journal.list_jobs(9)] == ["j1", "j2", "j5"]
        assert (await journal.count_jobs("backfill"), await journal.count_jobs("erase")) == (2, 0)
        await journal.enter_jobs("backfill", [])

    async def test_last_outbox_entry_of_a_fragment_decides(self, journal: Journal) -> None:
        upsert, deletion = IndexEntry("u1", fragment(0).id), IndexEntry("u1", fragment(0).id, delete=True)
        await journal.commit(transition(1, rows=(row(fragment(0)),), index=(deletion, upsert)))
        expected = Indexable(MODEL, vector(0))
        assert [what for _, what in await journal.read_outbox(9)] == [expected, expected]
        await journal.commit(transition(2, index=(deletion,)))
        assert [what for _, what in await journal.read_outbox(9)] == [None, None, None]

    async def test_refill_enters_live_long_term_fragments_with_vector(self, journal: Journal) -> None:
        await journal.create_memory(record("u2", "sad"), ())
        await journal.own_memory("u2")
        rows = (
            row(fragment(0)),
            Row(fragment(1, model="")),
            row(fragment(2, Tier.SHORT_TERM)),
            row(fragment(3, forget_time_us=5)),
        )
        assert await journal.count_largest_memory() == 0
        await journal.commit(replace(transition(1, rows=(row(fragment(7)),)), memory="u2"))
        assert await journal.count_largest_memory() == 1
        await journal.commit(transition(1, rows=rows, index=(IndexEntry("u1", fragment(0).id),)))
        assert await journal.count_largest_memory() == 4
        assert await journal.outbox_refill() == 2
        found = await journal.read_outbox(9)
        assert sorted((entry.memory, entry.fragment) for entry, _ in found) == [
            ("u1", fragment(0).id),
            ("u2", fragment(7).id),
        ]
        assert all(what is not None for _, what in found)

    async def test_reconciliation_enters_outbox_entries(self, journal: Journal) -> None:
        rows = (row(fragment(0)), row(fragment(1)), row(fragment(2, Tier.SHORT_TERM)), Row(fragment(3, model="")))
        await journal.commit(transition(1, rows=rows))
        assert await journal.list_indexable("u1") == [fragment(0).id, fragment(1).id]
        assert await journal.list_indexable("nobody") == []
        assert await journal.outbox_fragments("u1") == set()
        await journal.outbox_enter([IndexEntry("u1", fragment(1).id), IndexEntry("u1", "orphan")])
        assert await journal.outbox_fragments("u1") == {fragment(1).id, "orphan"}
        assert await journal.outbox_fragments("nobody") == set()
        found = [(entry.fragment, what is None) for entry, what in await journal.read_outbox(9)]
        assert found == [(fragment(1).id, False), ("orphan", True)]

    async def test_jobs_are_listed_oldest_first_until_finished(self, journal: Journal) -> None:
        jobs = (Job("j2", "u1", "insight", '{"a":1}', 20, 1), Job("j1", "u1", "reflection", "{}", 10))
        await journal.commit(transition(1, jobs=jobs))
        assert await journal.list_jobs(9) == [jobs[1], jobs[0]]
        assert await journal.list_jobs(1) == [jobs[1]]
        await journal.commit(transition(2, finish_jobs=("j1",)))
        assert await journal.list_jobs(9) == [jobs[0]]
