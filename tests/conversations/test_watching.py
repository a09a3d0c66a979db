"""Watches of conversations: what a watch yields does not depend on when it polls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from memstream_server.engine import conversations
from memstream_server.engine.conversations import Conversations
from memstream_server.engine.runtime.clock import Clock
from memstream_server.ports.conversations import ConversationName, Message, MessageQuery
from tests.support import journals

TALK = ConversationName("comedy", "monday")


@pytest.fixture
async def talks(tmp_path: Path) -> AsyncIterator[Conversations]:
    journal = await journals.open_test_journal(tmp_path / "data", Clock().now_us, reserve_bytes=0)
    yield Conversations(journal.conversations, journal, Clock(), quiet_s=3_600.0)  # only a notification wakes a watch
    await journal.close()


async def say(talks: Conversations, times: int = 1) -> None:
    for _ in range(times):
        await talks.append_message(TALK, Message("joy"))


async def rest(talks: Conversations, after: int = 0) -> list[int]:
    async with asyncio.timeout(30):
        return [message.number async for page in talks.watch(TALK, after) for message in page]


async def test_watch_sees_completion_between_polls(talks: Conversations) -> None:
    await say(talks)
    watch = talks.watch(TALK, 0)
    assert [message.number for message in await anext(watch)] == [1]
    await say(talks)
    await talks.complete(TALK)
    await say(talks)
    async with asyncio.timeout(30):
        assert [message.number async for page in watch for message in page] == [2]


async def test_watch_ignores_completion_before_it_began(talks: Conversations) -> None:
    await say(talks)
    await talks.complete(TALK)
    await say(talks)
    watch = talks.watch(TALK, 0)
    assert [message.number for message in await anext(watch)] == [1, 2]
    await talks.complete(TALK)
    async with asyncio.timeout(30):
        assert [page async for page in watch] == []


async def test_write_wakes_watches_of_its_conversation(talks: Conversations) -> None:
    ending = [asyncio.create_task(rest(talks)) for _ in range(3)]
    await asyncio.sleep(0.1)  # lets the watches wait; without it the test is weaker, not wrong
    await talks.append_message(ConversationName("comedy", "tuesday"), Message("joy"))
    await say(talks, 2)
    await talks.complete(TALK)
    assert await asyncio.gather(*ending) == [[1, 2]] * 3
    assert not talks._waiting


async def test_watch_pages_to_the_end(talks: Conversations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "PAGE", 2)
    await say(talks, 4)
    await talks.complete(TALK)
    assert await rest(talks) == [1, 2, 3, 4]
    assert await rest(talks, 3) == [4]
    await say(talks, 3)
    await talks.complete(TALK)
    assert await rest(talks) == [1, 2, 3, 4, 5, 6, 7]


async def test_deleted_messages_do_not_block_watch(talks: Conversations) -> None:
    await say(talks, 3)
    await talks.delete_messages(TALK)
    await talks.complete(TALK)
    assert await rest(talks) == []
    assert await talks.list_messages(TALK, MessageQuery()) == []


async def test_message_of_cancelled_sender_wakes_watches(talks: Conversations) -> None:
    """The write is committed even if its caller is cancelled; without a notification the watch polls after quiet_s."""
    ending = asyncio.create_task(rest(talks))
    await asyncio.sleep(0.1)
    for writing in (talks.append_message(TALK, Message("joy")), talks.complete(TALK)):
        leaving = asyncio.create_task(writing)
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert leaving.cancelled()
    async with asyncio.timeout(60):
        assert await ending == [1]
