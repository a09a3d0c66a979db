"""Quotas of stored data: memories of a namespace, fragments of a memory."""

from __future__ import annotations

import asyncio

import grpc
import pytest

import memstream
from memstream import MemoryKind, Observation, OperationState
from tests.server.conftest import MakeServer, restarted, started
from tests.server.listing import contents
from tests.server.test_transfer import chunks, exported

LIMIT = 10


async def test_concurrent_creates_respect_the_memory_quota(make_server: MakeServer) -> None:
    server = await started(make_server(namespace_memories_max=3))
    async with memstream.connect(server.address) as client:
        first = await client.create_memory("full/m0")
        made = [client.create_memory(f"full/m{number}") for number in range(1, 9)]
        results = await asyncio.gather(*made, return_exceptions=True)
        refused = [one for one in results if isinstance(one, memstream.QuotaExceeded)]
        assert (len(refused), len(results)) == (6, 8)
        assert refused[0].details == {"quota": "namespace_memories_max", "limit": "3"}
        assert refused[0].retry_after == 60
        assert [one.memories async for one in client.list_namespaces()] == [3]

        assert (await client.create_memory("full/m0", exist_ok=True)).name == "m0"
        with pytest.raises(memstream.QuotaExceeded):
            await first.clone("full/copy")
        await first.clone("other/copy")
        await first.delete()
        await client.create_memory("full/m9")


async def test_import_respects_quotas(make_server: MakeServer) -> None:
    server = await started(make_server(namespace_memories_max=1, memory_fragments_max=LIMIT))
    open_ = await started(make_server("open"))
    async with memstream.connect(server.address) as client, memstream.connect(open_.address) as source:
        for name, count in (("small", LIMIT), ("large", LIMIT + 1)):
            memory = await source.create_memory(f"{name}/joy", kind=MemoryKind.LONG_TERM)
            await memory.observe_batch([f"number {number}" for number in range(count)])
        small, large = [await exported(source, name) for name in ("small", "large")]

        with pytest.raises(memstream.QuotaExceeded) as raised:
            await client.import_("a", chunks(large))
        assert raised.value.details == {"quota": "memory_fragments_max", "limit": "10"}
        assert (await client.finished(await client.import_("a", chunks(small)))).state is OperationState.SUCCEEDED
        assert len(await contents(client.memory("a/joy"))) == LIMIT
        with pytest.raises(memstream.QuotaExceeded):
            await client.finished(await client.import_("a", chunks(small), memory="sue"))
        assert [one.memories async for one in client.list_namespaces()] == [1]


async def test_full_memory_refuses_new_and_accepts_repeated(make_server: MakeServer) -> None:
    server = await started(make_server(memory_fragments_max=LIMIT))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("full/joy", kind=MemoryKind.LONG_TERM)
        async with memory.observe("p") as stream:
            sent = [await stream.send(f"number {number}", external_id=f"n{number}") for number in range(LIMIT + 5)]
            await stream.flush()
            assert [one.sequence for one in stream.rejected] == [11, 12, 13, 14, 15]
            with pytest.raises(memstream.QuotaExceeded) as raised:
                await sent[-1]
            assert raised.value.details == {"quota": "memory_fragments_max", "limit": "10"}
            assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            await stream.send("number 3 anew", external_id="n3")
            await stream.flush()
            assert stream.rejected_count == 5
            for refusing in (
                memory.observe_batch(["one more"]),
                memory.put_fragment("one more", external_id="more"),
            ):
                with pytest.raises(memstream.QuotaExceeded):
                    await refusing
            await memory.put_fragment("number 4 anew", external_id="n4")
            gone = [one.id async for one in memory.list_fragments() if one.content in ("number 8", "number 9")]
            await client.finished(await memory.erase_fragments(gone))
            await stream.send("room again")
            await memory.put_fragment("room again by a call", external_id="call")
            await stream.flush()
            assert stream.rejected_count == 5
        assert sorted(await contents(memory)) == sorted(
            [f"number {number}" for number in (0, 1, 2, 5, 6, 7)]
            + ["number 3 anew", "number 4 anew", "room again", "room again by a call"]
        )


async def test_rejection_is_kept_for_a_later_producer(make_server: MakeServer) -> None:
    server = await started(make_server(memory_fragments_max=2))
    said = ["one", "two", "three"]
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("full/joy", kind=MemoryKind.LONG_TERM)
        first = await memory.observe_batch(said, producer="p", first_sequence=1)
    await restarted(server)
    async with memstream.connect(server.address) as client:
        memory = client.memory("full/joy")
        again = await memory.observe_batch(said, producer="p", first_sequence=1)
        assert sorted(await contents(memory)) == ["one", "two"]
    for result in (first, again):
        assert [(one.sequence, one.error.details["limit"]) for one in result.rejected] == [(3, "2")]


async def test_concurrent_writers_fill_memory_exactly(make_server: MakeServer) -> None:
    """Pending observations count: no place is taken twice, and none stays free while a writer is refused."""
    server = await started(make_server(memory_fragments_max=500))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("full/joy", kind=MemoryKind.LONG_TERM)

        async def produce(name: str) -> int:
            async with memory.observe(name) as stream:
                for number in range(200):
                    await stream.send(f"{name} said {number}")
                await stream.flush()
                return stream.rejected_count

        async def put(number: int) -> int:
            try:
                await memory.put_fragment(Observation(f"put {number}"), external_id=f"put-{number}")
            except memstream.Exhausted:
                return 1
            return 0

        refused = await asyncio.gather(*(produce(f"p{number}") for number in range(4)), *(put(n) for n in range(50)))
        assert len(await contents(memory)) == 500
        assert sum(refused) == 350
