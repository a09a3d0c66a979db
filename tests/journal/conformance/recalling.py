"""Receipts of recalls: what a commit keeps of them, and what erasing leaves."""

from __future__ import annotations

import msgspec.structs
import numpy as np

from memstream_server.core.events import Event, EventType
from memstream_server.core.policy import DBGPT, DEFAULT, with_value
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import RankedFragment, RecallReceipt
from memstream_server.ports.journal.rows import Row, Terms
from memstream_server.ports.journal.writing import Commit
from tests.journal.conformance.versioning import changing
from tests.journal.samples import MODEL, fragment, row, transition


def words(*hashes: int) -> bytes:
    return np.array(hashes, dtype="<u8").tobytes()


def receipt_of(number: int, ranked: int = 1, *asked: int) -> RecallReceipt:
    """A receipt that ranks the fragment at the position `ranked`, of a query with words of these hashes."""
    return RecallReceipt(
        id=f"R{number:025d}",
        revision=number,
        time_us=number * 10,
        now_us=number * 10 + 1,
        formula="absolute/4",
        space=MODEL,
        policy=DBGPT,
        query=b"secret",
        vector=b"\0\0\0?",
        terms=words(*asked),
        analyzer=0,
        ranking=(RankedFragment(fragment(ranked).id, 0.1 + 0.2, 0.3, 0, 0, (0.1, 1.5)),),
        names=(("recency", "dense"),),
        weights=((0.02, 1.0),),
        accesses=((fragment(ranked).id, 7),),
        principal="key:ann",
        degraded="no index",
    )


def recalling(revision: int, receipt: RecallReceipt, kept: int = 10) -> Commit:
    event = Event(EventType.RECALLED, "", receipt=receipt.id)
    return transition(revision, events=(event,), recall_receipt=receipt, recall_receipts_max=kept)


class Recalling:
    """See the module."""

    async def kept_ids(self, journal: Journal) -> list[str]:
        return [receipt.id for _, receipt in (await journal.list_recall_receipts("u1", None, 100))[0]]

    async def test_receipt_is_read_as_it_was_written(self, journal: Journal) -> None:
        one = receipt_of(1)
        await journal.commit(recalling(1, one))
        assert await journal.get_recall_receipt("u1", one.id) == one
        assert await journal.list_recall_receipts("u1", None, 9) == ([(2, one)], False)
        assert (await journal.list_events("u1", 1, 1))[0].events == (Event(EventType.RECALLED, "", receipt=one.id),)
        assert await journal.get_recall_receipt("u1", "R9") is None
        assert await journal.get_recall_receipt("u2", one.id) is None

    async def test_receipts_are_listed_from_the_latest_on(self, journal: Journal) -> None:
        for number in range(1, 5):
            await journal.commit(recalling(number, receipt_of(number)))
        page, more = await journal.list_recall_receipts("u1", None, 2)
        assert ([revision for revision, _ in page], more) == ([5, 4], True)
        page, more = await journal.list_recall_receipts("u1", 4, 2)
        assert ([revision for revision, _ in page], more) == ([3, 2], False)
        assert await journal.list_recall_receipts("u1", 2, 9) == ([], False)

    async def test_a_page_of_large_receipts_is_shorter(self, journal: Journal) -> None:
        large = bytes(3 << 20)
        for number in range(1, 4):
            await journal.commit(recalling(number, msgspec.structs.replace(receipt_of(number), query=large)))
        page, more = await journal.list_recall_receipts("u1", None, 9)
        assert ([revision for revision, _ in page], more) == ([4], True)

    async def test_receipts_beyond_the_limit_are_deleted(self, journal: Journal) -> None:
        ids = [receipt_of(number).id for number in range(1, 5)]
        for number in range(1, 5):
            await journal.commit(recalling(number, receipt_of(number), kept=2))
        assert await self.kept_ids(journal) == ids[:1:-1]
        await journal.commit(transition(5, policy=with_value(DEFAULT, "history.receipts", 1), recall_receipts_max=1))
        assert await self.kept_ids(journal) == ids[3:]
        await journal.commit(transition(6, policy=with_value(DEFAULT, "history.receipts", 0), recall_receipts_max=0))
        assert await self.kept_ids(journal) == []

    async def test_old_receipts_are_pruned(self, journal: Journal) -> None:
        for number in range(1, 4):
            await journal.commit(recalling(number, receipt_of(number)))
        assert await journal.prune_recall_receipts("u1", 20) == 1
        assert await self.kept_ids(journal) == [receipt_of(3).id, receipt_of(2).id]

    async def test_erasing_marks_rankings_and_erases_their_queries(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(1)), row(fragment(2)))))
        ranks, other = receipt_of(2, 1, 99), receipt_of(3, 2, 98)
        await journal.commit(recalling(2, ranks))
        await journal.commit(recalling(3, other))
        id_ = fragment(1).id
        await journal.commit(transition(4, removed=(id_,), erased_evidence=(id_,)))
        expected = msgspec.structs.replace(ranks, erased=(id_,), query=b"", vector=None, terms=b"")
        assert await journal.get_recall_receipt("u1", ranks.id) == expected
        assert await journal.get_recall_receipt("u1", other.id) == other

    async def test_erasing_erases_queries_that_share_a_word(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(1)), row(fragment(2)))))
        shares, other = receipt_of(2, 2, 77, 2), receipt_of(3, 2, 77, 78)
        await journal.commit(recalling(2, shares))
        await journal.commit(recalling(3, other))
        await journal.commit(transition(4, erased_evidence=(fragment(1).id,)))
        expected = msgspec.structs.replace(shares, query=b"", vector=None, terms=b"")
        assert await journal.get_recall_receipt("u1", shares.id) == expected
        assert await journal.get_recall_receipt("u1", other.id) == other

    async def test_words_of_a_version_erase_queries_too(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(Row(fragment(1), Terms(words(55), np.ones(1, "<u2").tobytes())),)))
        await journal.commit(changing(2, "changed"))
        asked = receipt_of(3, 2, 55)
        await journal.commit(recalling(3, asked))
        await journal.commit(transition(4, removed=(fragment(1).id,), erased_evidence=(fragment(1).id,)))
        found = await journal.get_recall_receipt("u1", asked.id)
        assert found is not None
        assert (found.is_query_erased, found.erased) == (True, ())

    async def test_words_of_another_analyzer_erase_the_query(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(1)), row(fragment(2)))))
        asked = msgspec.structs.replace(receipt_of(2, 2, 77), analyzer=1)
        await journal.commit(recalling(2, asked))
        await journal.commit(transition(3, erased_evidence=(fragment(1).id,)))
        expected = msgspec.structs.replace(asked, query=b"", vector=None, terms=b"")
        assert await journal.get_recall_receipt("u1", asked.id) == expected

    async def test_unknown_words_erase_every_query(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(Row(fragment(1)),)))
        await journal.commit(recalling(2, receipt_of(2, 2, 55)))
        await journal.commit(transition(3, erased_evidence=(fragment(1).id,)))
        ((_, found),), _ = await journal.list_recall_receipts("u1", None, 9)
        assert found.is_query_erased

    async def test_deleted_memory_has_no_receipts(self, journal: Journal) -> None:
        await journal.commit(recalling(1, receipt_of(1)))
        await journal.delete_memory("u1")
        assert await journal.list_recall_receipts("u1", None, 9) == ([], False)
        assert await journal.get_recall_receipt("u1", receipt_of(1).id) is None
        assert await journal.prune_recall_receipts("u1", 99) == 0
