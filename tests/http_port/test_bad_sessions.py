"""Bad input of sessions gets one status and reason on both ports, and changes nothing."""

from __future__ import annotations

import json
from typing import Any

import grpc.aio
import httpx2
from google.protobuf import json_format

import memstream
from memstream import StateScope
from memstream.v1 import conversation_service_pb2 as pb
from memstream.v1.conversation_service_pb2_grpc import ConversationServiceStub
from tests.rpc.wire import refused
from tests.support.server import ServerProcess

SPACE = "badsessions"
TALK = {"namespace": SPACE, "conversation": "talk"}
STATE = {"namespace": SPACE, "scope": "STATE_SCOPE_APP", "name": "app"}
LARGE = '"' + "x" * ((4 << 20) - 1) + '"'
"""4 MiB and a byte."""
NESTED = "[" * 200_000 + "]" * 200_000
STATUS = {"INVALID_FIELD": 400, "CONVERSATION_NOT_FOUND": 404, "ETAG_MISMATCH": 409}
INVALID, ABSENT, PASSED = STATUS


def appending(body: str) -> dict[str, Any]:
    return TALK | {"messages": [{"role": "user"}, {"body": body}]}


def replacing(**message: Any) -> dict[str, Any]:
    return {"namespace": SPACE, "message": {"conversation": "talk"} | message}


def together(**write: Any) -> dict[str, Any]:
    first = {"appendMessages": {"conversation": "talk", "messages": [{"content": "x"}]}}
    return {"namespace": SPACE, "writes": [first, write]}


NO_NUMBER = {"conversation": "talk", "numbers": {"numbers": [99]}}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no JSON": ("AppendMessages", appending("{"), INVALID),
    "no JSON in its place": ("ReplaceMessage", replacing(number=1, body="NaN"), INVALID),
    "no JSON in a state": ("SetState", STATE | {"document": "[1,]"}, INVALID),
    "4 MiB and a byte": ("AppendMessages", appending(LARGE), INVALID),
    "a state of 4 MiB and a byte": ("SetState", STATE | {"document": LARGE}, INVALID),
    "deeply nested": ("AppendMessages", appending(NESTED), INVALID),
    "a deeply nested state": ("SetState", STATE | {"document": NESTED}, INVALID),
    "a number": ("GetMessage", TALK | {"number": 99}, ABSENT),
    "a client id": ("GetMessage", TALK | {"clientId": "none"}, ABSENT),
    "a number to replace": ("ReplaceMessage", replacing(number=99), ABSENT),
    "a number to delete": ("RemoveMessages", TALK | {"numbers": {"numbers": [1, 99]}}, ABSENT),
    "a number to fork at": ("ForkConversation", TALK | {"newConversation": "fork", "number": 99}, ABSENT),
    "a plan": ("CompletePlan", TALK | {"subTaskNumber": 9}, ABSENT),
    "a passed number": ("AppendMessages", TALK | {"messages": [{"content": "x"}], "lastNumber": 1}, PASSED),
    "a passed number to pop": ("PopMessage", TALK | {"lastNumber": 1}, PASSED),
    "a passed number to delete": ("DeleteConversation", TALK | {"lastNumber": 1}, PASSED),
    "a passed number to remove": ("RemoveMessages", TALK | {"oldest": 1, "lastNumber": 1}, PASSED),
    "a passed etag": ("SetState", STATE | {"document": "2", "etag": "1"}, PASSED),
    "a passed etag to delete": ("DeleteState", STATE | {"etag": "1"}, PASSED),
    "no JSON in a transaction": ("WriteTogether", together(setState=STATE | {"document": "{"}), INVALID),
    "a passed etag in one": ("WriteTogether", together(deleteState=STATE | {"etag": "1"}), PASSED),
    "a number in one": ("WriteTogether", together(removeMessages=NO_NUMBER), ABSENT),
}


async def fill(client: memstream.Client) -> None:
    talk = client.conversation(f"{SPACE}/talk")
    await talk.append_messages([memstream.NewMessage(content="1"), memstream.NewMessage(content="2")], absent=True)
    await talk.save_plans([memstream.Plan(number=1)])
    await client.set_state(SPACE, StateScope.APP, "app", "1")


async def look(client: memstream.Client) -> list[object]:
    talk = client.conversation(f"{SPACE}/talk")
    return [
        await talk.describe(),
        [one async for one in talk.messages()],
        [one async for one in talk.plans()],
        await client.get_state(SPACE, StateScope.APP, "app"),
        [one async for one in client.list_conversations(SPACE)],
    ]


async def test_bad_input_is_refused_alike_on_both_ports(http_server: tuple[ServerProcess, str]) -> None:
    server, address = http_server
    async with (
        memstream.connect(server.address) as client,
        grpc.aio.insecure_channel(server.address) as channel,
        httpx2.AsyncClient(timeout=30) as http,
    ):
        stub = ConversationServiceStub(channel)
        await fill(client)
        before = await look(client)
        for case, (rpc, given, reason) in CASES.items():
            request = json_format.ParseDict(given, getattr(pb, f"{rpc}Request")())
            over_grpc = await refused(getattr(stub, rpc)(request))
            url = f"http://{address}/memstream.v1.ConversationService/{rpc}"
            answer = await http.post(url, content=json.dumps(given), headers={"content-type": "application/json"})
            said = [one["debug"]["reason"] for one in answer.json()["details"] if "reason" in one.get("debug", {})]
            assert (case, over_grpc.reason, said) == (case, reason, [reason])
            assert (case, answer.status_code) == (case, STATUS[reason])
            assert await look(client) == before, case
