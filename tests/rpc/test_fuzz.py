"""Random bytes: the server responds with a status other than INTERNAL, and keeps serving."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterable, MutableMapping
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
import structlog.testing
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstream.v1 import memory_service_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.memory_service_pb2 import GetMemoryRequest
from tests.rpc.wire import Wire
from tests.support.arbitrary import UNICODE
from tests.support.contract import METHODS, SERVICES
from tests.support.fake_engine import FakeEngine
from tests.support.seeds import rounds

pytestmark = pytest.mark.drawn

BAD = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
OPENINGS = {
    "Observe": pb.ObserveRequest(open=pb.ObserveOpen(namespace="ns", memory="m", producer="p")).SerializeToString(),
    "Recall": pb.RecallRequest(open=pb.RecallOpen(namespace="ns", memory="m")).SerializeToString(),
}
UNSCRIPTED = {
    *(method.name for method in METHODS if method.containing_service.name in ("BlockService", "OperationService")),
    *("EraseFragments", "ReflectMemory", "ExportMemories", "ImportMemories"),
}
"""Only with the real engine: the scripted one has no long operations and no blocks."""
_TYPE = FieldDescriptor
_EDGES_64 = st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, -(2**63)])
_EDGES_32 = st.sampled_from([0, 1, -1, 5, 2**31 - 1, -(2**31)])
_NAMES = st.sampled_from(["ns", "m", "", "p", "a/b", "\x00", "é" * 200, "0" * 26])


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == _TYPE.TYPE_STRING:
        return _NAMES | st.text(UNICODE, max_size=10)
    if field.type == _TYPE.TYPE_BYTES:
        return st.binary(max_size=10)
    if field.type == _TYPE.TYPE_BOOL:
        return st.booleans()
    if field.type in (_TYPE.TYPE_DOUBLE, _TYPE.TYPE_FLOAT):
        return st.sampled_from([0.0, 0.5, -1.0, 1e300 if field.type == _TYPE.TYPE_DOUBLE else 1e38, float("nan")])
    if field.type == _TYPE.TYPE_ENUM:
        return st.integers(-1, 9)
    return _EDGES_64 if field.type == _TYPE.TYPE_INT64 else _EDGES_32


@functools.cache
def messages(of: Descriptor, depth: int = 4) -> st.SearchStrategy[Any]:
    """Messages of a type, with random fields set to values that are likely to be invalid."""
    values = [(field, _values_of(field, of, depth)) for field in of.fields if not _is_left_out(field, depth)]
    memory = of.fields_by_name.get("memory")
    is_named = memory is not None and memory.message_type is None and "namespace" in of.fields_by_name

    @st.composite
    def build(draw: Any) -> Any:
        made: Any = GetMessageClass(of)()
        for field, of_field in values:
            if not draw(st.booleans()):
                continue
            if field.is_repeated:
                getattr(made, field.name).extend(draw(of_field))
            elif field.message_type is not None:
                getattr(made, field.name).CopyFrom(draw(of_field))
            else:
                setattr(made, field.name, draw(of_field))
        if is_named and draw(st.booleans()):
            made.namespace, made.memory = "ns", "m"  # so that some pass the check of names
        return made

    return build()


def _is_left_out(field: FieldDescriptor, depth: int) -> bool:
    return field.message_type is not None and (depth == 0 or field.message_type.GetOptions().map_entry)


def _values_of(field: FieldDescriptor, of: Descriptor, depth: int) -> st.SearchStrategy[Any]:
    """Values of a field, lists of them if it is repeated."""
    deeper = 0 if field.message_type == of else depth - 1  # a filter inside of a filter
    one = _scalar(field) if field.message_type is None else messages(field.message_type, deeper)
    return st.lists(one, max_size=2) if field.is_repeated else one


async def status(wire: Wire, method: MethodDescriptor, requests: list[bytes]) -> grpc.StatusCode:
    """Sends raw bytes and returns the final status; leaves a stream that stays open."""
    make = {
        (False, False): wire.channel.unary_unary,
        (False, True): wire.channel.unary_stream,
        (True, False): wire.channel.stream_unary,
        (True, True): wire.channel.stream_stream,
    }[method.client_streaming, method.server_streaming]
    path = f"/{method.containing_service.full_name}/{method.name}"
    timeout_s = 0.5 if method.name == "RecallOnce" else 10
    if method.client_streaming:
        call = make(path)(timeout=timeout_s)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for request in requests:
                await call.write(request)
            await call.done_writing()
    else:
        call = make(path)(requests[0], timeout=timeout_s)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if not method.server_streaming:
            await call
        elif not await _read_some(call):
            call.cancel()
            return grpc.StatusCode.OK
    code: grpc.StatusCode = await call.code()
    if "Internal error from Core" in (await call.details() or ""):
        return grpc.StatusCode.OK  # the client's own error: the server ended the stream during a write
    return code


async def _read_some(call: Any) -> bool:
    """Reads available responses; returns whether the stream has ended."""
    for _ in range(20):
        reading = asyncio.ensure_future(call.read())
        done, _ = await asyncio.wait({reading}, timeout=0.1)
        if not done:
            call.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()
            return False
        if reading.result() is grpc.aio.EOF:
            return True
    return False


def defects(logged: Iterable[MutableMapping[str, Any]]) -> list[Any]:
    """All log lines except those of long operations."""
    return [entry for entry in logged if entry["log_level"] != "info"]


async def serves(wire: Wire) -> None:
    assert (await wire.memories.GetMemory(GetMemoryRequest(namespace="ns", memory="m"))).memory.name == "m"


@pytest.fixture
def methods(request: pytest.FixtureRequest, engine: Any) -> list[MethodDescriptor]:
    """The methods of a service that the engine has."""
    service: ServiceDescriptor = request.param
    return [one for one in service.methods if not (isinstance(engine, FakeEngine) and one.name in UNSCRIPTED)]


def random_bytes() -> list[list[bytes]]:
    """Lists of requests that are hardly ever messages."""
    seen: list[list[bytes]] = []

    @settings(max_examples=rounds(10, 3), database=None)
    @given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=3))
    def collect(requests: list[bytes]) -> None:
        seen.append(requests)

    collect()
    return seen


def malformed(method: MethodDescriptor) -> list[list[bytes]]:
    """Lists of messages with invalid fields; those of a stream with its opening and without."""
    seen: list[list[bytes]] = []

    @settings(
        max_examples=rounds(25, 8),
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.lists(messages(method.input_type), min_size=1, max_size=4))
    def collect(requests: list[Any]) -> None:
        seen.append([request.SerializeToString() for request in requests])

    collect()
    openings = [[OPENINGS[method.name], *requests] for requests in seen if method.name in OPENINGS]
    return [*openings, *seen]


@pytest.mark.parametrize("methods", SERVICES, ids=lambda service: service.name, indirect=True)
async def test_random_bytes_get_a_status(wire: Wire, methods: list[MethodDescriptor]) -> None:
    drawn = await asyncio.to_thread(random_bytes)
    for method in methods:
        await _check_statuses(wire, method, drawn)


@pytest.mark.parametrize("methods", SERVICES, ids=lambda service: service.name, indirect=True)
async def test_malformed_messages_get_a_status(wire: Wire, methods: list[MethodDescriptor]) -> None:
    for method in methods:
        await _check_statuses(wire, method, await asyncio.to_thread(malformed, method))


async def _check_statuses(wire: Wire, method: MethodDescriptor, drawn: list[list[bytes]]) -> None:
    """No call of the method fails as a defect would, or logs one; the server serves afterwards."""
    with structlog.testing.capture_logs() as logged:
        for requests in drawn:
            assert await status(wire, method, requests) not in BAD, (method.name, requests)
        await _restored(wire)
    assert not defects(logged), method.name


async def _restored(wire: Wire) -> None:
    """Recreates the memory, which a fuzzed DeleteMemory may have deleted."""
    request = memory_service_pb2.CreateMemoryRequest(namespace="ns", memory="m", exist_ok=True)
    await wire.memories.CreateMemory(request)
    await serves(wire)


def test_every_kind_of_call_is_fuzzed() -> None:
    assert {(method.client_streaming, method.server_streaming) for method in METHODS} == {
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    }
