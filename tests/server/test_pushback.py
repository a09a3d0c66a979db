"""A gRPC client's built-in retry follows the refusal's pushback: it waits that long, or does not retry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from memstream.v1 import memory_service_pb2 as memory_pb
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.fragment_pb2 import Observation
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from tests.access.conftest import guarded_files
from tests.server.conftest import MakeServer, started
from tests.support.metrics import scrape_metrics
from tests.support.server import free_address
from tests.support.waiting import until

HASTY = {
    "name": [{}],
    "retryPolicy": {
        "maxAttempts": 5,
        "initialBackoff": "0.001s",
        "maxBackoff": "0.001s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    },
}
"""Without pushback this client uses up its attempts within milliseconds."""


@asynccontextmanager
async def hasty(address: str) -> AsyncIterator[grpc.aio.Channel]:
    config = json.dumps({"methodConfig": [HASTY]})
    async with grpc.aio.insecure_channel(address, options=[("grpc.service_config", config)]) as channel:
        yield channel


async def refusals(metrics: str, rpc: str) -> float:
    seen = await asyncio.to_thread(scrape_metrics, metrics)
    return seen.get(f'memstream_calls_total{{code="RESOURCE_EXHAUSTED",rpc="{rpc}"}}', 0.0)


async def test_client_retries_refused_excess_after_delay(tmp_path: Path, make_server: MakeServer) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    metrics = free_address()
    settings = {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file), "metrics_listen": metrics}
    settings["peer_secret"] = "of servers of one database, where the journal is one"
    server = await started(make_server(**settings, caller_observations_per_s=10.0))
    mine = (("authorization", f"Bearer {keys['alice']}"),)
    async with hasty(server.address) as channel:
        await MemoryServiceStub(channel).CreateMemory(
            memory_pb.CreateMemoryRequest(namespace="a", memory="joy"), metadata=mine
        )
        batch = [Observation(content=f"number {number}") for number in range(20)]
        batches = 0
        # The first batch uses up the allowance. The others are refused unless this machine stalls for two seconds
        # before it sends one, which then needs a further batch.
        while batches < 3 or (batches < 10 and await refusals(metrics, "ObserveBatch") < 2):
            batches += 1
            request = pb.ObserveBatchRequest(namespace="a", memory="joy", observations=batch)
            answer = await StreamServiceStub(channel).ObserveBatch(request, metadata=mine, timeout=60)
            assert not answer.ack.rejected
        assert 2 <= await refusals(metrics, "ObserveBatch") <= 2 * (batches - 1)


async def test_storage_quota_refusal_is_not_retried(make_server: MakeServer) -> None:
    metrics = free_address()
    server = await started(make_server(namespace_memories_max=1, metrics_listen=metrics))
    async with hasty(server.address) as channel:
        memories = MemoryServiceStub(channel)
        await memories.CreateMemory(memory_pb.CreateMemoryRequest(namespace="a", memory="joy"))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await memories.CreateMemory(memory_pb.CreateMemoryRequest(namespace="a", memory="sue"))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("grpc-retry-pushback-ms", "-1") in tuple(raised.value.trailing_metadata() or ())

    async def counted() -> bool:  # a call is counted once it has been answered
        return await refusals(metrics, "CreateMemory") >= 1

    await until(counted)
    assert await refusals(metrics, "CreateMemory") == 1
