"""request_id: on every rpc that has one a repeat gets the first response, and another request with it conflicts."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

import memstream
from memstream.status import error_from_rpc
from tests.access.calls import path_of, request_of
from tests.support.contract import METHODS
from tests.support.server import ServerProcess

WHERE = {"namespace": "${ns}", "memory": "joy"}
BATCH = {"namespace": "${ns}", "memory": "joy", "observations": [{"content": "one"}, {"content": "two"}]}
WHICH = {"namespace": "${ns}", "memory": "joy", "ids": ["${fragment}"]}
TALK = {"namespace": "${ns}", "conversation": "talk"}
BLOCK = {"namespace": "${ns}", "memory": "joy", "block": "persona"}
CALLS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "CreateMemory": ({"namespace": "${ns}", "memory": "new"}, [{"memory": "other"}, {"labels": {"a": "b"}}]),
    "UpdateMemory": (
        {"memory": {"namespace": "${ns}", "name": "joy", "labels": {"a": "b"}}, "updateMask": "labels"},
        [{"memory": {"namespace": "${ns}", "name": "joy", "labels": {"a": "c"}}}],
    ),
    "CloneMemory": ({"namespace": "${ns}", "memory": "joy", "newMemory": "twin"}, [{"newMemory": "another"}]),
    "ClearMemory": ({"namespace": "${ns}", "memory": "joy"}, [{"tiers": ["TIER_LONG_TERM"]}]),
    "DeleteMemory": ({"namespace": "${ns}", "memory": "joy"}, [{"memory": "other"}]),
    "PutFragment": (
        {"namespace": "${ns}", "memory": "joy", "observation": {"content": "put", "externalId": "key"}},
        [{"observation": {"content": "put", "externalId": "other"}}, {"memory": "other"}],
    ),
    "UpdateFragment": (
        {
            "namespace": "${ns}",
            "memory": "joy",
            "fragment": {"id": "${fragment}", "pinned": True},
            "updateMask": "pinned",
        },
        [{"fragment": {"id": "${fragment}", "pinned": False}}],
    ),
    "ForgetFragments": (WHICH, [{"ids": ["${other}"]}, {"ids": []} | {"filter": {"sessions": ["s"]}}]),
    "RestoreFragments": (WHICH, [{"ids": ["${other}"]}]),
    "SupersedeFragments": (WHICH | {"newerId": "${other}"}, [{"newerId": "${fragment}", "ids": ["${other}"]}]),
    "RestoreFragmentVersion": (
        WHERE | {"id": "${fragment}", "version": "${version}"},
        [{"id": "${other}"}],
    ),
    "EraseFragments": (WHICH, [{"ids": ["${other}"]}]),
    "ObserveBatch": (
        BATCH,
        [
            {"observations": [{"content": "one"}]},
            {"observations": [{"content": "one"}, {"content": "two"}, {"content": "three"}]},
            {"observations": [{"content": "one"}, {"content": "two", "speaker": "Bob"}]},
            {"session": "s"},
            {"ackLevel": "ACK_LEVEL_RECEIVED"},
            {"producer": "p", "firstSequence": "1"},
        ],
    ),
    "AppendMessage": (
        {"namespace": "${ns}", "message": {"conversation": "talk", "sender": "ann", "content": "hello"}},
        [{"message": {"conversation": "talk", "sender": "ann", "content": "bye"}}],
    ),
    "AppendMessages": (
        TALK | {"messages": [{"role": "user", "content": "hello"}]},
        [
            {"messages": [{"role": "user", "content": "bye"}]},
            {"messages": [{"role": "user", "content": "hello"}, {"role": "user", "content": "hello"}]},
            {"lastNumber": "1"},
        ],
    ),
    "ReplaceMessage": (
        {"namespace": "${ns}", "message": {"conversation": "talk", "number": "1", "content": "hello"}},
        [{"message": {"conversation": "talk", "number": "1", "content": "bye"}}],
    ),
    "RemoveMessages": (TALK | {"oldest": "1"}, [{"conversation": "other"}]),
    "PopMessage": (TALK, [{"conversation": "other"}]),
    "UpdateConversation": (TALK | {"labels": {"labels": {"user": "ann"}}, "allowMissing": True}, [{"ttl": "9s"}]),
    "ForkConversation": (TALK | {"newConversation": "fork-${ns}"}, [{"newConversation": "other"}, {"number": "1"}]),
    "SetState": (
        {"namespace": "${ns}", "scope": "STATE_SCOPE_APP", "name": "x", "document": "1"},
        [{"document": "2"}, {"absent": True}],
    ),
    "WriteTogether": (
        {
            "namespace": "${ns}",
            "memory": "joy",
            "writes": [
                {"appendMessages": TALK | {"messages": [{"role": "user", "content": "hello"}]}},
                {"putFragment": {"observation": {"externalId": "together", "content": "one"}}},
            ],
        },
        [{"writes": [{"appendMessages": TALK | {"messages": [{"content": "bye"}]}}], "memory": ""}],
    ),
    "DeleteState": ({"namespace": "${ns}", "scope": "STATE_SCOPE_APP", "name": "x"}, [{"name": "y"}]),
    "CompleteConversation": (TALK, [{"conversation": "other"}]),
    "DeleteMessages": (TALK, [{"conversation": "other"}]),
    "SavePlans": (
        TALK | {"plans": [{"subTaskNumber": 1, "subTaskTitle": "look"}]},
        [{"plans": [{"subTaskNumber": 2, "subTaskTitle": "look"}]}],
    ),
    "UpdatePlan": (TALK | {"subTaskNumber": 1, "result": "seen"}, [{"result": "heard"}]),
    "CompletePlan": (TALK | {"subTaskNumber": 1, "result": "seen"}, [{"result": "heard"}]),
    "RemovePlans": (TALK, [{"conversation": "other"}]),
    "DeleteConversation": (TALK, [{"conversation": "other"}]),
    "PutBlock": (BLOCK | {"text": "one"}, [{"text": "two"}, {"absent": True}, {"block": "other"}]),
    "EditBlock": (BLOCK | {"append": {"text": "one"}}, [{"append": {"text": "two"}}, {"etag": "1"}]),
    "DeleteBlock": (BLOCK, [{"block": "other"}]),
    "StartReindex": ({}, [{"embed": True}]),
    "StartPurge": ({"namespace": "${ns}"}, [{"memory": "joy"}]),
}
ELSEWHERE = {
    "ReflectMemory": "it needs an LLM",
    "ResolveConflict": "it needs a suspicion; tests/rpc/test_conflicts.py has its repeats",
    "ImportMemories": "it is a stream; tests/server/test_transfer.py has its repeats",
}


class Caller:
    """Calls rpcs by name, with `${...}` of earlier results."""

    def __init__(self, channel: grpc.aio.Channel, kept: dict[str, str]) -> None:
        self._channel, self.kept = channel, kept

    async def call(self, name: str, content: dict[str, Any], request_id: str = "") -> Message:
        (method,) = (one for one in METHODS if one.name == name)
        text = json.dumps(content)
        for key, value in self.kept.items():
            text = text.replace(f"${{{key}}}", value)
        request = json_format.Parse(text, request_of(method))
        if request_id:
            request.request_id = request_id  # type: ignore[attr-defined]  # of those that have one
        call = self._channel.unary_unary(
            path_of(method),
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        try:
            answer: Message = await call(request, timeout=30)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        return answer


@pytest.fixture
async def caller(shared: ServerProcess) -> AsyncIterator[Caller]:
    kept = {"ns": f"t-{uuid.uuid4().hex[:12]}"}
    async with grpc.aio.insecure_channel(shared.address) as channel:
        made = Caller(channel, kept)
        for name in ("joy", "other"):
            await made.call("CreateMemory", {"namespace": "${ns}", "memory": name})
        held = await made.call("ObserveBatch", BATCH | {"observations": [{"content": "kept"}, {"content": "also"}]})
        first, second = held.ack.outcomes  # type: ignore[attr-defined]  # of ObserveBatchResponse
        kept |= {"fragment": first.fragment_id, "other": second.fragment_id}
        changed = {"id": first.fragment_id, "content": "kept and changed"}
        await made.call("UpdateFragment", {**WHERE, "fragment": changed, "updateMask": "content"})
        history = await made.call("GetFragmentHistory", WHERE | {"id": first.fragment_id})
        kept["version"] = str(history.versions[0].version)  # type: ignore[attr-defined]  # of GetFragmentHistoryResponse
        plans = [{"subTaskNumber": 1, "subTaskTitle": "first"}]
        for talk in ("talk", "other"):
            said = {"conversation": talk, "sender": "ann", "content": "before"}
            await made.call("AppendMessage", {"namespace": "${ns}", "message": said})
            await made.call("SavePlans", {"namespace": "${ns}", "conversation": talk, "plans": plans})
        await made.call("PutBlock", BLOCK | {"text": "before"})
        yield made


def test_every_rpc_with_request_id_is_called() -> None:
    having = {method.name for method in METHODS if "request_id" in method.input_type.fields_by_name}
    opening = {
        method.name
        for method in METHODS
        for field in method.input_type.fields
        if field.message_type is not None and "request_id" in field.message_type.fields_by_name
    }
    assert having | opening == CALLS.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("name", CALLS)
async def test_repeat_gets_first_response_others_conflict(caller: Caller, name: str) -> None:
    content, others = CALLS[name]
    answers = await asyncio.gather(*(caller.call(name, content, "r") for _ in range(3)))
    answers.append(await caller.call(name, content, "r"))
    assert [answer == answers[0] for answer in answers] == [True] * 4
    for other in others:
        with pytest.raises(memstream.RequestIdConflict):
            await caller.call(name, content | other, "r")
    assert await caller.call(name, content, "r") == answers[0]


async def test_id_of_one_rpc_is_free_on_another(caller: Caller) -> None:
    for name in ("PutFragment", "ObserveBatch", "UpdateFragment", "AppendMessage", "SavePlans", "CreateMemory"):
        await caller.call(name, CALLS[name][0], "r")
