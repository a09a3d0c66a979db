"""A resuming client gets the rejections and outcomes that it has missed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import JournalUnavailable
from memstream_server.engine.memory import producers
from memstream_server.engine.memory.ingest import ObserveSession
from memstream_server.engine.requests import (
    AckLevel,
    Missed,
    NewMemory,
    NewObservation,
    ProducerProgress,
    RejectedObservation,
)
from memstream_server.ports.operations import UNFINISHED
from tests.engine.assembled import NAMESPACE, Assembled, assembled, hasty
from tests.engine.memory import observation
from tests.support.faulty_journal import Fault
from tests.support.waiting import until

__all__ = ["hasty"]

pytestmark = pytest.mark.usefixtures("hasty")

REFUSED = RejectedObservation(3, "INVALID_FIELD", "scripted", b"r" * 16)
LINES = [observation(f"line {number} of the log") for number in range(1, 41)]


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Assembled]:
    async with assembled(tmp_path) as found:
        await found.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, DEFAULT))
        yield found


async def opened(parts: Assembled, outcomes: bool = True) -> ObserveSession:
    return await parts.engine.open_observe(NAMESPACE, "joy", "p", outcomes)


async def sent(
    session: ObserveSession, first: int, items: Sequence[NewObservation | RejectedObservation]
) -> ProducerProgress:
    await session.submit(first, items)
    return await session.wait_for_level(AckLevel.STORED, first + len(items) - 1)


async def missed(session: ObserveSession, known: int) -> tuple[list[int], list[int], list[Missed]]:
    """Rejected numbers, numbers with an outcome, and their pages."""
    pages = [page async for page in (await session.resume(known)).pages]
    rejected = [one.sequence for page in pages for one in page.rejected]
    return rejected, [one.sequence for page in pages for one in page.outcomes], pages


async def test_rejections_and_outcomes_come_back(parts: Assembled) -> None:
    session = await opened(parts)
    told = [await sent(session, 1, [LINES[0], REFUSED, LINES[1]]), await sent(session, 4, LINES[2:30])]
    again = await opened(parts)
    rejected, became, pages = await missed(again, 0)
    assert (rejected, became) == ([2], [number for number in range(1, 32) if number != 2])
    assert [one for page in pages for one in page.outcomes] == [*told[0].outcomes, *told[1].outcomes]
    assert pages[-1].upto == 31
    assert (await missed(again, 1))[:2] == ([2], list(range(3, 32)))
    assert (await missed(again, 30))[:2] == ([], [31])
    assert (await missed(again, 31))[:2] == ([], [])
    assert (await missed(again, 99))[:2] == ([], [])


async def test_outcomes_of_earlier_process_come_back(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, DEFAULT))
        session = await opened(parts)
        first = await sent(session, 1, LINES[:30])
        parts.journal.fail_at(1, Fault.LOST, "commit")
        await session.submit(31, LINES[30:])  # received, but by an earlier process once it is stored
    async with assembled(tmp_path) as parts:
        session = await opened(parts)
        _, became, pages = await missed(session, 0)
        later = await session.wait_for_level(AckLevel.STORED, 40)
        assert became + [one.sequence for one in later.outcomes] == list(range(1, 41))
        assert [one for page in pages for one in page.outcomes][:30] == list(first.outcomes)


async def test_stream_without_outcomes_keeps_none(parts: Assembled) -> None:
    await sent(await opened(parts, outcomes=False), 1, [LINES[0], REFUSED])
    await sent(await opened(parts), 3, [LINES[2], REFUSED])
    await sent(await opened(parts), 5, [REFUSED, REFUSED])
    session = await opened(parts)
    assert (await missed(session, 0))[:2] == ([2, 4, 5, 6], [3])
    since = [(await session.resume(known)).outcomes_since for known in (0, 1, 2, 3, 6)]
    assert since == [3, 3, 3, 4, 7]
    assert (await session.resume(0)).rejected_since == 1
    unasked = await opened(parts, outcomes=False)
    assert (await missed(unasked, 0))[:2] == ([2, 4, 5, 6], [])
    assert (await unasked.resume(0)).outcomes_since == 0


async def test_resumption_reports_what_is_no_longer_kept(parts: Assembled) -> None:
    session = await opened(parts)
    told = await sent(session, 1, [*LINES[:20], REFUSED])
    operation = await parts.engine.erasing.start(NAMESPACE, "joy", [told.outcomes[3].fragment], None)

    async def ended() -> bool:
        return (await parts.engine.operations.get(operation.id)).state not in UNFINISHED

    await until(ended)
    await sent(session, 22, [LINES[20], REFUSED])
    again = await opened(parts)
    resumption = await again.resume(0)
    assert (resumption.rejected_since, resumption.outcomes_since) == (22, 22)
    assert (await missed(again, 0))[:2] == ([23], [22])


async def test_pages_are_bounded(parts: Assembled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "PAGE_ITEMS", 4)
    monkeypatch.setattr(producers, "PAGE_RECEIPTS", 3)
    session = await opened(parts)
    for number in range(1, 21):
        await sent(session, number, [REFUSED if number % 3 == 0 else LINES[number]])
    again = await opened(parts)
    rejected, became, pages = await missed(again, 0)
    assert sorted(rejected + became) == list(range(1, 21))
    assert [page.upto for page in pages] == [4, 8, 12, 16, 20]
    assert max(len(page.rejected) + len(page.outcomes) for page in pages) == 4


async def test_unreadable_journal_is_reported(parts: Assembled) -> None:
    session = await opened(parts)
    await sent(session, 1, LINES[:2])
    parts.journal.fail_at(1, Fault.LOST, "kept_receipts")
    with pytest.raises(JournalUnavailable):
        await session.resume(0)
