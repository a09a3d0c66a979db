"""A conversation feeds a memory: each message becomes an observation, exactly once."""

from __future__ import annotations

import asyncio
import json
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest

import memstream
from memstream import Conversation, Fragment, NewMessage, Role
from memstream_server.core.filters import Listing
from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import MemoryKind
from memstream_server.engine.requests import NewMemory
from memstream_server.ports.conversation_records import ConversationChange
from memstream_server.ports.conversations import ConversationName, Message, Precondition
from tests.engine.assembled import assembled, hasty
from tests.server.conftest import QUICK, check_log
from tests.support.faulty_journal import Fault
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until

__all__ = ["hasty"]


@pytest.fixture
async def joy(client: memstream.Client) -> memstream.Memory:
    return await client.create_memory(f"t-{uuid.uuid4().hex[:12]}/joy")


async def is_fed(talk: Conversation) -> bool:
    about = await talk.describe()
    return about.fed_number == about.last_number


async def fragments(memory: memstream.Memory) -> list[Fragment]:
    return [one async for one in memory.list_fragments()]


async def test_messages_become_observations(client: memstream.Client, joy: memstream.Memory) -> None:
    talk, said = client.conversation(f"{joy.namespace}/monday"), datetime(2024, 5, 1, tzinfo=UTC)
    await talk.append_messages([NewMessage(role="user", name="Bob", content="I live in Lyon", time=said)])
    await talk.update(feed_memory="joy")  # what was said before, too
    parts = [{"type": "text", "text": "So do"}, {"type": "image_url", "image_url": {"url": "x"}}, {"text": "I"}]
    await talk.append_messages(
        [
            NewMessage(role="assistant", body=json.dumps({"role": "assistant", "content": parts})),
            NewMessage(role="assistant", body='{"type": "function_call", "call_id": "c1"}'),
            NewMessage(role="tool", body='{"output": 1, "text": "sunny"}', metadata={"k": 1}),
            NewMessage(role="odd", body=json.dumps("x" * 40_000)),
            NewMessage(role="odd", body='{"content": "long", "n": ' + "9" * 5_000 + "}"),
            NewMessage(role="odd", body='"half \\ud83d"'),
            NewMessage(role="odd", body='{"content": {"content": {"content": {"content": {"content": "deep"}}}}}'),
            NewMessage(role="human", content="Bye"),
        ]
    )
    await until(lambda: is_fed(talk))
    found = await fragments(joy)
    assert [(one.external_id, one.role, one.speaker, one.content) for one in found] == [
        ("monday#1", Role.USER, "Bob", "I live in Lyon"),
        ("monday#2", Role.ASSISTANT, "", "So do\nI"),
        ("monday#4", Role.TOOL, "", "sunny"),
        ("monday#7", None, "", "half ?"),
        ("monday#9", Role.USER, "", "Bye"),
    ]
    assert {one.session for one in found} == {"monday"}
    assert (found[0].observe_time, found[2].metadata) == (said, {"k": 1})
    assert found[1].observe_time == (await talk.message(2)).create_time


async def test_changed_messages_leave_fragments_alone(client: memstream.Client, joy: memstream.Memory) -> None:
    talk = client.conversation(f"{joy.namespace}/monday")
    await talk.update(feed_memory="joy", create=True)
    await talk.append_messages([NewMessage(content=f"the number {number}") for number in range(1, 4)])
    await until(lambda: is_fed(talk))
    before = await fragments(joy)
    await talk.replace_message(2, NewMessage(content="another one"))
    await talk.truncate(3)
    await talk.update(feed_memory="")
    await talk.append_messages([NewMessage(content="without a feed")])
    forked = await talk.fork("tuesday")
    assert (await fragments(joy), forked.feed_memory) == (before, "")
    await talk.update(feed_memory="joy")  # again from the first message: the same external ids
    await until(lambda: is_fed(talk))
    again = {one.external_id: one.content for one in await fragments(joy)}
    assert again == {
        "monday#1": "the number 1",
        "monday#2": "another one",
        "monday#3": "the number 3",
        "monday#4": "without a feed",
    }


async def test_a_feed_waits_for_its_memory(client: memstream.Client, joy: memstream.Memory) -> None:
    waiting, other = (client.conversation(f"{joy.namespace}/{name}") for name in ("monday", "tuesday"))
    await waiting.update(feed_memory="bob", create=True)
    await other.update(feed_memory="joy", create=True)
    for talk in (waiting, other):
        await talk.append("ann", "good morning")
    await until(lambda: is_fed(other))
    assert not await is_fed(waiting)
    bob = await client.create_memory(f"{joy.namespace}/bob")
    await other.append("ann", "and good night")  # what makes the server look
    await until(lambda: is_fed(waiting))
    assert [one.content for one in await fragments(bob)] == ["good morning"]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("fault", list(Fault))
async def test_a_failed_commit_feeds_each_message_once(tmp_path: Path, fault: Fault) -> None:
    talk = ConversationName("test", "monday")
    async with assembled(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, DEFAULT))
        store, feeds = parts.stored.conversations, parts.engine.feeds
        await feeds.stop()
        await store.update_conversation(talk, ConversationChange(feed_memory="joy", allow_missing=True), 1)
        said = [Message(role="user", content=f"number {number}") for number in range(100)]
        await store.append_messages(talk, said, Precondition(), 2)
        parts.journal.fail_at(2, fault, "commit")  # of the second page

        async def all_fed() -> bool:
            await feeds.run_round()
            return (await store.get_conversation(talk)).fed_number == 100

        await until(all_fed)
        assert parts.journal.failed == "commit"
        listed = (await parts.engine.fragments.list_page("test", "joy", Listing(), -1, 1_000))[0]
        assert [one.content for one in listed] == [one.content for one in said]
        assert len({one.version for one in listed}) <= 2  # a revision for each page: nothing was put again


async def test_messages_are_fed_once_over_kills(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", free_address(), **QUICK) as server:
        async with memstream.connect(server.address) as client:
            joy = await client.create_memory("comedy/joy")
            await client.conversation(f"{joy.namespace}/monday").update(feed_memory="joy", create=True)
        count = 0
        for turn in range(3):
            # Channels with the same settings share their connection, and with it the pause after a kill.
            async with memstream.connect(server.address, keepalive_s=61.0 + turn) as client:
                talk = client.conversation("comedy/monday")
                for _ in range(40):
                    await talk.append_messages(
                        [NewMessage(role="user", content=f"number {count}", client_id=str(count))]
                    )
                    count += 1
                await until(lambda talk=talk: has_begun(talk))  # type: ignore[misc]
            server.kill()
            await asyncio.to_thread(server.start)
        async with memstream.connect(server.address, keepalive_s=65.0) as client:
            await until(lambda: is_fed(client.conversation("comedy/monday")))
            found = [one async for one in client.memory("comedy/joy").list_fragments()]
            assert [one.content for one in found] == [f"number {number}" for number in range(count)]
            for one in found[::10]:
                events = [event.type async for event in client.memory("comedy/joy").fragment_events(one.id)]
                assert memstream.EventType.UPDATED not in events
    check_log(server)


async def has_begun(talk: Conversation) -> bool:
    return (await talk.describe()).fed_number > 0
