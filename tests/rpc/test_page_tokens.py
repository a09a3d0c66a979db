"""Page tokens of every list method: of another method, of other arguments, and forged."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

import memstream
from memstream.v1 import conversation_service_pb2 as talks
from memstream.v1 import memory_service_pb2 as memories
from memstream.v1 import operation_service_pb2 as operations
from memstream.v1.conversation_service_pb2_grpc import ConversationServiceStub
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream.v1.operation_service_pb2_grpc import OperationServiceStub
from memstream_server.rpc import page_tokens
from tests.rpc.wire import refused
from tests.server.conftest import QUICK, check_log
from tests.support.server import ServerProcess

NAMESPACE = f"paged-{uuid.uuid4().hex[:8]}"
MEMORY = {"namespace": NAMESPACE, "memory": "m"}
TALK = {"namespace": NAMESPACE, "conversation": "talk"}
LISTS: dict[str, Callable[..., Message]] = {
    "ListMemories": lambda **given: memories.ListMemoriesRequest(namespace=NAMESPACE, **given),
    "ListNamespaces": lambda **given: memories.ListNamespacesRequest(**given),
    "ListFragments": lambda **given: memories.ListFragmentsRequest(**MEMORY, **given),
    "ListRecallReceipts": lambda **given: memories.ListRecallReceiptsRequest(**MEMORY, **given),
    "ListSessions": lambda **given: memories.ListSessionsRequest(**MEMORY, **given),
    "ListStandingQueries": lambda **given: memories.ListStandingQueriesRequest(**MEMORY, **given),
    "ListMessages": lambda **given: talks.ListMessagesRequest(**TALK, **given),
    "ListPlans": lambda **given: talks.ListPlansRequest(**TALK, **given),
    "ListOperations": lambda **given: operations.ListOperationsRequest(namespace=NAMESPACE, **given),
}
FORGED = [
    *("", "abc", "-1", "+1", " 1", "1_0", "1.5", "1e3", "0x1", "nan", "\u0663", "\x00", "\x1b[2J", "m\nn"),
    *("9" * 19, str(2**32), str(2**63), str(2**64), "9" * 700, "4294967294", "0", "00"),
    *("1:", ":", "::", ":uid", "1:uid", "1:\x00", "x:y", "1:2:3", f"{2**63}:u", "\U0010ffff", "z" * 700),
]
"""Payloads of tokens with a valid check: the check has no key, so any caller can compute it."""


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with at least two of everything that is listed, except standing queries."""
    with ServerProcess(tmp_path_factory.mktemp("listing") / "data").configure(**QUICK) as server:
        asyncio.run(fill(server.address))
        yield server
        assert server.stop() == 0
    check_log(server)


def make_stubs(channel: grpc.aio.Channel) -> list[Any]:
    return [MemoryServiceStub(channel), ConversationServiceStub(channel), OperationServiceStub(channel)]


async def fill(address: str) -> None:
    async with memstream.connect(address) as client, grpc.aio.insecure_channel(address) as channel:
        for number in range(2):
            await client.create_memory(f"{NAMESPACE}/m{number}", exist_ok=True)
            await client.create_memory(f"{NAMESPACE}-{number}/m", exist_ok=True)
        memory = await client.create_memory(f"{NAMESPACE}/m", exist_ok=True)
        await memory.observe_batch(["first", "second", "third"])
        await memory.observe_batch([memstream.Observation("said", session=each) for each in ("monday", "tuesday")])
        for _ in range(2):
            await memory.recall_once("first", receipt=True)
        _, conversing, operating = make_stubs(channel)
        for _ in range(2):
            message = talks.ConversationMessage(conversation="talk", sender="joy", content="hello")
            await conversing.AppendMessage(talks.AppendMessageRequest(namespace=NAMESPACE, message=message))
            await operating.StartPurge(operations.StartPurgeRequest(**MEMORY))
        plans = [talks.Plan(sub_task_number=number, sub_task_title="t") for number in (1, 2)]
        await conversing.SavePlans(talks.SavePlansRequest(**TALK, plans=plans))


@pytest.fixture
async def asked(listing: ServerProcess) -> AsyncIterator[Callable[[str, Message], Any]]:
    """Calls a list method while two standing queries are open."""
    async with (
        memstream.connect(listing.address) as client,
        client.memory(f"{NAMESPACE}/m").recall() as recall,
        recall.subscribe("first"),
        recall.subscribe("second"),
        grpc.aio.insecure_channel(listing.address) as channel,
    ):
        stubs = make_stubs(channel)

        async def call(name: str, request: Message) -> Any:
            stub = next(stub for stub in stubs if hasattr(stub, name))
            return await getattr(stub, name)(request)

        yield call


@pytest.mark.parametrize("name", LISTS)
async def test_forged_payloads_are_invalid_tokens(asked: Callable[[str, Message], Any], name: str) -> None:
    make = LISTS[name]
    refusals = [
        error
        for payload in FORGED
        if (error := await _failure(asked(name, make(page_token=page_tokens.make_token(make(), payload)))))
    ]
    assert {error.code() for error in refusals} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert all("page_token" in (error.details() or "") for error in refusals)
    assert len(refusals) >= 6  # the empty ones, and those with invalid characters


async def _failure(call: Awaitable[Any]) -> grpc.aio.AioRpcError | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    return None


@pytest.mark.parametrize("name", LISTS)
async def test_tokens_of_other_methods_are_invalid(asked: Callable[[str, Message], Any], name: str) -> None:
    for other, make in LISTS.items():
        token = (await asked(other, make(page_size=1))).next_page_token
        assert token, f"{other} has one page only"
        if other == name:
            assert await asked(name, make(page_token=token))
            continue
        error = await refused(asked(name, LISTS[name](page_token=token)))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PAGE_TOKEN_INVALID")


@pytest.mark.parametrize("token", ["A", "AAAA", "=", "§", "A" * 5_000, "AA==", "a b", "AAAAAAAAAAA\n", "\x00"])
@pytest.mark.parametrize("name", LISTS)
async def test_what_is_no_token_is_invalid(asked: Callable[[str, Message], Any], name: str, token: str) -> None:
    error = await refused(asked(name, LISTS[name](page_token=token)))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PAGE_TOKEN_INVALID")
