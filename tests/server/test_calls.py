"""Traces of every call: a request id in the log and in the response, a count, a duration."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, cast

import grpc
import grpc.aio
import pytest

import memstream
from memstream.v1 import memory_service_pb2, stream_service_pb2
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from memstream_server.observability import Metrics
from tests.server.conftest import MakeServer, started, stopped
from tests.support.fake_openai import FakeOpenAI
from tests.support.metrics import scrape_metrics
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until


def given_back(metadata: Any) -> list[str]:
    return [value for key, value in metadata or () if key == "x-request-id"]


async def test_a_call_gets_back_its_request_id(shared: ServerProcess) -> None:
    """The given id, or a generated one if the given one is missing or unsearchable; also with an error."""
    async with grpc.aio.insecure_channel(shared.address) as channel:
        stub: Any = MemoryServiceStub(channel)
        for sent, same in (("abc-1", True), ("a b", False), ("x" * 65, False), (None, False)):
            metadata = () if sent is None else (("x-request-id", sent),)
            call = stub.ListNamespaces(memory_service_pb2.ListNamespacesRequest(), metadata=metadata)
            await call
            (back,) = given_back(await call.trailing_metadata())
            assert back == sent if same else re.fullmatch("[0-9a-f]{16}", back)
        wrong = memory_service_pb2.GetMemoryRequest(namespace="no", memory="such")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetMemory(wrong, metadata=(("x-request-id", "of-an-error"),))
        assert given_back(raised.value.trailing_metadata()) == ["of-an-error"]
        await stub.CreateMemory(memory_service_pb2.CreateMemoryRequest(namespace="request-id", memory="joy"))
        streams: Any = StreamServiceStub(channel)
        call = streams.Watch(
            stream_service_pb2.WatchRequest(namespace="request-id", memory="joy"),
            metadata=(("x-request-id", "of-a-stream"),),
        )
        assert given_back(await call.initial_metadata()) == ["of-a-stream"]  # the stream may last for hours
        call.cancel()


async def test_log_lines_of_a_call_carry_its_request_id(make_server: MakeServer) -> None:
    server = await started(make_server(log_format="json"))
    operations = [f"op-{number}" for number in range(2)]
    async with grpc.aio.insecure_channel(server.address) as channel:
        purge = channel.unary_unary("/memstream.v1.OperationService/StartPurge")
        for id_ in operations:
            await purge(b"", metadata=(("x-request-id", id_),))
        await until(lambda: _ended(server, operations))
    assert await stopped(server) == 0
    lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    begun = [line for line in lines if line["event"] == "operation_begins"]
    assert [line["request_id"] for line in begun] == operations
    assert {line["rpc"] for line in begun} == {"/memstream.v1.OperationService/StartPurge"}


async def _ended(server: ServerProcess, ids: list[str]) -> bool:
    lines = [line for line in server.log().splitlines() if "operation_ended" in line]
    return all(any(id_ in line for line in lines) for id_ in ids)


@pytest.mark.with_index
async def test_metrics_count_what_happens(make_server: MakeServer) -> None:
    """An unreachable trace receiver delays nothing."""
    metrics = free_address()
    async with FakeOpenAI(dimension=8) as fake:
        server = make_server(
            metrics_listen=metrics,
            embedding="openai",
            embedding_base_url=fake.base_url,
            otlp_endpoint="http://127.0.0.1:1",
        )
        await started(server)

        async def now() -> dict[str, float]:
            return await asyncio.to_thread(scrape_metrics, metrics)

        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("count/private", kind=memstream.MemoryKind.LONG_TERM)
            await memory.observe_batch([f"number {number}" for number in range(5)])
            await memory.recall_once("number", reinforce=False)
            with pytest.raises(memstream.MemoryNotFound):
                await client.get_memory("count/nobody")
            async with memory.observe("p") as stream:
                await stream.send("six")
                during = await now()
            (used,) = (await client.server_info()).model_usage
            await until(lambda: _indexed(metrics))
            seen = await now()
        assert await stopped(server) == 0
    assert during['memstream_streams{rpc="Observe"}'] == 1
    assert seen['memstream_streams{rpc="Observe"}'] == 0
    assert seen['memstream_calls_total{code="OK",rpc="ObserveBatch"}'] == 1
    assert seen['memstream_calls_total{code="NOT_FOUND",rpc="GetMemory"}'] == 1
    assert seen['memstream_calls_total{code="OK",rpc="Observe"}'] == 1
    assert seen['memstream_call_seconds_count{rpc="RecallOnce"}'] == 1
    for level in ("received", "stored"):
        assert seen[f"memstream_observations_{level}_total"] == 6
        assert seen[f"memstream_{level}_seconds_count"] == 2
    assert seen["memstream_owned_memories"] == seen["memstream_active_memories"] == 1
    assert seen["memstream_outbox_depth"] == 0
    assert seen['memstream_transitions_total{event="observed"}'] == 6
    assert seen['memstream_model_tokens_total{kind="prompt",role="embedder"}'] >= used.prompt_tokens > 0
    assert (used.role, used.failed, used.requests > 1) == ("embedder", 0, True)
    assert seen["memstream_loop_lag_seconds_count"] > 0
    assert not [name for name in seen if "private" in name or "count" in name.partition("{")[2]]


async def _indexed(metrics: str) -> bool:
    seen = await asyncio.to_thread(scrape_metrics, metrics)
    indexed = seen["memstream_indexed_seconds_count"] > 0 and seen["memstream_outbox_depth"] == 0
    ended = seen['memstream_streams{rpc="Observe"}'] == 0 and 'memstream_calls_total{code="OK",rpc="Observe"}' in seen
    return indexed and ended and seen["memstream_owned_memories"] == 1


def test_no_label_can_hold_what_a_user_names() -> None:
    families = cast("list[Any]", list(Metrics().registry._names_to_collectors.values()))
    labels = {name for family in families for name in family._labelnames}
    assert labels == {"code", "event", "kind", "outcome", "quota", "reason", "role", "rpc"}
