"""A client and the event loops of its program: none, one after another, and two at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import memstream
from tests.server.conftest import shared
from tests.support.server import ServerProcess

__all__ = ["shared"]  # fixture


@pytest.fixture
def client(shared: ServerProcess) -> memstream.Client:
    """Created without a running loop, as at the top of a module."""
    return memstream.connect(shared.address, timeout_s=20.0)


def test_client_serves_loops_one_after_another(client: memstream.Client, path: str) -> None:
    memory = client.memory(path)

    async def first() -> None:
        await client.create_memory(path)
        async with memory.observe("p") as stream:
            await stream.send("one")

    async def second() -> list[str]:
        async with client, memory.observe("p") as stream:
            assert stream.expected_sequence == 2
            await stream.send("two")
            await stream.flush()
            return [fragment.content async for fragment in memory.list_fragments()]

    asyncio.run(first())
    assert asyncio.run(second()) == ["one", "two"]
    with pytest.raises(memstream.StreamClosed, match="the client is closed"):
        asyncio.run(memory.stats())


CALLS: list[Callable[[memstream.Client], Any]] = [
    lambda client: client.get_memory("a/b"),
    lambda client: client.memory("a/b").stats(),
    lambda client: client.memory("a/b").observe("p").send("x"),
    lambda client: client.memory("a/b").observe("p").__aenter__(),
    lambda client: client.memory("a/b").recall().__aenter__(),
    lambda client: client.memory("a/b").recall().subscribe("x").__aenter__(),
    lambda client: client.memory("a/b").watch().__aenter__(),
    lambda client: client.conversation("a/b").watch().__aenter__(),
    lambda client: anext(client.list_memories("a")),
    lambda client: anext(client.memory("a/b").list_fragments()),
    lambda client: anext(client.export("a")),
    lambda client: client.finished("x"),
    lambda client: client.close(),
]


@pytest.mark.parametrize("call", CALLS)
def test_calls_without_a_loop_say_so(client: memstream.Client, call: Callable[[memstream.Client], Any]) -> None:
    waiting = call(client).__await__()
    with pytest.raises((memstream.EventLoopMismatch, memstream.StreamClosed)):
        waiting.send(None)


def test_streams_end_with_their_loop(client: memstream.Client, path: str) -> None:
    left: dict[str, Any] = {}

    async def leave_open() -> None:
        memory = await client.create_memory(path)
        left["stream"] = await memory.observe("p").__aenter__()
        left["recall"] = await memory.recall().__aenter__()
        left["watch"] = await memory.watch().__aenter__()
        left["standing"] = await left["recall"].subscribe("x").__aenter__()
        left["sent"] = await left["stream"].send("x")
        await client.conversation(path).append("a", "x")
        left["messages"] = await client.conversation(path).watch(1).__aenter__()

    async def use(call: Callable[[], Any]) -> None:
        with pytest.raises((memstream.StreamClosed, memstream.EventLoopMismatch)):
            await asyncio.wait_for(call(), 20)

    asyncio.run(leave_open())
    for call in (
        lambda: left["stream"].send("y"),
        lambda: left["stream"].close(),
        lambda: left["recall"].query("y"),
        lambda: left["recall"].close(),
        lambda: taken(left["watch"]),
        lambda: taken(left["messages"]),
        lambda: taken(left["standing"]),
    ):
        asyncio.run(use(call))


def test_two_loops_at_once_are_refused(client: memstream.Client, path: str) -> None:
    raised: list[BaseException] = []

    def elsewhere(call: Callable[[], Any]) -> None:
        async def called() -> None:
            await asyncio.wait_for(call(), 20)

        try:
            asyncio.run(called())
        except BaseException as error:
            raised.append(error)

    async def here() -> None:
        memory = await client.create_memory(path)
        async with memory.observe("p") as stream, memory.recall() as recall, memory.watch() as watch:
            sent = await stream.send("x")
            waiting = asyncio.ensure_future(_stored(sent))
            await asyncio.sleep(0)
            calls: list[Callable[[], Any]] = [
                memory.stats,
                lambda: stream.send("y"),
                stream.flush,
                lambda: recall.query("y"),
                lambda: anext(watch),
                client.close,
            ]
            for call in calls:
                thread = threading.Thread(target=elsewhere, args=(call,))
                thread.start()
                await asyncio.to_thread(thread.join)
            assert [type(error) for error in raised] == [memstream.EventLoopMismatch] * len(calls), raised
            assert (await waiting).sequence == 1

    asyncio.run(here())


async def taken(items: AsyncIterator[Any]) -> None:
    """The items that were read ahead, and then the end."""
    async for _ in items:
        pass


async def _stored(sent: memstream.Sent) -> memstream.Stored:
    return await sent
