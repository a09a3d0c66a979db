"""A call that is cancelled or exceeds its deadline stops, together with its model request, and frees its slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack

import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

import memstream
from memstream import Memory
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from tests.server.conftest import serve_tests
from tests.server.listing import contents
from tests.server.test_models import settings_for
from tests.support.fake_openai import FakeOpenAI
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOR_EVER_S = 600.0
Call = Callable[[Memory], Awaitable[object]]
CALLS: dict[str, Call] = {
    "PutFragment": lambda memory: memory.put_fragment("Bob likes tea", external_id="tea"),
    "RecallOnce": lambda memory: memory.recall_once("tea"),
    "ObserveBatch": lambda memory: memory.observe_batch(["Bob likes tea"]),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def endpoint() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI(dimension=16) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(endpoint: FakeOpenAI, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerProcess]:
    """Only one call fits, so a call succeeds only if the calls before it have ended."""
    settings = settings_for(endpoint, embedding_timeout_s=FOR_EVER_S, embedding_retries=5, calls_in_flight_max=1)
    with ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, serve_tests(tmp_path_factory, **settings))


@pytest.fixture
def fake(endpoint: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """The endpoint, which answers at once unless the test changes that."""
    yield endpoint
    endpoint.latency_s = 0.0


@pytest.mark.parametrize("gives_up", [False, True], ids=["its deadline", "a cancel"])
@pytest.mark.parametrize("name", ["PutFragment", "RecallOnce"])
async def test_ending_a_call_cancels_its_model_request(
    server: ServerProcess, fake: FakeOpenAI, path: str, name: str, gives_up: bool
) -> None:
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory(path)
        await memory.observe_batch(["Joe likes coffee"])
    fake.latency_s = FOR_EVER_S
    # A recall waits two seconds for its vector, so the client must cancel before that.
    async with memstream.connect(server.address, timeout_s=60.0 if gives_up else 1.0) as client:
        memory = client.memory(path)
        calling = asyncio.ensure_future(CALLS[name](memory))
        if gives_up:
            await until(lambda: _asked(fake))
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
        else:
            with pytest.raises(memstream.DeadlineExceeded):
                await calling
        await until(lambda: _left(fake))
    fake.latency_s = 0.0
    async with memstream.connect(server.address) as client:  # only one call fits, so the other has ended
        await until(lambda: _holds(client.memory(path), ["Joe likes coffee"]))


async def test_query_timeout_ends_work_of_model(server: ServerProcess, fake: FakeOpenAI, path: str) -> None:
    async with memstream.connect(server.address) as client:
        await client.create_memory(path)
    fake.latency_s = FOR_EVER_S
    async with grpc.aio.insecure_channel(server.address) as channel:
        stream = StreamServiceStub(channel).Recall()
        await stream.write(pb.RecallRequest(open=pb.RecallOpen(namespace=path.split("/")[0], memory="joy")))
        await stream.read()
        query = pb.RecallQuery(query_id="q", text="tea", timeout=Duration(nanos=500_000_000))
        await stream.write(pb.RecallRequest(query=query))
        failed = await stream.read()
        assert isinstance(failed, pb.RecallResponse)
        assert (failed.failed.query_id, failed.failed.status.code) == ("q", 4)
        await until(lambda: _left(fake))
        fake.latency_s = 0.0
        await stream.write(pb.RecallRequest(query=pb.RecallQuery(query_id="q", text="tea")))
        answer = await stream.read()
        assert isinstance(answer, pb.RecallResponse)
        assert answer.recollections.query_id == "q"
        stream.cancel()


async def test_received_is_stored_after_caller_left(server: ServerProcess, fake: FakeOpenAI, path: str) -> None:
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory(path)
        fake.hold()
        async with memstream.connect(server.address, timeout_s=1.0) as hasty:
            while not await _asked(fake):  # a server that stands still for a second receives nothing
                with pytest.raises((memstream.DeadlineExceeded, memstream.QuotaExceeded)):
                    await CALLS["ObserveBatch"](hasty.memory(path))
        fake.release()
        await until(lambda: _holds(memory, ["Bob likes tea"]))


async def _asked(fake: FakeOpenAI) -> bool:
    return fake.in_flight > 0


async def _left(fake: FakeOpenAI) -> bool:
    return fake.in_flight == 0


async def _holds(memory: Memory, said: list[str]) -> bool:
    try:
        return await contents(memory) == said
    except memstream.QuotaExceeded:  # the call that its caller left has not ended yet
        return False
