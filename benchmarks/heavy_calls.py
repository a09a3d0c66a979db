"""Every rpc of the contract at its largest legal arguments: what one caller may ask of a server.

`ARGUMENTS` has a line for each rpc; `find_missing` compares it with the contract's descriptors. Calls are made by
descriptor, with raw bytes as answers, so that a client in Python spends little on them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import httpx2
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from memstream.v1 import block_service_pb2 as blocks
from memstream.v1 import context_service_pb2 as contexts
from memstream.v1 import conversation_service_pb2 as conversations
from memstream.v1 import fragment_pb2, server_service_pb2
from memstream.v1 import memory_service_pb2 as memories
from memstream.v1 import operation_service_pb2 as operations
from memstream.v1 import stream_service_pb2 as streams
from memstream.v1.scope_pb2 import RecallScope

PAGE_MAX = 1_000
BATCH_MAX = 1_024
QUERIES_MAX = 64
CONTENT_BYTES = 60_000
BODY_BYTES = 1 << 20
VERSIONS = 100
"""The most that a policy may keep of a fragment."""
UPDATED = 20
"""Fragments with an earlier version."""
QUIET_S = 1.0
"""After this time without a message a stream counts as read."""
QUIET = frozenset({"Watch", "WatchBlocks", "WatchMessages"})
"""Streams that do not end by themselves."""
METHODS: Sequence[MethodDescriptor] = [
    method
    for module in (blocks, contexts, conversations, memories, operations, server_service_pb2, streams)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
_BY_NAME = {method.name: method for method in METHODS}
_NAME, _CONVERSATION, _BLOCK = "big", "talk", "persona"
BLOCKS = 20
"""Blocks of the memory `big`, and versions of its block."""
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
"""A connection of its own: without authentication the connection is the principal."""


@dataclass(slots=True)
class Ends:
    """How the calls of a flood ended so far."""

    answered: int = 0
    refused: int = 0


@dataclass(slots=True)
class World:
    """What a caller has before it makes heavy calls."""

    namespace: str
    fragments: int
    """Fragments of the memory `big`."""
    ids: list[str] = field(default_factory=list)
    """Of up to PAGE_MAX of them."""
    receipt: str = ""
    operation: str = ""
    """A purge."""
    exported: bytes = b""
    versions: list[dict[str, Any]] = field(default_factory=list)
    """`id` and `version` of fragments with an earlier content; each is kept for VERSIONS more changes."""
    cloned: list[str] = field(default_factory=list)
    """Memories to delete."""
    forked: list[str] = field(default_factory=list)
    """Conversations to delete."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def memory(self) -> dict[str, Any]:
        """The fields that name the memory."""
        return {"namespace": self.namespace, "memory": _NAME}

    @property
    def conversation(self) -> dict[str, Any]:
        """The fields that name the conversation."""
        return {"namespace": self.namespace, "conversation": _CONVERSATION}

    def new_name(self) -> str:
        """A name that was not used before."""
        return f"name-{next(self.numbers)}"


def _query(world: World) -> streams.RecallQuery:
    return streams.RecallQuery(
        query_id=world.new_name(),
        text="a note about a topic and a person",
        limit=PAGE_MAX,
        near_misses=PAGE_MAX,
        explain=True,
    )


def _observations(world: World, count: int = BATCH_MAX) -> list[fragment_pb2.Observation]:
    return [
        fragment_pb2.Observation(content=f"note {world.new_name()} about topic {number % 97}", session=f"s{number}")
        for number in range(count)
    ]


def _observe(world: World) -> list[Message]:
    batch = streams.ObservationBatch(first_sequence=1, observations=_observations(world))
    opening = streams.ObserveOpen(**world.memory, producer=world.new_name())
    return [
        streams.ObserveRequest(open=opening),
        streams.ObserveRequest(batch=batch),
        streams.ObserveRequest(close=streams.ObserveClose()),
    ]


