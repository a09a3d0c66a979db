"""With authentication: only a caller that may recall lists standing queries, and only an administrator sees whose.
Their number is bounded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import grpc.aio
import pytest

import memstream
from memstream.v1 import memory_service_pb2 as pb
from memstream.v1 import stream_service_pb2 as stream_pb
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from memstream_server.rpc.access.opening import open_access
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.server import build_server
from memstream_server.settings import Settings
from tests.access.conftest import guarded_files
from tests.engine.conftest import open_engine
from tests.rpc.wire import RecallCall, refused
from tests.server.conftest import MakeServer, started

REQUEST = pb.ListStandingQueriesRequest(namespace="v", memory="m")


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[tuple[grpc.aio.Channel, dict[str, str]]]:
    """A channel to a server in this process with authentication, and every key by name."""
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    settings = Settings(api_keys_file=keys_file, access_policy_file=policy_file)
    async with open_engine(tmp_path / "data") as engine:
        server = build_server(engine, RequestLimits(), Drain(0.1), access=open_access(settings))
        address = await server.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(address) as channel:
            yield channel, keys
        await server.stop(0.1)


async def test_only_administrators_see_who_opened_a_query(channel: tuple[grpc.aio.Channel, dict[str, str]]) -> None:
    wire, keys = channel

    def credentials(name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {keys[name]}"),)

    memories = MemoryServiceStub(wire)
    await memories.CreateMemory(pb.CreateMemoryRequest(namespace="v", memory="m"), metadata=credentials("root"))
    call = RecallCall(StreamServiceStub(wire).Recall(metadata=credentials("only-recall")))
    await call.send(open=stream_pb.RecallOpen(namespace="v", memory="m"))
    assert (await call.next()).HasField("opened")
    await call.query("q", "where is the pomegranate?", subscribe=True)
    while not (await call.next()).HasField("done"):
        pass
    seen = {
        name: (await memories.ListStandingQueries(REQUEST, metadata=credentials(name))).queries[0]
        for name in ("only-recall", "root")
    }
    assert {name: one.query.text for name, one in seen.items()} == dict.fromkeys(seen, "where is the pomegranate?")
    assert {name: one.principal for name, one in seen.items()} == {"only-recall": "", "root": "key:only-recall"}
    for name in ("only-read", "only-write", "only-admin", "bob"):
        refusal = await refused(memories.ListStandingQueries(REQUEST, metadata=credentials(name)))
        assert refusal.code == grpc.StatusCode.PERMISSION_DENIED


async def test_standing_queries_are_bounded_at_every_level(make_server: MakeServer, tmp_path: Path) -> None:
    """Of one caller 2, of one memory 3, of the server 4; a cancelled one makes room, and other queries are answered."""
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    access = {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    limits = {"caller_standing_queries_max": 2, "memory_standing_queries_max": 3, "standing_queries_max": 4}
    server = await started(make_server(**access, **limits))
    async with AsyncExitStack() as stack:

        async def subscribe(name: str, path: str) -> memstream.StandingQuery:
            client = await stack.enter_async_context(memstream.connect(server.address, token=keys[name]))
            recalls = await stack.enter_async_context((await client.create_memory(path, exist_ok=True)).recall())
            standing = await stack.enter_async_context(recalls.subscribe("where is the pomegranate?"))
            await anext(standing)
            assert (await recalls.query("where?")).recollections == ()
            return standing

        async def refused_by(name: str, path: str) -> dict[str, str]:
            with pytest.raises(memstream.QuotaExceeded) as raised:
                await subscribe(name, path)
            assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            return dict(raised.value.details)

        first = await subscribe("alice", "a/m")
        await subscribe("alice", "a/other")
        assert await refused_by("alice", "a/other") == {"quota": "caller_standing_queries_max", "limit": "2"}
        await subscribe("root", "a/m")
        await subscribe("root", "a/m")
        assert await refused_by("bob", "b/m") == {"quota": "standing_queries_max", "limit": "4"}
        await first.aclose()
        await subscribe("bob", "b/m")
        await stack.aclose()
        for name in ("alice", "alice", "root"):
            await subscribe(name, "a/m")
        assert await refused_by("root", "a/m") == {"quota": "memory_standing_queries_max", "limit": "3"}
