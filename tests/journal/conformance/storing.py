"""The store: its space, reopening, scrubbing, cancelled callers."""

from __future__ import annotations

import asyncio

from memstream_server.core.values import Tier
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Space
from memstream_server.ports.journal.rows import Anchor
from tests.journal.samples import MODEL, Opener, fragment, image, receipt, row, transition, vector


class Storing:
    """See suite.py."""

    async def test_scrub_keeps_live_data(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=tuple(row(fragment(number)) for number in range(50))))
        await journal.commit(transition(2, removed=tuple(fragment(number).id for number in range(0, 50, 2))))
        before = await image(journal)
        _, load, _ = await asyncio.gather(journal.scrub_files(), image(journal), journal.commit(transition(3)))
        assert load.rows == before.rows
        await asyncio.gather(journal.scrub_files(), journal.scrub_files())
        assert (await image(journal)).rows == before.rows
        await journal.commit(transition(4, rows=(row(fragment(50)),)))
        assert len((await image(journal)).rows) == 26

    async def test_space_can_be_replaced(self, journal: Journal) -> None:
        assert await journal.get_space() is None
        await journal.set_space(Space(MODEL, 4, 64))
        await journal.set_space(Space("other", 8, 256))
        assert await journal.get_space() == Space("other", 8, 256)

    async def test_reopened_journal_has_everything(self, journal: Journal, opener: Opener) -> None:
        await journal.set_space(Space(MODEL, 4, 64))
        await journal.receive(receipt(1, 2, 0))
        kept = row(fragment(2, Tier.SHORT_TERM))
        await journal.commit(transition(1, rows=(kept,), anchors=(Anchor(kept.fragment.id, vector(1), (), MODEL),)))
        before = await image(journal)
        await journal.close()
        again = await opener()
        try:
            after = await again.load_memory("u1", MODEL, 100)
            assert (after.record, after.rows, after.pending) == (before.record, before.rows, before.pending)
            assert after.producers == before.producers
            assert await again.get_space() == Space(MODEL, 4, 64)
            assert (await again.own_memory("u1")).epoch == 2
        finally:
            await again.close()

    async def test_close_finishes_submitted_writes(self, journal: Journal, opener: Opener) -> None:
        writes = [asyncio.ensure_future(journal.receive(receipt(n, 1, n - 1))) for n in range(1, 51)]
        await asyncio.sleep(0)
        await journal.close()
        assert [write.exception() for write in writes] == [None] * 50
        again = await opener()
        try:
            assert len((await again.load_memory("u1", MODEL, 0)).pending) == 50
        finally:
            await again.close()

    async def test_cancelled_caller_does_not_affect_others(self, journal: Journal) -> None:
        first = asyncio.ensure_future(journal.receive(receipt(1, 1, 0)))
        await asyncio.sleep(0)
        first.cancel()
        await journal.receive(receipt(2, 1, 1))
        assert [pending.first_sequence for pending in (await image(journal)).pending] == [1, 2]
