"""Direct commits: a small batch whose client waits for *stored* skips its receipt; their failures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from memstream_server.engine.errors import JournalUnavailable, ProducerSuperseded, StorageIsFull
from memstream_server.engine.memory.actor import Actor
from memstream_server.engine.memory.ingest import AT_ONCE_MAX
from memstream_server.engine.requests import AckLevel, RejectedObservation
from tests.engine.assembled import NAMESPACE, Assembled, assembled, check, hasty, image_of
from tests.engine.test_producers import LINES, contents, create, opened, parts, sent, words
from tests.support.faulty_journal import Fault
from tests.support.waiting import until

__all__ = ["hasty", "parts"]

pytestmark = pytest.mark.usefixtures("hasty")

STORED = AckLevel.STORED
IN_ORDER = ["receive", "commit"]


def writes(parts: Assembled) -> list[str]:
    """Receipts and commits since the journal was armed or last read."""
    found = [name for name in parts.journal.written if name in IN_ORDER]
    parts.journal.written.clear()
    return found


@pytest.mark.parametrize(
    ("count", "level", "expected"),
    [
        (1, STORED, ["commit"]),
        (AT_ONCE_MAX, AckLevel.INDEXED, ["commit"]),
        (1, AckLevel.RECEIVED, IN_ORDER),
        (AT_ONCE_MAX + 1, STORED, IN_ORDER),
    ],
)
async def test_waiting_for_stored_takes_one_commit(
    parts: Assembled, count: int, level: AckLevel, expected: list[str]
) -> None:
    session = await opened(parts.engine)
    writes(parts)
    await session.submit(1, LINES[:count], level)
    progress = await session.wait_for_level(STORED, count)
    assert (progress.received, progress.stored) == (count, count)
    assert writes(parts) == expected
    assert await contents(parts.engine) == words(LINES[:count])
    again = await sent(await opened(parts.engine), 1, LINES[: count + 1])  # repeats and one new observation
    assert (again.received, again.stored) == (count + 1, count + 1)
    assert await contents(parts.engine) == words(LINES[: count + 1])


@pytest.mark.parametrize("accepted", [0, 2])
async def test_refused_items_take_no_write_of_their_own(parts: Assembled, accepted: int) -> None:
    refused = RejectedObservation(3, "INVALID_FIELD", "scripted", b"r" * 16)
    items, count = [*LINES[:accepted], refused], accepted + 1
    session = await opened(parts.engine)
    writes(parts)
    await session.submit(1, items, STORED)
    progress = await session.wait_for_level(STORED, count)
    assert (progress.received, progress.stored) == (count, count)
    assert [one.sequence for one in progress.rejected] == [count]
    assert writes(parts) == ["commit"]
    again = await opened(parts.engine)
    assert (again.opened.received, again.opened.stored) == (count, count)
    await again.submit(1, items, STORED)
    assert [one.sequence for one in again.take_progress().rejected] == [count]
    await sent(again, count + 1, LINES[accepted : accepted + 1])
    assert await contents(parts.engine) == words(LINES[: accepted + 1])


async def in_the_commit(parts: Assembled) -> None:
    async def begun() -> bool:
        return "commit" in parts.journal.written

    await until(begun)
    for _ in range(20):
        await asyncio.sleep(0)


async def test_small_batches_meanwhile_share_a_commit_in_order(parts: Assembled) -> None:
    session, other = await opened(parts.engine), await opened(parts.engine, "other")
    writes(parts)
    release = parts.journal.hold("commit")
    first = session.submit(1, LINES[:1], STORED)
    await in_the_commit(parts)
    later = [session.submit(number, LINES[number - 1 : number], STORED) for number in (2, 3)]
    later.append(other.submit(1, LINES[3:4], STORED))
    opening = asyncio.create_task(opened(parts.engine, "third"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert parts.journal.written == ["commit"]  # no batch overtakes it, not even a newer stream of its producer
    assert not any(one.done() for one in (first, *later))
    release()
    await asyncio.gather(first, *later, opening)
    progress = await session.wait_for_level(STORED, 3)
    assert (progress.received, progress.stored) == (3, 3)
    await other.wait_for_level(STORED, 1)
    assert writes(parts) == ["commit", "commit"]
    assert await contents(parts.engine) == words(LINES[:4])
    again = await sent(await opened(parts.engine), 1, LINES[:3])
    assert again.stored == 3
    assert await contents(parts.engine) == words(LINES[:4])


async def test_larger_batches_are_received_after_a_direct_commit(parts: Assembled) -> None:
    session, other = await opened(parts.engine), await opened(parts.engine, "other")
    writes(parts)
    release = parts.journal.hold("commit")
    first = session.submit(1, LINES[:1], STORED)
    await in_the_commit(parts)
    later = [session.submit(2, LINES[1 : 1 + AT_ONCE_MAX], STORED)]
    later.append(other.submit(1, LINES[1 + AT_ONCE_MAX : 2 + AT_ONCE_MAX], STORED))
    later.append(other.submit(2, LINES[2 + AT_ONCE_MAX : 3 + AT_ONCE_MAX], STORED))
    release()
    await asyncio.gather(first, *later)
    await session.wait_for_level(STORED, 1 + AT_ONCE_MAX)
    await other.wait_for_level(STORED, 2)
    assert writes(parts)[:4] == ["commit", "commit", "receive", "receive"]
    assert await contents(parts.engine) == words(LINES[: 3 + AT_ONCE_MAX])


async def test_failed_shared_commit_loses_and_doubles_nothing(parts: Assembled) -> None:
    session, other = await opened(parts.engine), await opened(parts.engine, "other")
    release = parts.journal.hold("commit")
    first = session.submit(1, LINES[:1], STORED)
    await in_the_commit(parts)
    later = [session.submit(number, LINES[number - 1 : number], STORED) for number in (2, 3)]
    independent = other.submit(1, LINES[3:4], STORED)
    parts.journal.fail_at(2, Fault.FULL, "commit")  # the first one is held
    release()
    await first
    for waiting in later:
        with pytest.raises(StorageIsFull):
            await waiting
    await independent  # the disk had space when its own turn came
    await other.wait_for_level(STORED, 1)
    assert await contents(parts.engine) == words([LINES[0], LINES[3]])
    await sent(await opened(parts.engine), 2, LINES[1:3])
    assert await contents(parts.engine) == words([LINES[0], LINES[3], *LINES[1:3]])


async def test_no_direct_commit_while_a_stream_opens(parts: Assembled) -> None:
    session, other = await opened(parts.engine), await opened(parts.engine, "other")
    release = parts.journal.hold("open_producer")
    opening = asyncio.create_task(opened(parts.engine))
    await asyncio.sleep(0)
    writes(parts)
    await session.submit(1, LINES[:1], STORED)  # if the journal refused it, all streams of the memory would end
    assert "receive" in parts.journal.written
    release()
    newer = await opening
    assert newer.opened.received == 1
    with pytest.raises(ProducerSuperseded):
        session.submit(2, LINES[1:2], STORED)
    await sent(newer, 2, LINES[1:2])
    await sent(other, 1, LINES[2:3])
    assert await contents(parts.engine) == words(LINES[:3])


async def test_full_disk_refuses_a_batch_that_succeeds_later(parts: Assembled) -> None:
    session = await opened(parts.engine)
    parts.journal.fail_at(1, Fault.FULL, "commit")
    with pytest.raises(StorageIsFull):
        await session.submit(1, LINES[:1], STORED)
    assert (await image_of(parts.engine, "joy")).producers[0].received == 0
    session = await opened(parts.engine)
    assert (session.opened.received, session.opened.stored) == (0, 0)
    await session.submit(1, LINES[:1], STORED)
    await session.wait_for_level(STORED, 1)
    assert await contents(parts.engine) == words(LINES[:1])


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.DONE, Fault.CONFLICT])
async def test_reopening_shows_whether_a_batch_was_stored(parts: Assembled, fault: Fault) -> None:
    session = await opened(parts.engine)
    parts.journal.fail_at(1, fault, "commit")
    receiving = session.submit(1, LINES[:1], STORED)
    later = session.submit(2, LINES[1:2], STORED)
    for waiting in (receiving, later):
        with pytest.raises(JournalUnavailable):
            await waiting
    session = await opened(parts.engine)
    there = 2 if fault is Fault.DONE else 0  # both arrived before the first commit began, and shared one commit
    assert (session.opened.received, session.opened.stored) == (there, there)
    await sent(session, 1, LINES[:2])
    assert await contents(parts.engine) == words(LINES[:2])


async def test_waiting_batch_fails_when_direct_commit_ends_the_actor(parts: Assembled) -> None:
    session = await opened(parts.engine)
    release = parts.journal.hold("commit")
    receiving = session.submit(1, LINES[:1], STORED)
    await in_the_commit(parts)
    parts.journal.fail_at(1, Fault.CONFLICT, "commit")
    waiting = [asyncio.create_task(parts.engine.fragments.put(NAMESPACE, "joy", line)) for line in LINES[1:3]]
    async with parts.actors.use(NAMESPACE, "joy") as actor:
        await until_taken(actor)
    release()
    with pytest.raises(JournalUnavailable):
        await receiving
    for one in waiting:
        with pytest.raises(JournalUnavailable):
            await asyncio.wait_for(one, 60.0)


async def until_taken(actor: Actor) -> None:
    """Wait until the actor runs one of two decisions and only the other one is queued."""

    async def taken() -> bool:
        return actor._inbox.qsize() == 1

    await until(taken)


async def test_direct_batch_fails_when_the_actor_ends_before_it(parts: Assembled) -> None:
    session = await opened(parts.engine)
    receiving = session.submit(1, LINES[:1], STORED)
    parts.actors.list_actors()[0].fail(JournalUnavailable("the memory ends", retry_after_s=0.1))
    with pytest.raises(JournalUnavailable):  # the waiting caller must not see a cancellation as its answer
        await receiving
    await sent(await opened(parts.engine), 1, LINES[:1])
    assert await contents(parts.engine) == words(LINES[:1])


async def test_stop_during_direct_commit_is_all_or_nothing(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        session = await opened(parts.engine)
        parts.journal.hold("commit")
        receiving = session.submit(1, LINES[:1], STORED)
        await asyncio.sleep(0)
        stopping = asyncio.create_task(parts.engine.stop())
        outcome = (await asyncio.gather(receiving, return_exceptions=True))[0]
        parts.journal.disarm()
        await stopping
    async with assembled(tmp_path) as parts:
        producer = (await image_of(parts.engine, "joy")).producers
        stored = [row.fragment.content for row in (await check(parts.engine, "joy")).rows]
        assert stored == (words(LINES[:1]) if outcome is None else [])
        assert [one.received for one in producer] in ([len(stored)], [])
        session = await parts.engine.open_observe(NAMESPACE, "joy", "p")
        await sent(session, 1, LINES[:2])
        assert await contents(parts.engine) == words(LINES[:2])
