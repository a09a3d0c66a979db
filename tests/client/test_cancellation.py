"""A cancelled await ends its call, and the cancellation reaches the scope that it came from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import pytest

import memstream
from tests.support.scripted_server import ScriptedServer
from tests.support.scripts import until

Work = Callable[[memstream.Client, asyncio.Event], Awaitable[object]]


async def recall_once(client: memstream.Client, _: asyncio.Event) -> None:
    """A unary call."""
    await client.memory("ns/m").recall_once("slow")


async def query(client: memstream.Client, _: asyncio.Event) -> None:
    """A query on a stream."""
    async with client.memory("ns/m").recall() as stream:
        await stream.query("slow")


async def flush(client: memstream.Client, reached: asyncio.Event) -> None:
    """An observation that the server does not acknowledge."""
    async with client.memory("ns/m").observe("p") as stream:
        sent = await stream.send("hello")
        reached.set()
        await sent


async def watch(client: memstream.Client, _: asyncio.Event) -> None:
    """A stream without events."""
    memory = await client.create_memory("ns/m", exist_ok=True)
    async for _ in memory.watch():
        pass


async def export(client: memstream.Client, reached: asyncio.Event) -> None:
    """A stream of the server that stops half-way."""
    async for _ in client.export("ns", "m"):
        reached.set()


async def import_(client: memstream.Client, _: asyncio.Event) -> None:
    """A stream of the client without an answer."""

    async def lines() -> AsyncIterator[bytes]:
        yield b"first\n"

    await client.import_("ns", lines())


REACHED: dict[Work, Callable[[ScriptedServer], object]] = {
    recall_once: lambda server: server.queries,
    query: lambda server: server.queries,
    flush: lambda _: False,
    watch: lambda server: server.watched,
    export: lambda _: False,
    import_: lambda server: server.imported,
}
"""Whether the server waits in such a call; the work itself says it of the others."""


@pytest.fixture
def held(server: ScriptedServer) -> ScriptedServer:
    """A server that answers nothing."""
    server.answering.clear()
    server.acking.clear()
    return server


async def _cancel_once_reached(
    server: ScriptedServer, work: Work, reached: asyncio.Event, cancel: Callable[[], object]
) -> None:
    await until(lambda: bool(REACHED[work](server)) or reached.is_set())
    cancel()


@pytest.mark.parametrize("work", REACHED, ids=lambda work: work.__name__)
async def test_anyio_scope_takes_its_own_cancellation(
    client: memstream.Client, held: ScriptedServer, work: Work
) -> None:
    reached = asyncio.Event()
    with anyio.CancelScope() as scope:
        canceller = asyncio.create_task(_cancel_once_reached(held, work, reached, scope.cancel))
        await work(client, reached)
    await canceller
    assert scope.cancelled_caught
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("work", REACHED, ids=lambda work: work.__name__)
async def test_timeouts_end_in_timeout_error(client: memstream.Client, held: ScriptedServer, work: Work) -> None:
    async def work_until_limit() -> None:
        reached = asyncio.Event()
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
            now_s = asyncio.get_running_loop().time()
            group.create_task(_cancel_once_reached(held, work, reached, lambda: limit.reschedule(now_s)))
            await work(client, reached)

    with pytest.raises(TimeoutError):
        await work_until_limit()
    with pytest.raises(TimeoutError), anyio.fail_after(0):
        await work(client, asyncio.Event())


@pytest.mark.parametrize("work", REACHED, ids=lambda work: work.__name__)
async def test_task_group_raises_only_the_failed_task(
    client: memstream.Client, held: ScriptedServer, work: Work
) -> None:
    reached = asyncio.Event()

    async def fail() -> None:
        await _cancel_once_reached(held, work, reached, lambda: None)
        raise KeyError("a sibling")

    async def work_with_sibling() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await work(client, reached)

    with pytest.raises(ExceptionGroup) as caught:
        await work_with_sibling()
    (error,) = caught.value.exceptions
    assert isinstance(error, KeyError)


async def test_client_works_after_cancelled_calls(client: memstream.Client, held: ScriptedServer) -> None:
    for _ in range(3):
        before = len(held.queries)
        calling = asyncio.create_task(client.memory("ns/m").recall_once("slow"))
        await until(lambda before=before: len(held.queries) > before)  # type: ignore[misc]  # bound at once
        calling.cancel("by the test")
        with pytest.raises(asyncio.CancelledError, match="by the test"):
            await calling
    held.answering.set()
    assert len(await client.memory("ns/m").recall_once("slow")) == 2
