"""A real server with authentication: no rpc of the contract reaches a namespace in which its caller has no right."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

import memstream
from memstream.v1 import memory_service_pb2 as pb
from memstream.v1 import operation_service_pb2, stream_service_pb2
from memstream_server.rpc.access.caller import Verb
from memstream_server.rpc.rpc_table import RPC_RULES
from tests.access.calls import called, namespace_paths, path_of, put, request_of
from tests.access.conftest import Guarded
from tests.support.contract import METHODS
from tests.support.waiting import until

DENIED = grpc.StatusCode.PERMISSION_DENIED
SERVER_WIDE = {"StartReindex", "GetServerStatus"}
NO_NAMESPACE = {"ListNamespaces", "GetOperation", "CancelOperation", "GetServerInfo", "Context", *SERVER_WIDE}
"""Context names memories by scopes, and a conversation: tests/access/test_scopes.py."""
SECRET = "pomegranate"


@pytest.fixture
async def channel(guarded: Guarded) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(guarded.server.address) as made:
        yield made


def _in(namespace: str, method: MethodDescriptor) -> Message:
    request = request_of(method)
    for path in namespace_paths(method.input_type):
        put(request, path, namespace)
    return request


@pytest.mark.parametrize("token", [None, f"msk_000000000000_{'A' * 43}", "odd"], ids=["no", "unknown", "odd"])
async def test_nobody_reaches_any_rpc(guarded: Guarded, channel: grpc.aio.Channel, token: str | None) -> None:
    for method in METHODS:
        outcome = await called(channel, method, [_in("a", method)], token)
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"), method.name
        assert not outcome.answers


async def test_health_is_told_to_everybody(channel: grpc.aio.Channel) -> None:
    async def serving() -> bool:  # including the index
        return await channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"

    await until(serving)


async def test_no_namespace_field_reaches_another_namespace(guarded: Guarded, channel: grpc.aio.Channel) -> None:
    tried = set()
    for method in METHODS:
        for path in namespace_paths(method.input_type):
            for foreign in ("b", "ab", "*", "a*"):
                request = _in("a", method)
                put(request, path, foreign)
                outcome = await called(channel, method, [request], guarded.keys["alice"])
                assert (outcome.code, outcome.reason) == (DENIED, "PERMISSION_DENIED"), (method.name, path, foreign)
                assert not outcome.answers
            tried.add(method.name)
    assert tried == {method.name for method in METHODS} - NO_NAMESPACE


async def test_identity_without_grant_has_no_rights(guarded: Guarded, channel: grpc.aio.Channel) -> None:
    for method in METHODS:
        outcome = await called(channel, method, [_in("a", method)], guarded.keys["nobody"])
        if method.name in NO_NAMESPACE - SERVER_WIDE:
            codes = {grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND}
            assert outcome.code in codes or (method.name, outcome.reason) == ("Context", "INVALID_FIELD"), method.name
        else:
            assert outcome.code is DENIED, method.name


@pytest.mark.parametrize("verb", Verb)
async def test_a_verb_allows_its_rpcs_and_no_other(guarded: Guarded, channel: grpc.aio.Channel, verb: Verb) -> None:
    for method in METHODS:
        needs = RPC_RULES[path_of(method)].needs
        if not needs or method.name in NO_NAMESPACE:
            continue
        outcome = await called(channel, method, [_in("v", method)], guarded.keys[f"only-{verb.value}"])
        assert outcome.refused is ({need.verb for need in needs} != {verb}), (method.name, outcome)


async def test_server_wide_rpcs_need_every_namespace(guarded: Guarded, channel: grpc.aio.Channel) -> None:
    by_name = {method.name: method for method in METHODS}
    for name in (*SERVER_WIDE, "StartPurge"):
        request = request_of(by_name[name])
        assert (await called(channel, by_name[name], [request], guarded.keys["alice"])).code is DENIED
        assert (await called(channel, by_name[name], [request], guarded.keys["root"])).code is grpc.StatusCode.OK


async def test_a_stream_cannot_go_on_to_another_memory(guarded: Guarded, channel: grpc.aio.Channel) -> None:
    async with memstream.connect(guarded.server.address, token=guarded.keys["root"]) as root:
        for path in ("a/stream", "b/stream"):
            await root.create_memory(path, exist_ok=True)
    for method in METHODS:
        if not method.client_streaming:
            continue
        first, second = _in("a", method), _in("b", method)
        for request in (first, second):
            put(request, "open.memory", "stream")
            if "producer" in request.open.DESCRIPTOR.fields_by_name:  # type: ignore[attr-defined]
                put(request, "open.producer", "p")
        outcome = await called(channel, method, [first, second], guarded.keys["alice"])
        assert outcome.code is grpc.StatusCode.FAILED_PRECONDITION, method.name
        assert outcome.reason == "PROTOCOL_VIOLATION"


class World:
    """Bob's data, and the parts of it that alice may have obtained."""

    def __init__(self, guarded: Guarded, channel: grpc.aio.Channel) -> None:
        self._channel, self._bob = channel, guarded.keys["bob"]
        self.methods = {method.name: method for method in METHODS}
        self.loot: dict[str, list[str]] = {}

    async def ask(self, name: str, **fields: Any) -> Any:
        request = type(request_of(self.methods[name]))(**fields)
        outcome = await called(self._channel, self.methods[name], [request], self._bob)
        assert outcome.code is grpc.StatusCode.OK, (name, outcome)
        return GetMessageClass(self.methods[name].output_type).FromString(outcome.answers[0])

    async def fill(self) -> None:
        where = {"namespace": "b", "memory": "joy"}
        await self.ask("CreateMemory", **where, labels={"about": SECRET}, request_id="r1")
        await self.ask("CreateMemory", namespace="b", memory="second", request_id="r2")
        put_in = [
            await self.ask(
                "PutFragment",
                **where,
                observation={"content": f"{SECRET} {n}", "external_id": f"e{n}"},
                request_id=f"f{n}",
            )
            for n in range(3)
        ]
        await self.ask(
            "ObserveBatch", **where, request_id="o1", observations=[{"content": SECRET}], ack_level="ACK_LEVEL_STORED"
        )
        asked = {"namespace": "b", "memory": "second", "query": {"text": SECRET, "receipt": True}}
        done = (await self.ask("RecallOnce", **asked)).done
        for n in range(2):
            message = {"conversation": "talk", "sender": "bob", "receiver": "joy", "content": SECRET}
            await self.ask("AppendMessage", namespace="b", message=message, request_id=f"m{n}")
            plan = {"conversation": "talk", "sub_task_number": n + 1, "sub_task_content": SECRET}
            await self.ask("SavePlans", namespace="b", conversation="talk", plans=[plan], request_id=f"p{n}")
        operations = [
            (await self.ask("StartPurge", namespace="b", request_id="s1")).operation,
            (await self.ask("StartPurge", **where, request_id="s2")).operation,
        ]
        tokens = [
            (await self.ask("ListFragments", **where, page_size=1)).next_page_token,
            (await self.ask("ListMemories", namespace="b", page_size=1)).next_page_token,
            (await self.ask("ListMessages", namespace="b", conversation="talk", page_size=1)).next_page_token,
            (await self.ask("ListPlans", namespace="b", conversation="talk", page_size=1)).next_page_token,
            (await self.ask("ListOperations", namespace="b", page_size=1)).next_page_token,
        ]
        assert all(tokens)
        ids = [each.fragment.id for each in put_in] + [each.id for each in operations]
        self.loot = {
            "page_token": tokens,
            "request_id": ["r1", "r2", "0", "o1", "m0", "p0", "s1", "s2"],
            "id": ids,
            "ids": ids,
            "external_id": ["e0", "e1"],
            "receipt_id": [done.receipt_id],
            "conversation": ["talk"],
            "memory": ["joy", "second", "b/joy", "../b/joy"],
            "new_memory": ["joy", "stolen"],
            "name": ["joy", "second"],
            "memory_uid": [(await self.ask("ListFragments", **where)).memory_uid],
            "producer": ["o1", "p"],
        }

    async def seen(self) -> list[bytes]:
        """Everything that bob sees."""
        where = {"namespace": "b", "memory": "joy"}
        asked = [
            ("GetMemory", where),
            ("ListMemories", {"namespace": "b"}),
            ("ListFragments", where),
            ("ListFragments", where | {"forgotten": True}),
            ("ListMessages", {"namespace": "b", "conversation": "talk"}),
            ("ListPlans", {"namespace": "b", "conversation": "talk"}),
        ]
        return [(await self.ask(name, **fields)).SerializeToString(deterministic=True) for name, fields in asked]