def _recall(world: World) -> list[Message]:
    opening = streams.RecallRequest(open=streams.RecallOpen(**world.memory))
    asked = [streams.RecallRequest(query=_query(world)) for _ in range(QUERIES_MAX)]
    for each in asked[: QUERIES_MAX // 2]:
        each.query.subscribe = True
    return [opening, *asked]


def _import(world: World) -> list[Message]:
    opening = memories.ImportOpen(namespace=world.namespace, memory=world.new_name(), validate_only=True)
    lines = [world.exported[start : start + (1 << 20)] for start in range(0, len(world.exported), 1 << 20)]
    return [
        memories.ImportMemoriesRequest(open=opening),
        *(memories.ImportMemoriesRequest(lines=part) for part in lines),
    ]


def _plans(world: World) -> list[conversations.Plan]:
    return [
        conversations.Plan(
            conversation=_CONVERSATION, sub_task_number=number, sub_task_title="step", sub_task_content="do it " * 20
        )
        for number in range(1, PAGE_MAX)
    ]


def _message(world: World) -> conversations.ConversationMessage:
    return conversations.ConversationMessage(
        conversation=_CONVERSATION, sender="a", receiver="b", content="word " * (CONTENT_BYTES // 5)
    )


def _large_body(world: World, number: int = 0) -> conversations.ConversationMessage:
    """Of as many values as fit: it costs most to check."""
    body = "[" + "[],1," * (BODY_BYTES // 5 - 1) + "1]"
    return conversations.ConversationMessage(
        conversation=_CONVERSATION, number=number, name=world.new_name(), body=body
    )


def _content(world: World) -> str:
    return f"{world.new_name()} {'word ' * (CONTENT_BYTES // 5)}"


def _put(world: World) -> fragment_pb2.Observation:
    return fragment_pb2.Observation(content=_content(world), external_id="the one")


def _update(world: World, place: int = 0) -> memories.UpdateFragmentRequest:
    request = memories.UpdateFragmentRequest(**world.memory, update_mask=FieldMask(paths=["content"]))
    request.fragment.id, request.fragment.content = world.ids[place], _content(world)
    return request


def _update_memory(world: World) -> memories.UpdateMemoryRequest:
    request = memories.UpdateMemoryRequest(update_mask=FieldMask(paths=["labels"]))
    request.memory.namespace, request.memory.name = world.namespace, _NAME
    request.memory.labels["number"] = world.new_name()
    return request


def _state(world: World) -> dict[str, Any]:
    return {"namespace": world.namespace, "scope": conversations.STATE_SCOPE_USER, "name": "bob"}


def _block(world: World) -> blocks.PutBlockRequest:
    text = f"{world.new_name()} {'x' * CONTENT_BYTES}"
    return blocks.PutBlockRequest(**world.memory, block=_BLOCK, text=text)


Arguments = Callable[[World], Message | list[Message]]

ARGUMENTS: dict[str, Arguments] = {
    "Observe": _observe,
    "Recall": _recall,
    "Watch": lambda world: streams.WatchRequest(**world.memory, include_fragments=True),
    "ObserveBatch": lambda world: streams.ObserveBatchRequest(**world.memory, observations=_observations(world)),
    "RecallOnce": lambda world: streams.RecallOnceRequest(**world.memory, query=_query(world)),
    "Context": lambda world: contexts.ContextRequest(
        scopes=[RecallScope(memory=f"{world.namespace}/{_NAME}")],
        question="a note about a topic and a person",
        conversation=f"{world.namespace}/{_CONVERSATION}",
        budget=100_000,
    ),
    "CreateMemory": lambda world: memories.CreateMemoryRequest(**world.memory, exist_ok=True),
    "GetMemory": lambda world: memories.GetMemoryRequest(**world.memory),
    "ListMemories": lambda world: memories.ListMemoriesRequest(namespace=world.namespace, page_size=PAGE_MAX),
    "UpdateMemory": _update_memory,
    "CloneMemory": lambda world: memories.CloneMemoryRequest(**world.memory, new_memory=world.new_name()),
    "ClearMemory": lambda world: memories.ClearMemoryRequest(**world.memory, tiers=[fragment_pb2.TIER_SENSORY]),
    "DeleteMemory": lambda world: memories.DeleteMemoryRequest(
        namespace=world.namespace, memory=world.cloned.pop() if world.cloned else "none"
    ),
    "ListNamespaces": lambda _: memories.ListNamespacesRequest(page_size=PAGE_MAX),
    "GetMemoryStats": lambda world: memories.GetMemoryStatsRequest(**world.memory),
    "GetFragment": lambda world: memories.GetFragmentRequest(**world.memory, id=world.ids[0]),
    "ListFragments": lambda world: memories.ListFragmentsRequest(**world.memory, page_size=PAGE_MAX),
    "PutFragment": lambda world: memories.PutFragmentRequest(**world.memory, observation=_put(world)),
    "UpdateFragment": _update,
    "ForgetFragments": lambda world: memories.ForgetFragmentsRequest(**world.memory, ids=world.ids[1:]),
    "RestoreFragments": lambda world: memories.RestoreFragmentsRequest(**world.memory, ids=world.ids[1:]),
    "SupersedeFragments": lambda world: memories.SupersedeFragmentsRequest(
        **world.memory, ids=world.ids[1:], newer_id=world.ids[0]
    ),
    "ListConflicts": lambda world: memories.ListConflictsRequest(**world.memory, page_size=PAGE_MAX),
    "ResolveConflict": lambda world: memories.ResolveConflictRequest(
        **world.memory, newer_id=world.ids[-1], older_id=world.ids[0], decision=fragment_pb2.CONFLICT_DECISION_BOTH
    ),
    "GetFragmentHistory": lambda world: memories.GetFragmentHistoryRequest(**world.memory, external_id="the one"),
    "ListFragmentEvents": lambda world: memories.ListFragmentEventsRequest(
        **world.memory, id=world.ids[0], page_size=PAGE_MAX
    ),
    "RestoreFragmentVersion": lambda world: memories.RestoreFragmentVersionRequest(
        **world.memory, **random.choice(world.versions)
    ),
    "ListRecallReceipts": lambda world: memories.ListRecallReceiptsRequest(**world.memory, page_size=PAGE_MAX),
    "ReplayRecall": lambda world: memories.ReplayRecallRequest(**world.memory, receipt_id=world.receipt),
    "ListSessions": lambda world: memories.ListSessionsRequest(**world.memory, page_size=PAGE_MAX),
    "ListStandingQueries": lambda world: memories.ListStandingQueriesRequest(**world.memory, page_size=PAGE_MAX),
    "EraseFragments": lambda world: memories.EraseFragmentsRequest(**world.memory, ids=world.ids[-1:]),
    "ReflectMemory": lambda world: memories.ReflectMemoryRequest(**world.memory),
    "ExportMemories": lambda world: memories.ExportMemoriesRequest(**world.memory, include_vectors=True),
    "ImportMemories": _import,
    "PutBlock": _block,
    "GetBlock": lambda world: blocks.GetBlockRequest(**world.memory, block=_BLOCK),
    "ListBlocks": lambda world: blocks.ListBlocksRequest(**world.memory, page_size=PAGE_MAX),
    "ListBlockVersions": lambda world: blocks.ListBlockVersionsRequest(
        **world.memory, block=_BLOCK, page_size=PAGE_MAX
    ),
    "EditBlock": lambda world: blocks.EditBlockRequest(
        **world.memory, block=_BLOCK, append=blocks.AppendToBlock(text="and more")
    ),
    "DeleteBlock": lambda world: blocks.DeleteBlockRequest(**world.memory, block=_BLOCK),
    "WatchBlocks": lambda world: blocks.WatchBlocksRequest(**world.memory),
    "AppendMessage": lambda world: conversations.AppendMessageRequest(
        namespace=world.namespace, message=_message(world)
    ),
    "ListConversations": lambda world: conversations.ListConversationsRequest(
        namespace=world.namespace, page_size=PAGE_MAX, latest_first=True
    ),
    "GetConversation": lambda world: conversations.GetConversationRequest(**world.conversation),
    "UpdateConversation": lambda world: conversations.UpdateConversationRequest(
        **world.conversation, labels=conversations.ConversationLabels(labels={"user": "bob"})
    ),
    "DeleteConversation": lambda world: conversations.DeleteConversationRequest(
        namespace=world.namespace, conversation=world.forked.pop() if world.forked else "none"
    ),
    "ForkConversation": lambda world: conversations.ForkConversationRequest(
        **world.conversation, new_conversation=world.new_name()
    ),
    "GetState": lambda world: conversations.GetStateRequest(
        namespace=world.namespace, scope=conversations.STATE_SCOPE_APP, name="app"
    ),
    "GetStates": lambda world: conversations.GetStatesRequest(
        namespace=world.namespace,
        keys=[conversations.StateKey(scope=conversations.STATE_SCOPE_APP, name="app")]
        + [conversations.StateKey(scope=conversations.STATE_SCOPE_USER, name=f"user-{n}") for n in range(PAGE_MAX - 1)],
    ),
    "SetState": lambda world: conversations.SetStateRequest(
        namespace=world.namespace,
        scope=conversations.STATE_SCOPE_APP,
        name="app",
        document=_large_body(world).body,
    ),
    "WriteTogether": lambda world: conversations.WriteTogetherRequest(
        namespace=world.namespace,
        writes=[
            conversations.TransactionWrite(
                append_messages=conversations.AppendMessagesRequest(
                    conversation=world.conversation["conversation"], messages=[_large_body(world)]
                )
            ),
        ],
    ),
    "DeleteState": lambda world: conversations.DeleteStateRequest(**_state(world)),
    "EraseUser": lambda world: conversations.EraseUserRequest(namespace=world.namespace, user="nobody"),
    "AppendMessages": lambda world: conversations.AppendMessagesRequest(
        **world.conversation, messages=[_large_body(world)]
    ),
    "GetMessage": lambda world: conversations.GetMessageRequest(**world.conversation, number=1),
    "ReplaceMessage": lambda world: conversations.ReplaceMessageRequest(
        namespace=world.namespace, message=_large_body(world, number=1)
    ),
    "RemoveMessages": lambda world: conversations.RemoveMessagesRequest(**world.conversation, from_number=PAGE_MAX * 2),
    "PopMessage": lambda world: conversations.PopMessageRequest(**world.conversation, request_id="pop"),
    "ListMessages": lambda world: conversations.ListMessagesRequest(**world.conversation, page_size=PAGE_MAX),
    "GetLastMessage": lambda world: conversations.GetLastMessageRequest(**world.conversation),
    "WatchMessages": lambda world: conversations.WatchMessagesRequest(**world.conversation),
    "CompleteConversation": lambda world: conversations.CompleteConversationRequest(
        namespace=world.namespace, conversation="other"
    ),
    "DeleteMessages": lambda world: conversations.DeleteMessagesRequest(
        namespace=world.namespace, conversation="other"
    ),
    "SavePlans": lambda world: conversations.SavePlansRequest(**world.conversation, plans=_plans(world)),
    "ListPlans": lambda world: conversations.ListPlansRequest(**world.conversation, page_size=PAGE_MAX),
    "UpdatePlan": lambda world: conversations.UpdatePlanRequest(
        **world.conversation, sub_task_number=1, result="done " * 1_000
    ),
    "CompletePlan": lambda world: conversations.CompletePlanRequest(
        **world.conversation, sub_task_number=1, result="done " * 1_000
    ),
    "RemovePlans": lambda world: conversations.RemovePlansRequest(namespace=world.namespace, conversation="other"),
    "StartReindex": lambda _: operations.StartReindexRequest(),
    "StartPurge": lambda world: operations.StartPurgeRequest(namespace=world.namespace),
    "GetOperation": lambda world: operations.GetOperationRequest(id=world.operation),
    "ListOperations": lambda world: operations.ListOperationsRequest(namespace=world.namespace, page_size=PAGE_MAX),
    "CancelOperation": lambda world: operations.CancelOperationRequest(id=world.operation),
    "GetServerStatus": lambda _: server_service_pb2.GetServerStatusRequest(),
    "GetServerInfo": lambda _: server_service_pb2.GetServerInfoRequest(),
}
"""By the name of the rpc."""


def find_missing() -> list[str]:
    """Rpcs of the contract without arguments here, and lines here without an rpc."""
    return sorted({method.name for method in METHODS} ^ set(ARGUMENTS))


def path_of(method: MethodDescriptor) -> str:
    """The path of an rpc."""
    return f"/{method.containing_service.full_name}/{method.name}"


class Caller:
    """Calls by descriptor over gRPC, with answers as bytes."""

    def __init__(self, address: str, token: str = "") -> None:
        self.channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    async def call(
        self, method: MethodDescriptor, given: Message | list[Message], quiet_s: float | None = QUIET_S
    ) -> list[bytes]:
        """All responses; of a stream that stays open, those until it is quiet for `quiet_s`; None: never."""
        requests = given if isinstance(given, list) else [given]
        make = self.channel.stream_stream if method.client_streaming else self.channel.unary_stream
        sent: Any = _send(requests) if method.client_streaming else requests[0]
        serialize = type(requests[0]).SerializeToString
        start: Any = make(path_of(method), request_serializer=serialize)
        call = start(sent, metadata=self._metadata, timeout=120)
        answers: list[bytes] = []
        try:
            while True:
                reading = asyncio.ensure_future(call.read())
                reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may end after this
                await asyncio.wait({reading}, timeout=quiet_s if method.server_streaming and answers else None)
                if not reading.done() or (answer := reading.result()) is grpc.aio.EOF:
                    return answers
                answers.append(answer)
        finally:
            call.cancel()

    async def flood(self, method: MethodDescriptor, world: World, calls: int, ends: Ends | None = None) -> None:
        """Keep this many calls in flight until cancelled."""
        await _keep_in_flight(self.send, method, world, calls, ends or Ends())

    async def send(self, method: MethodDescriptor, given: Message | list[Message]) -> bool:
        """Call; False if the call is refused."""
        try:
            await self.call(method, given)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def aclose(self) -> None:
        """Ends all calls."""
        await self.channel.close()


async def flood_http(
    address: str, method: MethodDescriptor, world: World, calls: int, token: str = "", ends: Ends | None = None
) -> None:
    """Keep this many calls in flight until cancelled, as JSON. A quiet stream is opened again."""
    kind = "application/connect+json" if method.server_streaming else "application/json"
    headers = {"content-type": kind} | ({"authorization": f"Bearer {token}"} if token else {})
    limits = httpx2.Limits(max_connections=calls, max_keepalive_connections=calls)
    timeout = httpx2.Timeout(120, read=QUIET_S) if method.server_streaming else httpx2.Timeout(120)
    async with httpx2.AsyncClient(
        base_url=f"http://{address}", headers=headers, limits=limits, timeout=timeout
    ) as client:

        async def send(method: MethodDescriptor, given: Message | list[Message]) -> bool:
            assert isinstance(given, Message)
            body = json_format.MessageToJson(given).encode()
            if method.server_streaming:
                body = struct.pack(">BI", 0, len(body)) + body
            answered = True
            with suppress(httpx2.ReadTimeout):
                async with client.stream("POST", path_of(method), content=body) as answer:
                    answered = answer.status_code == httpx2.codes.OK
                    async for _ in answer.aiter_raw():
                        pass
            return answered

        await _keep_in_flight(send, method, world, calls, ends or Ends())


Send = Callable[[MethodDescriptor, "Message | list[Message]"], Awaitable[bool]]
"""Makes a call; False if it is refused."""


async def prepare_call(send: Send, method: MethodDescriptor, world: World) -> None:
    """Make what a call is to delete or edit."""
    name = world.new_name()
    if method.name == "DeleteMemory":
        await send(_BY_NAME["CloneMemory"], memories.CloneMemoryRequest(**world.memory, new_memory=name))
        world.cloned.append(name)
    elif method.name == "DeleteConversation":
        forking = conversations.ForkConversationRequest(**world.conversation, new_conversation=name)
        await send(_BY_NAME["ForkConversation"], forking)
        world.forked.append(name)
    elif method.name in ("DeleteBlock", "EditBlock"):
        await send(_BY_NAME["PutBlock"], _block(world))
    elif method.name == "DeleteState":
        await send(_BY_NAME["SetState"], conversations.SetStateRequest(**_state(world), document="{}"))


async def _keep_in_flight(send: Send, method: MethodDescriptor, world: World, calls: int, ends: Ends) -> None:
    """Refused calls are made again after a pause."""

    async def repeat() -> None:
        while True:
            await prepare_call(send, method, world)
            if await send(method, ARGUMENTS[method.name](world)):
                ends.answered += 1
            else:
                ends.refused += 1
                await asyncio.sleep(0.02)

    await asyncio.gather(*(repeat() for _ in range(calls)))


async def _send(requests: Sequence[Message]) -> AsyncIterator[Message]:
    for request in requests:
        yield request


async def prepare_world(caller: Caller, namespace: str, fragments: int) -> World:
    """Fill a memory with its blocks, and a conversation."""
    world = World(namespace, fragments)

    async def ask(name: str, given: Message | list[Message]) -> list[bytes]:
        return await caller.call(_BY_NAME[name], given)

    created = memories.CreateMemoryRequest(**world.memory, exist_ok=True)
    created.policy.history.versions = VERSIONS
    await ask("CreateMemory", created)
    for start in range(0, fragments, BATCH_MAX):
        made = _observations(world, min(BATCH_MAX, fragments - start))
        await ask("ObserveBatch", streams.ObserveBatchRequest(**world.memory, observations=made))
    await ask("PutFragment", memories.PutFragmentRequest(**world.memory, observation=_put(world)))
    page = (await ask("ListFragments", memories.ListFragmentsRequest(**world.memory, page_size=PAGE_MAX)))[0]
    world.ids = [each.id for each in memories.ListFragmentsResponse.FromString(page).fragments][:PAGE_MAX]
    for place in range(1, min(UPDATED, len(world.ids) - 1)):
        await ask("UpdateFragment", _update(world, place))
        history = memories.GetFragmentHistoryRequest(**world.memory, id=world.ids[place])
        kept = memories.GetFragmentHistoryResponse.FromString((await ask("GetFragmentHistory", history))[0]).versions
        world.versions.append({"id": world.ids[place], "version": kept[0].version})
    query = _query(world)
    query.receipt = True
    answer = (await ask("RecallOnce", streams.RecallOnceRequest(**world.memory, query=query)))[0]
    world.receipt = streams.RecallOnceResponse.FromString(answer).done.receipt_id
    exported = await ask("ExportMemories", memories.ExportMemoriesRequest(**world.memory, include_vectors=True))
    world.exported = b"".join(memories.ExportMemoriesResponse.FromString(each).lines for each in exported)
    for _ in range(min(fragments, 30)):
        given = conversations.AppendMessageRequest(namespace=namespace, message=_message(world))
        await ask("AppendMessage", given)
    purge = (await ask("StartPurge", operations.StartPurgeRequest(namespace=namespace)))[0]
    world.operation = operations.StartPurgeResponse.FromString(purge).operation.id
    await ask("SetState", ARGUMENTS["SetState"](world))
    for number in range(BLOCKS):
        await ask("PutBlock", _block(world))
        await ask("PutBlock", blocks.PutBlockRequest(**world.memory, block=f"b{number}", text="x" * CONTENT_BYTES))
    await ask("SavePlans", conversations.SavePlansRequest(**world.conversation, plans=_plans(world)))
    for number in range(min(fragments, 50)):
        other = memories.CreateMemoryRequest(namespace=namespace, memory=f"memory-{number}", exist_ok=True)
        await ask("CreateMemory", other)
    return world


def to_record(world: World) -> str:
    """A world as text for another process."""
    text = world.exported.decode("latin-1")
    return json.dumps(
        [world.namespace, world.fragments, world.ids, world.receipt, world.operation, world.versions, text]
    )


def from_record(text: str) -> World:
    """Inverse of `to_record`."""
    namespace, fragments, ids, receipt, operation, versions, exported = json.loads(text)
    world = World(namespace, fragments, ids, receipt, operation, exported.encode("latin-1"), versions)
    world.numbers = itertools.count(10_000_000)
    return world
