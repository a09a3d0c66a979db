"""A process with more streams than a connection carries, and limits of streams that are errors at once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

import memstream
import memstream.sync
from tests.server.conftest import MakeServer, started
from tests.support.waiting import until


def list_calls(client: memstream.Client) -> list[int]:
    """The calls of each connection."""
    stubs = client._link._stubs
    assert stubs is not None
    return [each.calls for each in stubs.connections._open]


async def test_streams_beyond_a_connection_open_others(make_server: MakeServer) -> None:
    """Each connection takes 16 calls. Every stream works, a call between them is answered, and ended streams free
    their place."""
    server = await started(make_server(connection_streams_max=16))
    async with memstream.connect(server.address) as client, AsyncExitStack() as stack:
        for number in range(30):
            memory = await client.create_memory(f"agents/m{number}")
            stream = await stack.enter_async_context(memory.observe("agent"))
            recalls = await stack.enter_async_context(memory.recall())
            await (await stream.send(f"agent {number} speaks"))
            answer = await recalls.query("Who speaks?", limit=1)
            assert answer[0].fragment.content == f"agent {number} speaks"
        assert max(list_calls(client)) <= 14
        assert sum(list_calls(client)) == 60
        await stack.aclose()

        async def is_one() -> bool:
            return list_calls(client) == [0]

        await until(is_one)
        assert (await client.memory("agents/m29").recall_once("speaks"))[0].fragment.content == "agent 29 speaks"


async def test_calls_at_once_share_connections(make_server: MakeServer) -> None:
    server = await started(make_server())
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("agents/busy")
        texts = [f"call {number}" for number in range(300)]
        await asyncio.gather(*(memory.observe_batch([text]) for text in texts))
        assert sorted([each.content async for each in memory.list_fragments()]) == sorted(texts)
        assert len(list_calls(client)) <= 4


async def test_clients_of_a_process_share_no_connection(make_server: MakeServer) -> None:
    server = await started(make_server(connection_streams_max=8))
    async with AsyncExitStack() as stack:
        for number in range(4):
            client = await stack.enter_async_context(memstream.connect(server.address))
            memory = await client.create_memory(f"agents/c{number}")
            for _ in range(5):
                await stack.enter_async_context(memory.recall())


async def test_the_servers_limit_of_streams_is_an_error_at_once(make_server: MakeServer) -> None:
    """Not after a time of retries; the place of a stream that ended is free again."""
    server = await started(make_server(streams_max=2))
    patient = memstream.Retry(first_s=3_600.0)
    async with memstream.connect(server.address, retry=patient) as client:
        memory = await client.create_memory("agents/full")
        async with memory.observe("one"):
            async with memory.recall():
                with pytest.raises(memstream.QuotaExceeded) as raised:
                    async with memory.observe("two"):
                        pytest.fail("the stream is open")
                assert raised.value.details["quota"] == "streams_max"
                with pytest.raises(memstream.QuotaExceeded, match="2 streams are open"):
                    await anext(aiter(memory.watch()))
            async with memory.recall() as recalls:
                assert len(await recalls.query("anything")) == 0


def test_blocking_streams_open_further_connections(make_server: MakeServer) -> None:
    server = make_server(connection_streams_max=8).start()
    with memstream.sync.connect(server.address) as client:
        memory = client.create_memory("agents/blocking")
        streams = [memory.observe(f"agent {number}") for number in range(20)]
        for stream in streams:
            stream.__enter__()
        assert max(list_calls(client.asynchronous)) <= 7
        assert len(client.create_memory("agents/next").recall_once("anything")) == 0
        for stream in streams:
            stream.__exit__(None, None, None)