def _forged(method: MethodDescriptor, loot: dict[str, list[str]], draw: random.Random) -> Message:
    """A request in alice's name that uses what she has obtained."""
    request = request_of(method)
    _fill(request, loot, draw, 0)
    for path in namespace_paths(method.input_type):
        put(request, path, draw.choice(["a", "a", "a", "a", "a-other", "b", "", "A", "b\na", "a\nb"]))
    return request


def _fill(message: Message, loot: dict[str, list[str]], draw: random.Random, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if field.name in loot and field.type == FieldDescriptor.TYPE_STRING:
            if field.is_repeated:
                getattr(message, field.name).append(draw.choice(loot[field.name]))
            elif draw.random() < 0.8:
                setattr(message, field.name, draw.choice(loot[field.name]))
        elif field.name == "text":
            setattr(message, field.name, "what is there?")
        elif field.name == "open" or (field.message_type is not None and not field.is_repeated and depth < 2):
            if field.message_type.full_name.startswith("memstream.") and (field.name == "open" or draw.random() < 0.6):
                getattr(message, field.name).SetInParent()
                _fill(getattr(message, field.name), loot, draw, depth + 1)
        elif field.type == FieldDescriptor.TYPE_BOOL and draw.random() < 0.3:
            setattr(message, field.name, True)


async def test_leaked_ids_open_no_other_namespace(guarded: Guarded, channel: grpc.aio.Channel) -> None:
    world = World(guarded, channel)
    await world.fill()
    before = await world.seen()
    assert any(SECRET.encode() in each for each in before)
    async with memstream.connect(guarded.server.address, token=guarded.keys["alice"]) as alice:
        for path in ("a/joy", "a/second"):
            await alice.create_memory(path, exist_ok=True)
    draw, answered = random.Random(20_260_712), set()
    for method in METHODS:
        for _ in range(30):
            requests = _conversation(method, world.loot, draw)
            outcome = await called(channel, method, requests, guarded.keys["alice"], quiet_s=0.3)
            told = b"".join(outcome.answers)
            assert SECRET.encode() not in told, (method.name, requests)
            if outcome.code is grpc.StatusCode.OK:
                answered.add(method.name)
    assert await world.seen() == before
    assert len(answered) >= 15, answered  # otherwise all were malformed, and the test shows nothing


def _conversation(method: MethodDescriptor, loot: dict[str, list[str]], draw: random.Random) -> Sequence[Message]:
    first = _forged(method, loot, draw)
    if method.name == "Recall":
        return [first, stream_service_pb2.RecallRequest(query={"query_id": "q", "text": "pomegranate?"[:4]})]
    if method.name == "ImportMemories":
        return [first, pb.ImportMemoriesRequest(lines=b"{}\n")]
    return [first]


async def test_lists_show_only_callers_namespaces(guarded: Guarded, channel: grpc.aio.Channel) -> None:
    async with memstream.connect(guarded.server.address, token=guarded.keys["root"]) as root:
        for path in ("a/listed", "a-2/listed", "b/listed", "c/listed"):
            await root.create_memory(path, exist_ok=True)
        for namespace in ("a", "b"):
            await root.finished(await root.start_purge(namespace))
        await root.finished(await root.start_purge())
        all_named = {each.name async for each in root.list_namespaces(page_size=1)}
        all_worked = {each.namespace async for each in root.operations(page_size=1)}
        assert {"a", "a-2", "b", "c"} <= all_named
        assert {"a", "b", ""} <= all_worked
    async with memstream.connect(guarded.server.address, token=guarded.keys["alice"]) as alice:
        named = {each.name async for each in alice.list_namespaces(page_size=1)}
        worked = {each.namespace async for each in alice.operations(page_size=1)}
        assert named == {name for name in all_named if name == "a" or name.startswith("a-")}
        assert worked == {name for name in all_worked if name == "a" or name.startswith("a-")}
        assert {each.namespace async for each in alice.operations("a")} == {"a"}
        with pytest.raises(memstream.PermissionDenied):
            _ = [each async for each in alice.operations("b")]


async def test_foreign_operation_is_not_found(guarded: Guarded, channel: grpc.aio.Channel) -> None:
    by_name = {method.name: method for method in METHODS}
    async with memstream.connect(guarded.server.address, token=guarded.keys["bob"]) as bob:
        theirs = (await bob.start_purge("b")).id
        assert (await bob.operation(theirs)).id == theirs
        await bob.finished(theirs)
    unknown = "0" * len(theirs)
    for name in ("GetOperation", "CancelOperation"):
        kind = getattr(operation_service_pb2, f"{name}Request")
        told = [await called(channel, by_name[name], [kind(id=id)], guarded.keys["alice"]) for id in (theirs, unknown)]
        assert {each.reason for each in told} == {"OPERATION_NOT_FOUND"}
