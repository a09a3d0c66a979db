"""Messages with bodies, conditions and deletions over gRPC: what agent frameworks need of a session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import memstream
from memstream import Conversation, ConversationNotFound, InvalidRequest, Message, NewMessage
from memstream.v1 import conversation_service_pb2 as pb
from memstream_server.adapters.journal.sql.messages import BODY_INLINE_BYTES
from tests.support.server import ServerProcess

BODIES_MAX = 4 << 20
ODD = '{"b": [1.0e2,\n 1E+2], "b": "\\ud83d", "z": "\\u0000 茶"}'
"""JSON that no decoder and encoder leaves as it is: order, spaces, numbers, a repeated key, half an emoji, NUL."""


async def bodies(messages: AsyncIterator[Message]) -> list[str | None]:
    return [message.body async for message in messages]


async def numbers(messages: AsyncIterator[Message]) -> list[int]:
    return [message.number async for message in messages]


async def say(talk: Conversation, count: int, **fields: Any) -> memstream.Appended:
    return await talk.append_messages([NewMessage(role="user", body=f"{place}", **fields) for place in range(count)])


async def test_bodies_return_byte_for_byte(talk: Conversation) -> None:
    large = json.dumps({"output": "x" * (BODIES_MAX - 14)})
    edge = json.dumps("y" * (BODY_INLINE_BYTES - 2))
    given = [ODD, "null", edge, edge[:-1] + 'y"', '"' + "茶" * 1_000 + '"', large]
    assert len(large.encode()) == BODIES_MAX
    for body in given:
        await talk.append_messages([NewMessage(body=body)])
    assert await bodies(talk.messages()) == given
    assert await bodies(talk.messages(newest_first=True)) == given[::-1]
    assert [(await talk.message(place)).body for place in range(1, 7)] == given
    listed = [message async for message in talk.messages(bodies=False)]
    assert [(one.body, one.body_size_bytes) for one in listed] == [(None, len(body.encode())) for body in given]
    assert (await talk.last_message()).body == large
    async with talk.watch() as watch:
        assert [(await anext(watch)).body for _ in given] == given


async def test_fields_of_a_message_return(talk: Conversation) -> None:
    said = datetime(2024, 5, 1, 12, tzinfo=UTC)
    given = NewMessage(
        role="tool",
        content="sunny",
        body="[]",
        name="weather",
        tool_call_id="call_1",
        client_id="m1",
        metadata={"a": 1, "b": "x", "c": True, "d": 0.5},
        time=said,
        sender="joy",
        receiver="bob",
        model_name="m",
    )
    done = await talk.append_messages([given])
    (kept,) = [message async for message in talk.messages()]
    for name in (
        "role",
        "content",
        "body",
        "name",
        "tool_call_id",
        "client_id",
        "metadata",
        "time",
        "sender",
        "receiver",
    ):
        assert getattr(kept, name) == getattr(given, name)
    assert (kept.number, kept.create_time, kept.model_name) == (1, done.create_time, "m")


async def test_repeated_client_id_appends_nothing(talk: Conversation) -> None:
    batch = [NewMessage(role="user", body="1", client_id="a"), NewMessage(role="user", body="2", client_id="b")]
    first = await talk.append_messages(batch, absent=True)
    again = await talk.append_messages(batch, absent=True)
    assert (first.numbers, first.count, again.numbers, again.count) == ((1, 2), 2, (1, 2), 0)
    more = await talk.append_messages([*batch, NewMessage(body="3")], last_number=2)
    assert (more.numbers, more.count, more.last_number) == ((1, 2, 3), 1, 3)
    with pytest.raises(memstream.RequestIdConflict):
        await talk.append_messages([NewMessage(body="4"), NewMessage(role="user", body="9", client_id="a")])
    assert await bodies(talk.messages()) == ["1", "2", "3"]
    await talk.remove_messages([1])
    assert (await talk.append_messages(batch[:1])).numbers == (4,)


async def test_refused_condition_changes_nothing(talk: Conversation) -> None:
    with pytest.raises(memstream.EtagMismatch) as caught:
        await talk.append_messages([NewMessage(body="1")], last_number=1)
    assert caught.value.details["etag"] == "0"
    with pytest.raises(ConversationNotFound):
        await numbers(talk.messages())
    await talk.append_messages([NewMessage(body="1")], last_number=0)
    with pytest.raises(memstream.MemoryExists):
        await talk.append_messages([NewMessage(body="2")], absent=True)
    with pytest.raises(memstream.EtagMismatch):
        await talk.append_messages([NewMessage(body="2"), NewMessage(body="3")], last_number=0)
    assert await bodies(talk.messages()) == ["1"]


async def test_of_two_writers_one_wins(talk: Conversation) -> None:
    await say(talk, 1)
    ended = await asyncio.gather(
        *(talk.append_messages([NewMessage(body=f"{n}")] * 3, last_number=1) for n in range(8)), return_exceptions=True
    )
    won = [one for one in ended if isinstance(one, memstream.Appended)]
    assert [one.numbers for one in won] == [(2, 3, 4)]
    assert {type(one) for one in ended if one not in won} == {memstream.EtagMismatch}
    assert await numbers(talk.messages()) == [1, 2, 3, 4]


async def test_messages_are_listed_between_numbers(talk: Conversation) -> None:
    await say(talk, 30)
    assert await numbers(talk.messages(limit=3, newest_first=True)) == [30, 29, 28]
    assert await numbers(talk.messages(after=10, before=14)) == [11, 12, 13]
    assert await numbers(talk.messages(after=10, before=20, newest_first=True, page_size=2)) == [*range(19, 10, -1)]
    assert await numbers(talk.messages(after=27, page_size=2)) == [28, 29, 30]
    assert await numbers(talk.messages(limit=7, page_size=3)) == [1, 2, 3, 4, 5, 6, 7]


async def test_pages_of_long_messages_hold_all_of_them(talk: Conversation) -> None:
    for _ in range(6):
        await say(talk, 50, content="x" * 2_000)
    everything = [*range(1, 301)]
    for bodies_too in (True, False):
        assert await numbers(talk.messages(bodies=bodies_too, page_size=1_000)) == everything
        newest = talk.messages(bodies=bodies_too, page_size=1_000, newest_first=True)
        assert await numbers(newest) == everything[::-1]
    async with talk.watch() as watch:
        assert [(await anext(watch)).number for _ in everything] == everything


async def test_messages_are_listed_between_times(talk: Conversation) -> None:
    times = []
    for _ in range(5):
        done = await say(talk, 2)
        assert done.create_time is not None
        times.append(done.create_time)
    assert times == sorted(times)
    await talk.remove_messages([5, 6])
    tick = timedelta(microseconds=1)
    assert await numbers(talk.messages(after_time=times[1])) == [7, 8, 9, 10]
    assert await numbers(talk.messages(after_time=times[1] - tick)) == [3, 4, 7, 8, 9, 10]
    assert await numbers(talk.messages(before_time=times[3])) == [1, 2, 3, 4]
    assert await numbers(talk.messages(before_time=times[3] + tick, newest_first=True)) == [8, 7, 4, 3, 2, 1]
    assert await numbers(talk.messages(after_time=times[0], before_time=times[4], limit=1)) == [3]
    assert await numbers(talk.messages(after_time=times[4])) == []


async def test_messages_are_replaced_and_removed(talk: Conversation) -> None:
    done = await say(talk, 9)
    new = await talk.replace_message(4, NewMessage(body='"' + "n" * 5_000 + '"', client_id="four"))
    assert (new.number, new.create_time, new.body, new.body_size_bytes) == (4, done.create_time, None, 5_002)
    assert (await talk.message(4)).body_size_bytes == 5_002
    assert (await talk.replace_message(4, NewMessage(body="4", client_id="four"))).body_size_bytes == 1
    with pytest.raises(memstream.RequestIdConflict):
        await talk.replace_message(5, NewMessage(client_id="four"))
    assert await talk.remove_messages([2, 5]) == 2
    assert await talk.remove_oldest(2) == 2
    assert await numbers(talk.messages()) == [4, 6, 7, 8, 9]
    assert (await talk.pop_message()).body == "8"
    assert await talk.truncate(7) == 2
    assert await bodies(talk.messages()) == ["4", "5"]
    assert (await say(talk, 1)).numbers == (10,)
    assert await talk.remove_oldest(99) == 3
    with pytest.raises(ConversationNotFound):
        await talk.pop_message()
    assert await numbers(talk.messages()) == []


async def test_number_that_is_absent_changes_nothing(talk: Conversation) -> None:
    await say(talk, 3)
    for attempt in (talk.message(4), talk.replace_message(4, NewMessage(body="1")), talk.remove_messages([1, 2, 4])):
        with pytest.raises(ConversationNotFound):
            await attempt
    assert await talk.truncate(4) == 0
    assert await bodies(talk.messages()) == ["0", "1", "2"]


async def test_repeated_pop_returns_the_same_message(client: memstream.Client, talk: Conversation) -> None:
    await say(talk, 3)
    rpcs, named = client._link.conversations, {"namespace": talk.namespace, "conversation": talk.name}
    pop = pb.PopMessageRequest(request_id="p", **named)
    assert [(await client._link.call(rpcs.PopMessage, pop)).message.number for _ in range(2)] == [3, 3]
    remove = pb.RemoveMessagesRequest(oldest=1, request_id="r", **named)
    assert [(await client._link.call(rpcs.RemoveMessages, remove)).removed for _ in range(2)] == [1, 1]
    assert await numbers(talk.messages()) == [2]


@pytest.mark.parametrize(
    "body",
    ["", "{", "[1,]", "NaN", "01", "'a'", '"\t"', '{"a":1} 2', "[" * 200_000, '"\\ud8"', "{1:2}"],
    ids=lambda body: body[:9],
)
async def test_body_that_is_no_json_is_refused(talk: Conversation, body: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await talk.append_messages([NewMessage(body="1"), NewMessage(body=body)])
    assert [violation.field for violation in caught.value.violations] == ["messages[1].body"]
    with pytest.raises(ConversationNotFound):
        await numbers(talk.messages())


async def test_body_of_4_mib_and_a_byte_is_refused(talk: Conversation) -> None:
    await say(talk, 1)
    for attempt in (
        talk.append_messages([NewMessage(body='"' + "x" * (BODIES_MAX - 1) + '"')]),
        talk.replace_message(1, NewMessage(body='"' + "x" * (BODIES_MAX - 1) + '"')),
        talk.append("joy", "hello", body='"' + "x" * (BODIES_MAX - 1) + '"'),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await attempt
        assert "at most 4194304 are allowed" in str(caught.value)
    assert await bodies(talk.messages()) == ["0"]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"client_id": "a"}, {"client_id": "a"}], "messages"),
        ([{}] * 1_025, "messages"),
        ([{"conversation": "other"}], "messages[0].conversation"),
        ([{"tool_call_id": "\n"}], "messages[0].tool_call_id"),
        ([{"metadata": {"a": {}}}], "messages[0].metadata['a']"),
        ([{"context": "{"}], "messages[0].context"),
    ],
)
async def test_bad_messages_name_the_field(
    client: memstream.Client, talk: Conversation, messages: list[dict[str, Any]], field: str
) -> None:
    request = pb.AppendMessagesRequest(namespace=talk.namespace, conversation=talk.name, messages=messages)
    with pytest.raises(InvalidRequest) as caught:
        await client._link.call(client._link.conversations.AppendMessages, request)
    assert field in [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize(
    ("rpc", "given", "field"),
    [
        ("RemoveMessages", {}, "which"),
        ("RemoveMessages", {"numbers": {}}, "numbers.numbers"),
        ("RemoveMessages", {"numbers": {"numbers": [1] * 1_001}}, "numbers.numbers"),
        ("RemoveMessages", {"numbers": {"numbers": [0]}}, "numbers.numbers[0]"),
        ("RemoveMessages", {"oldest": 0}, "oldest"),
        ("RemoveMessages", {"from_number": -1}, "from_number"),
        ("GetMessage", {"number": 2**40}, "number"),
        ("ListMessages", {"before_number": -1}, "before_number"),
        ("ListMessages", {"after_number": 2**40}, "after_number"),
        ("AppendMessages", {"messages": [{}], "last_number": -1}, "last_number"),
        ("ReplaceMessage", {"message": {}}, "message.number"),
    ],
)
async def test_bad_numbers_name_the_field(
    client: memstream.Client, talk: Conversation, rpc: str, given: dict[str, Any], field: str
) -> None:
    if rpc != "ReplaceMessage":
        given = given | {"conversation": talk.name}
    request = getattr(pb, f"{rpc}Request")(namespace=talk.namespace, **given)
    with pytest.raises(InvalidRequest) as caught:
        await client._link.call(getattr(client._link.conversations, rpc), request)
    assert field in [violation.field for violation in caught.value.violations]


def test_blocking_client_has_the_same_methods(talking: ServerProcess, talk: Conversation) -> None:
    with memstream.sync.connect(talking.address) as client:
        conversation = client.conversation(talk.path)
        given = [NewMessage(body=f"{n}") for n in range(9)]
        assert conversation.append_messages(given, absent=True).numbers == tuple(range(1, 10))
        assert [one.number for one in conversation.messages(limit=2, newest_first=True)] == [9, 8]
        assert conversation.message(3).body == "2"
        assert conversation.replace_message(3, NewMessage(body="7")).body_size_bytes == 1
        assert conversation.pop_message().number == 9
        assert (conversation.remove_messages([2]), conversation.remove_oldest(1), conversation.truncate(8)) == (1, 1, 1)
        assert [one.body for one in conversation.messages(after=2)] == ["7", "3", "4", "5", "6"]
