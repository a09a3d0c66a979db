"""The bytes of a namespace: which writes change which count. The suite also reads all rows after each test."""

from __future__ import annotations

from dataclasses import replace

from memstream_server.core.events import Event, EventType
from memstream_server.core.suspicions import ConflictReason, Suspicion
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Answer, NamespaceBytes, staged_name
from tests.journal.conformance.recalling import recalling, receipt_of
from tests.journal.conformance.versioning import changing
from tests.journal.samples import fragment, receipt, record, row, transition


async def bytes_of(journal: Journal, namespace: str = "comedy") -> NamespaceBytes:
    return (await journal.read_bytes([namespace])).get(namespace, NamespaceBytes())


class ByteCounting:
    """See the module."""

    async def test_stored_and_removed_fragments_count(self, journal: Journal) -> None:
        empty = await bytes_of(journal)
        await journal.commit(transition(1, rows=(row(fragment(0)), row(fragment(1)))))
        two = await bytes_of(journal)
        await journal.commit(transition(2, removed=(fragment(1).id,)))
        one = await bytes_of(journal)
        assert empty.fragments == 0 < one.fragments < two.fragments
        await journal.commit(transition(3, removed=(fragment(0).id,)))
        assert (await bytes_of(journal)).fragments == 0
        assert (await bytes_of(journal)).history > empty.history

    async def test_received_batches_count_until_they_are_stored(self, journal: Journal) -> None:
        await journal.receive(receipt(1, 2, 0))
        received = await bytes_of(journal)
        assert received.fragments > 0 < received.requests
        await journal.commit(transition(1, stored_positions=(0,), producers=(("p", 2),)))
        assert (await bytes_of(journal)).fragments == 0

    async def test_replaced_content_counts_once_with_its_version(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(0)),)))
        before = await bytes_of(journal)
        await journal.commit(changing(2, "x" * 100_000, 0))
        after = await bytes_of(journal)
        assert after.fragments > before.fragments
        assert after.history > before.history
        await journal.commit(transition(3, rows=(replace(row(fragment(0)), replaces=True),)))
        assert (await bytes_of(journal)).fragments < after.fragments

    async def test_receipts_and_answers_count_until_they_are_pruned(self, journal: Journal) -> None:
        empty = await bytes_of(journal)
        await journal.put_answer(Answer("comedy\nDo\nr1", b"d", b"done", 1))
        await journal.commit(recalling(1, receipt_of(1)))
        kept = await bytes_of(journal)
        assert kept.receipts > 0 < kept.requests - empty.requests
        await journal.prune_recall_receipts("u1", 1_000)
        await journal.prune_answers(10)
        pruned = await bytes_of(journal)
        assert (pruned.receipts, pruned.requests) == (0, empty.requests)

    async def test_a_deleted_memory_counts_nothing(self, journal: Journal) -> None:
        await journal.create_memory(record("u2", "other"), ())
        alone = await bytes_of(journal)
        await journal.create_memory(record("u3", "third"), ())
        await journal.own_memory("u3")
        rows = tuple(row(fragment(place)) for place in range(3))
        await journal.commit(replace(transition(1, rows=rows), memory="u3"))
        assert (await bytes_of(journal)).total > alone.total
        await journal.delete_memory("u3")
        assert await bytes_of(journal) == alone

    async def test_labels_and_policy_of_a_memory_count(self, journal: Journal) -> None:
        before = await bytes_of(journal)
        await journal.commit(transition(1, labels=(("team", "茶" * 1_000),)))
        labelled = await bytes_of(journal)
        assert labelled.memories - before.memories > 2_900
        await journal.commit(transition(2, labels=()))
        assert (await bytes_of(journal)).memories <= before.memories

    async def test_producers_and_conflicts_count(self, journal: Journal) -> None:
        before = await bytes_of(journal)
        await journal.open_producer("u1", 1, "q")
        suspected = (Suspicion(fragment(1).id, fragment(0).id, ConflictReason.TWINS, 1),)
        rows = (row(fragment(0)), row(fragment(1)))
        events = await bytes_of(journal)
        await journal.commit(transition(1, rows=rows, suspicions=suspected))
        assert (await bytes_of(journal)).requests > before.requests
        assert (await bytes_of(journal)).history > events.history

    async def test_what_stores_nothing_is_no_namespace(self, journal: Journal) -> None:
        await journal.put_answer(Answer("drama\nDo\nr1", b"d", b"done", 1))
        assert await journal.list_namespaces("", 9) == [("comedy", 1), ("drama", 0)]
        assert await journal.list_namespaces("comedy", 9) == [("drama", 0)]
        await journal.prune_answers(10)
        await journal.create_memory(record("s1", "job.joy", ""), (Event(EventType.MEMORY_CREATED, ""),))
        assert await journal.list_namespaces("", 9) == [("comedy", 1)]

    async def test_an_unpublished_memory_counts_under_its_own_name(self, journal: Journal) -> None:
        before = await bytes_of(journal)
        await journal.create_memory(record("s1", "job.joy", ""), (Event(EventType.MEMORY_CREATED, ""),))
        await journal.own_memory("s1")
        await journal.commit(replace(transition(1, rows=(row(fragment(0)),)), memory="s1"))
        staged = await bytes_of(journal, staged_name("job.joy"))
        assert (await bytes_of(journal), staged.fragments > 0) == (before, True)
        await journal.commit(replace(transition(2, name=("comedy", "sorrow")), memory="s1"))
        assert await journal.read_bytes([staged_name("job.joy")]) == {}
        assert (await bytes_of(journal)).fragments == before.fragments + staged.fragments

    async def test_a_discarded_memory_leaves_no_count(self, journal: Journal) -> None:
        await journal.create_memory(record("s1", "job.joy", ""), (Event(EventType.MEMORY_CREATED, ""),))
        await journal.delete_memory("s1")
        assert await journal.read_bytes([staged_name("job.joy")]) == {}

    async def test_the_largest_namespace_is_found(self, journal: Journal) -> None:
        await journal.create_memory(record("d1", "joy", "drama"), ())
        await journal.own_memory("d1")
        await journal.commit(replace(transition(1, rows=(row(fragment(0)),)), memory="d1"))
        await journal.commit(recalling(1, receipt_of(1)))
        comedy, drama = await bytes_of(journal), await bytes_of(journal, "drama")
        assert await journal.largest_bytes() == (max(comedy.total, drama.total), comedy.receipts)
