"""A raw client of the contract, and the parts of a status that tests check."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from memstream.v1 import fragment_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream.v1.server_service_pb2_grpc import ServerServiceStub
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.server import RpcServer
from tests.support.waiting import skip_time

T = TypeVar("T")


@dataclass
class Wire:
    """Channel and stubs."""

    channel: grpc.aio.Channel
    server: RpcServer
    drain: Drain
    dimension: int
    memories: Any = field(init=False)
    streams: Any = field(init=False)
    info: Any = field(init=False)

    def __post_init__(self) -> None:
        self.memories = MemoryServiceStub(self.channel)
        self.streams = StreamServiceStub(self.channel)
        self.info = ServerServiceStub(self.channel)

    async def observe(self, producer: str = "p", **given: Any) -> ObserveCall:
        """An open Observe stream."""
        call = ObserveCall(self.streams.Observe())
        opening = pb.ObserveOpen(**{"namespace": "ns", "memory": "m", "producer": producer} | given)
        await call.send(open=opening)
        call.opened = (await call.next()).opened
        return call

    def end_grace(self) -> None:
        """End the grace period of streams that drain, and that of streams that begin to drain later."""
        grace_s = self.drain.grace_s
        for drain in (self.drain, self.drain.memories):
            drain.grace_s = 0.0
        skip_time(grace_s)

    async def recall(self, **given: Any) -> RecallCall:
        """An open Recall stream."""
        call = RecallCall(self.streams.Recall())
        await call.send(open=pb.RecallOpen(**{"namespace": "ns", "memory": "m"} | given))
        call.opened = (await call.next()).opened
        return call


class _Call:
    request: Any

    def __init__(self, call: Any) -> None:
        self.call = call
        self.opened: Any = None

    async def send(self, **message: Any) -> None:
        await self.call.write(type(self).request(**message))

    async def next(self) -> Any:
        """The next message; the call's error if it has ended with one; None at its end."""
        async with asyncio.timeout(60):
            message = await self.call.read()
        return None if message is grpc.aio.EOF else message

    async def error(self) -> Refused:
        """The final error of the call; skips messages before it."""

        async def to_the_end() -> None:
            while await self.next() is not None:
                pass

        return await refused(to_the_end())


class ObserveCall(_Call):
    request = pb.ObserveRequest

    async def batch(self, first: int, *contents: str | fragment_pb2.Observation) -> None:
        items = [fragment_pb2.Observation(content=c) if isinstance(c, str) else c for c in contents]
        await self.send(batch=pb.ObservationBatch(first_sequence=first, observations=items))

    async def ack(self, until: Callable[[pb.Ack], bool]) -> list[pb.Ack]:
        """The first acknowledgement that satisfies the condition."""
        seen = []
        while True:
            message = await self.next()
            assert message is not None, "the stream ended before the acknowledgement"
            if message.HasField("ack"):
                seen.append(message.ack)
                if until(message.ack):
                    return seen


class RecallCall(_Call):
    request = pb.RecallRequest

    async def query(self, query_id: str, text: str = "anything", **given: Any) -> None:
        await self.send(query=pb.RecallQuery(query_id=query_id, text=text, **given))


@dataclass
class Refused:
    """A status with its details unpacked."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str]
    fields: dict[str, str]
    retry_s: float | None


async def until(condition: Callable[[], object]) -> None:
    """Waits, at most a minute, for a condition that other tasks fulfil."""
    for _ in range(6_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def refused(call: Awaitable[T]) -> Refused:
    """The final status of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = caught.value
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            assert status.code == error.code().value[0]
            return unpacked(status)
    return Refused(error.code(), error.details() or "", "", {}, {}, None)


def unpacked(status: status_pb2.Status) -> Refused:
    """The details of a status."""
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    retry_s = None
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad)
        if detail.Unpack(retry):
            retry_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    assert info.domain == "memstream.dev"
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    fields = {each.field: each.description for each in bad.field_violations}
    return Refused(code, status.message, info.reason, dict(info.metadata), fields, retry_s)
