"""A client and the event loops of its program: none, one after another, and two at once."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import memstream
import memstream.public
from memstream import any_loop
from tests.server.conftest import shared
from tests.support.server import ServerProcess

__all__ = ["shared"]  # fixture


@pytest.fixture
def client(shared: ServerProcess) -> memstream.Client:
    """Created without a running loop, as at the top of a module."""
    return memstream.connect(shared.address, timeout_s=60.0)


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
            await asyncio.wait_for(call(), 60)

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
            await asyncio.wait_for(call(), 60)

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


def test_any_loop_knows_every_class_with_coroutines() -> None:
    kinds = [each for each in vars(memstream.public).values() if inspect.isclass(each)]
    found = {
        f"{each.__module__}.{each.__qualname__}".removeprefix("memstream.")
        for each in kinds
        if any(inspect.iscoroutinefunction(member) for _, member in inspect.getmembers_static(each))
        or hasattr(each, "__await__")
    }
    assert found == {*any_loop.HANDLES, "local_client.Opening"}  # which gives the client of the running loop


def test_any_loop_serves_loops_at_once_and_in_turn(shared: ServerProcess, path: str) -> None:
    client = memstream.connect(shared.address, any_loop=True)
    shared_ones: dict[str, Any] = {}

    async def open_streams() -> None:
        memory = shared_ones["memory"] = await client.create_memory(path)
        shared_ones["stream"] = await memory.observe("p").__aenter__()
        shared_ones["recall"] = await memory.recall().__aenter__()
        shared_ones["watch"] = await memory.watch(start="beginning").__aenter__()
        shared_ones["standing"] = await shared_ones["recall"].subscribe("tea").__aenter__()

    def use_in_a_loop(number: int) -> None:
        async def use() -> None:
            sent = await shared_ones["stream"].send(f"tea number {number}")
            assert (await sent).sequence >= 1
            assert len(await shared_ones["recall"].query("tea")) >= 1
            assert (await anext(shared_ones["watch"])).type
            assert f"tea number {number}" in [one.content async for one in shared_ones["memory"].list_fragments()]
            assert path in [f"{one.namespace}/{one.name}" async for one in client.list_memories(path.split("/")[0])]

        asyncio.run(use())

    async def close() -> None:
        while not len((await anext(shared_ones["standing"])).answer):
            pass
        for name in ("standing", "watch"):
            await shared_ones[name].aclose()
        for name in ("recall", "stream"):
            await shared_ones[name].close()
        async with client:
            clone = await shared_ones["memory"].clone(f"{path}-2")
            assert isinstance(clone, memstream.Memory)
            assert (await clone.describe()).revision == 1

    asyncio.run(open_streams())
    raised: list[BaseException] = []

    def keep_error(number: int) -> None:
        try:
            use_in_a_loop(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=keep_error, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    use_in_a_loop(3)
    asyncio.run(close())
    with pytest.raises(memstream.StreamClosed, match="the client is closed"):
        asyncio.run(shared_ones["memory"].stats())


def test_any_loop_takes_a_source_of_the_callers_loop(shared: ServerProcess, path: str) -> None:
    client = memstream.connect(shared.address, any_loop=True)
    namespace = path.split("/")[0]

    async def copy() -> None:
        memory = await client.create_memory(path)
        await memory.observe_batch(["one", "two"])
        parts: list[memstream.ExportPart] = [part async for part in client.export(namespace, path.split("/")[1])]
        home = asyncio.get_running_loop()

        async def source() -> AsyncIterator[bytes]:
            for part in parts:
                assert asyncio.get_running_loop() is home
                yield part.lines

        moved = f"{namespace}2"
        operation = await client.import_(moved, source())
        await client.finished(operation)
        copied = client.memory(f"{moved}/{path.split('/')[1]}")
        assert [one.content async for one in copied.list_fragments()] == ["one", "two"]
        await client.close()

    asyncio.run(copy())


def test_a_cancelled_wait_on_any_loop_is_the_callers(shared: ServerProcess, path: str) -> None:
    client = memstream.connect(shared.address, any_loop=True)

    async def wait_in_vain() -> None:
        memory = await client.create_memory(path)
        async with memory.watch() as watch:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(watch)
            await memory.observe_batch(["tea"])
            assert (await anext(watch)).fragment_id
        await client.close()

    asyncio.run(wait_in_vain())


def test_the_blocking_client_gives_an_asynchronous_one(shared: ServerProcess, path: str) -> None:
    with memstream.sync.connect(shared.address) as client:
        made = client.create_memory(path)
        both = client.asynchronous.memory(path)
        assert asyncio.run(both.describe()) == made.describe()


async def taken(items: AsyncIterator[Any]) -> None:
    """The items that were read ahead, and then the end."""
    async for _ in items:
        pass


async def _stored(sent: memstream.Sent) -> memstream.Stored:
    return await sent
