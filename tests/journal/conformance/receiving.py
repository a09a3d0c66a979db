"""Producers and receipts, and how repeats are detected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from memstream_server.adapters.journal.sql import writes
from memstream_server.core.events import EventType
from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import Tier
from memstream_server.ports.journal.errors import StaleWrite
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import KeptReceipt
from memstream_server.ports.journal.records import Answer, Producer
from memstream_server.ports.journal.writing import Access, Accesses, BatchReceipt, Outcome, Outcomes, Rejection
from tests.journal.samples import DAY_US, MODEL, Now, digest, fragment, image, receipt, record, row, transition


class Receiving:
    """See suite.py."""

    async def test_receipt_is_pending_unchanged_until_stored(self, journal: Journal) -> None:
        first, second = receipt(1, 3, 0, rejected=(2,)), receipt(4, 2, 2)
        await asyncio.gather(journal.receive(first), journal.receive(second))
        found = await image(journal)
        assert found.pending == (first, second)
        assert found.next_position == 4
        assert found.producers == (Producer("p", 1, received=5, stored=0),)
        assert (await journal.count_fragments("u1")).pending == 4
        assert await journal.pending_memories() == ["u1"]
        await journal.commit(transition(1, stored_positions=(0,), producers=(("p", 3),)))
        found = await image(journal)
        assert found.pending == (second,)
        assert found.producers == (Producer("p", 1, received=5, stored=3),)
        await journal.commit(transition(2, stored_positions=(2,), producers=(("p", 5),)))
        assert (await image(journal)).pending == ()
        assert await journal.pending_memories() == []

    @pytest.mark.parametrize("wrong", [receipt(2, 1, 0), receipt(0, 1, 0), receipt(1, 1, 0, epoch=2)])
    async def test_gap_repeat_and_older_stream_are_refused(self, journal: Journal, wrong: BatchReceipt) -> None:
        with pytest.raises(StaleWrite):
            await journal.receive(wrong)
        assert (await image(journal)).pending == ()
        await journal.receive(receipt(1, 1, 0))

    async def test_reopened_producer_ends_older_stream(self, journal: Journal) -> None:
        await journal.receive(receipt(1, 2, 0))
        assert await journal.open_producer("u1", 1, "p") == Producer("p", 2, received=2, stored=0)
        with pytest.raises(StaleWrite):
            await journal.receive(receipt(3, 1, 2))
        await journal.receive(receipt(3, 1, 2, epoch=2))
        assert await journal.open_producer("u1", 1, "q") == Producer("q", 1)

    async def test_commit_can_receive_a_batch(self, journal: Journal) -> None:
        first = receipt(1, 2, 0)
        told = {"receipts": (first,)}
        await journal.commit(transition(1, rows=(row(fragment(0)),), **told))  # the second one's row is not new
        found = await image(journal)
        assert (found.pending, found.next_position, found.record.revision) == ((), 2, 2)
        assert found.producers == (Producer("p", 1, received=2, stored=2),)
        assert await journal.received_hashes("u1", "p", 1, 9) == [(n, digest(n), None) for n in (1, 2)]
        await journal.receive(receipt(3, 1, 2))

    @pytest.mark.parametrize("wrong", [receipt(2, 1, 0), receipt(0, 1, 0), receipt(1, 1, 0, epoch=2)])
    async def test_commit_with_invalid_receipt_stores_nothing(self, journal: Journal, wrong: BatchReceipt) -> None:
        told = {"receipts": (wrong,)}
        with pytest.raises(StaleWrite):
            await journal.commit(transition(1, rows=(row(fragment(0)),), **told))
        found = await image(journal)
        assert (found.record.revision, found.next_position, found.producers) == (1, 0, (Producer("p", 1),))
        assert await journal.get_fragments("u1", [fragment(0).id]) == []
        await journal.commit(transition(1, rows=(row(fragment(0)),)))

    @pytest.mark.parametrize("refused", [False, True])
    async def test_grouped_writes_equal_single_writes(self, journal: Journal, refused: bool) -> None:
        for uid, name in (("u2", "sad"), ("u3", "calm")):
            await journal.create_memory(record(uid, name), ())
            await journal.own_memory(uid)
            await journal.open_producer(uid, 1, "p")
        ada = Answer("comedy\nPut\nr1", b"digest", b"response", 7)
        stored = {"stored_positions": (0,), "producers": (("p", 2),)}
        more = {"rows": (row(fragment(5)),), "policy": replace(DEFAULT, language="german"), "answer": ada}
        writes: list[Awaitable[None]] = [
            journal.receive(receipt(1, 2, 0)),
            journal.receive(replace(receipt(1, 1, 0), memory="u2")),
            journal.receive(replace(receipt(1, 3, 0, rejected=(2,)), memory="u3")),
            journal.commit(transition(1, rows=(row(fragment(0)), row(fragment(1))), **stored)),
            journal.commit(replace(transition(1, rows=(row(fragment(0)),)), memory="u3")),
            journal.add_accesses(Accesses("u1", 1, (Access(fragment(1).id, 2, 9_999),))),
            journal.commit(transition(2, removed=(fragment(0).id,), **more)),
            journal.receive(receipt(3, 1, 2)),
            journal.commit(replace(transition(2, reflection_aggregate=0.5), memory="u3")),
        ]
        if refused:
            writes[5:5] = [
                journal.receive(replace(receipt(7, 1, 9), memory="u2")),
                journal.commit(replace(transition(7, rows=(row(fragment(8)),)), memory="u2")),
            ]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(one) for one in outcomes if one is not None] == [StaleWrite] * 2 * refused
        for uid, revision, ids, pending, received in (
            ("u1", 3, [1, 5], (receipt(3, 1, 2),), 3),
            ("u2", 1, [], (replace(receipt(1, 1, 0), memory="u2"),), 1),
            ("u3", 3, [0], (replace(receipt(1, 3, 0, rejected=(2,)), memory="u3"),), 3),
        ):
            found = await journal.load_memory(uid, MODEL, 100)
            assert (found.record.revision, found.pending) == (revision, pending)
            assert [one.fragment.id for one in found.rows] == [fragment(each).id for each in ids]
            assert found.producers == (Producer("p", 1, received=received, stored=2 if uid == "u1" else 0),)
            assert len(await journal.list_events(uid, 0, 9)) == revision
        (known,) = await journal.get_fragments("u1", [fragment(1).id])
        assert (known.access_count, known.access_time_us) == (2, 9_999)
        assert (await image(journal)).record.policy.language == "german"
        assert (await journal.load_memory("u3", MODEL, 0)).record.reflection_aggregate == 0.5

    async def test_unsequenced_writes_keep_no_receipts(self, journal: Journal) -> None:
        one = replace(receipt(1, 2, 0), producer="", producer_epoch=0)
        await journal.receive(one)
        await journal.receive(replace(one, position=2, fragments=(fragment(2), fragment(3))))
        found = await image(journal)
        assert [pending.position for pending in found.pending] == [0, 2]
        assert found.producers == (Producer("p", 1),)

    async def test_rejected_batch_is_stored_after_earlier_batches(self, journal: Journal) -> None:
        await journal.receive(receipt(1, 1, 0, rejected=(1,)))
        assert (await image(journal)).producers == (Producer("p", 1, received=1, stored=1),)
        await journal.receive(receipt(2, 1, 1))
        await journal.receive(receipt(3, 2, 2, rejected=(3, 4)))
        found = await image(journal)
        assert [pending.first_sequence for pending in found.pending] == [2]
        assert found.producers == (Producer("p", 1, received=4, stored=1),)
        assert found.next_position == 3
        await journal.commit(transition(1, stored_positions=(1,), producers=(("p", 2),)))
        assert (await image(journal)).producers == (Producer("p", 1, received=4, stored=4),)
        assert (await journal.open_producer("u1", 1, "p")).stored == 4

    async def test_hashes_and_rejections_outlive_storing(self, journal: Journal) -> None:
        await journal.receive(receipt(1, 3, 0, rejected=(2,)))
        await journal.receive(receipt(4, 3, 2))
        await journal.commit(transition(1, stored_positions=(0, 2), producers=(("p", 6),)))
        refused = Rejection(2, 3, "CONTENT_EMPTY", "empty", {"limit": "1"})
        assert await journal.received_hashes("u1", "p", 2, 4) == [
            (2, digest(2), refused),
            (3, digest(3), None),
            (4, digest(4), None),
        ]
        assert await journal.received_hashes("u1", "p", 6, 99) == [(6, digest(6), None)]
        assert await journal.received_hashes("u1", "p", 7, 99) == []
        assert await journal.received_hashes("u1", "other", 1, 9) == []

    async def test_outcomes_are_kept_with_receipts(self, journal: Journal) -> None:
        first, second = receipt(1, 3, 0, rejected=(2,)), receipt(4, 2, 2)
        refused = replace(receipt(6, 1, 4, rejected=(6,)), outcomes=True)
        for one in (first, second, refused):
            await journal.receive(one)
        assert [kept.outcomes for kept in await journal.kept_receipts("u1", "p", 0, 9)] == [None, None, ()]
        became = (
            Outcome(1, fragment(0).id, EventType.OBSERVED, "", Tier.SENSORY),
            Outcome(3, fragment(1).id, EventType.REPEATED, fragment(0).id, None),
        )
        stored = transition(1, stored_positions=(0, 2), producers=(("p", 5),))
        await journal.commit(replace(stored, outcomes=(Outcomes("p", 3, became),)))
        kept = await journal.kept_receipts("u1", "p", 0, 9)
        assert kept[0] == KeptReceipt(1, 3, first.rejections, became)
        assert [(one.first_sequence, one.last_sequence) for one in kept] == [(1, 3), (4, 5), (6, 6)]
        assert await journal.kept_receipts("u1", "p", 3, 1) == [KeptReceipt(4, 5, (), None)]
        assert await journal.kept_receipts("u1", "nobody", 0, 9) == []
        assert await journal.last_without_outcomes("u1", "p", 0, 6) == 5
        assert await journal.last_without_outcomes("u1", "p", 0, 3) == 0
        assert await journal.last_without_outcomes("u1", "p", 5, 6) == 0
        await journal.commit(transition(2, producers=(("p", 6),), erased=("01J" + "A" * 23,)))
        assert await journal.kept_receipts("u1", "p", 0, 9) == []

    async def test_answer_is_written_with_receipt_or_commit(self, journal: Journal, now: Now) -> None:
        empty = Answer("comedy\nObserve\nr1", b"d", b"", now.us)
        unnumbered = replace(receipt(1, 2, 0), producer="", producer_epoch=0, answer=empty)
        await journal.receive(unnumbered)
        assert (await journal.get_answer(empty.request), (await image(journal)).pending) == (empty, (unnumbered,))
        whole = replace(empty, response=b"whole")
        await journal.commit(transition(1, stored_positions=(0,), answers=(whole,)))
        assert await journal.get_answer(empty.request) == whole
        at_once = replace(whole, request="comedy\nObserve\nr2")
        await journal.commit(transition(2, answers=(at_once,)))
        later = replace(whole, request="comedy\nObserve\nr3")
        await journal.put_answer(later)
        assert [await journal.get_answer(one.request) for one in (at_once, later)] == [at_once, later]

    async def test_expired_answers_are_pruned(self, journal: Journal, now: Now) -> None:
        for number in range(5):
            await journal.put_answer(Answer(f"comedy\nDo\n{number}", b"d", b"r", now.us + number))
        assert await journal.prune_answers(9) == 0
        now.us += DAY_US + 4
        assert await journal.prune_answers(3) == 3
        assert await journal.prune_answers(3) == 1
        assert await journal.get_answer("comedy\nDo\n4") is not None

    async def test_open_stream_drops_old_hashes(self, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writes, "SEQUENCES_KEPT", 20)
        monkeypatch.setattr(writes, "COMPACT_EVERY", 10)
        for number in range(1, 101):
            await journal.receive(receipt(number, 1, number))
        kept = [number for number, _, _ in await journal.received_hashes("u1", "p", 1, 200)]
        assert kept == list(range(81, 101))
