"""Conversations as wholes: lists, labels, time to live, forks, state documents, erasure of a user."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

import memstream
from memstream import ConversationNotFound, ConversationSummary, InvalidRequest, NewMessage, StateKey, StateScope
from memstream.v1 import conversation_service_pb2 as pb
from memstream.v1 import memory_service_pb2 as memory_pb
from tests.server.test_erase import files_with
from tests.support.journals import only_sqlite
from tests.support.server import ServerProcess


async def sent(lines: bytes) -> AsyncIterator[bytes]:
    yield lines


@pytest.fixture
def space(talk: memstream.Conversation) -> str:
    """A namespace of the test's own."""
    return talk.namespace


async def names(listed: AsyncIterator[ConversationSummary]) -> list[str]:
    return [one.name async for one in listed]


async def fill(client: memstream.Client, space: str) -> None:
    for number, name in enumerate(("b-1", "a-1", "b-2", "a-2", "b-3")):
        talk = client.conversation(f"{space}/{name}")
        await talk.update(labels={"user": "bob" if number % 2 else "ann", "app": "x"}, absent=True)
        await talk.append_messages([NewMessage(role="user", body=f"{number}")])


async def test_conversations_are_listed_by_name_and_label(client: memstream.Client, space: str) -> None:
    await fill(client, space)
    assert await names(client.list_conversations(space, page_size=2)) == ["a-1", "a-2", "b-1", "b-2", "b-3"]
    assert await names(client.list_conversations(space, name_prefix="b-")) == ["b-1", "b-2", "b-3"]
    assert await names(client.list_conversations(space, labels={"user": "bob", "app": "x"})) == ["a-1", "a-2"]
    assert await names(client.list_conversations(space, labels={"user": "bob"}, name_prefix="b")) == []
    assert await names(client.list_conversations(f"{space}-other")) == []


async def test_latest_conversations_come_first(client: memstream.Client, space: str) -> None:
    await fill(client, space)
    await client.conversation(f"{space}/a-1").append("joy", "again")
    latest = ["a-1", "b-3", "a-2", "b-2", "b-1"]
    assert await names(client.list_conversations(space, latest_first=True, page_size=2)) == latest
    of_ann = client.list_conversations(space, latest_first=True, labels={"user": "ann"}, page_size=1)
    assert await names(of_ann) == ["b-3", "b-2", "b-1"]


async def test_conversation_shows_what_it_has(client: memstream.Client, talk: memstream.Conversation) -> None:
    with pytest.raises(ConversationNotFound):
        await talk.describe()
    with pytest.raises(ConversationNotFound):
        await talk.update(labels={})
    await talk.update(labels={"a": "1"}, ttl=timedelta(hours=1), create=True)
    await talk.append_messages([NewMessage(body="1"), NewMessage(body="2")])
    await talk.pop_message()
    found = await talk.describe()
    assert (found.labels, found.ttl, found.message_count, found.last_number) == ({"a": "1"}, timedelta(hours=1), 1, 2)
    assert found.update_time is not None
    assert found.expire_time == found.update_time + timedelta(hours=1)
    kept = await talk.update(ttl=timedelta())
    assert (kept.labels, kept.ttl, kept.expire_time) == ({"a": "1"}, None, None)
    assert (await talk.update(labels={})).labels == {}
    with pytest.raises(memstream.MemoryExists):
        await talk.update(absent=True)


async def test_deleted_conversation_leaves_nothing(client: memstream.Client, talk: memstream.Conversation) -> None:
    await talk.update(labels={"user": "bob"}, create=True)
    await talk.append_messages([NewMessage(body="1"), NewMessage(body='"' + "x" * 5_000 + '"', client_id="m")])
    await client.set_state(talk.namespace, StateScope.SESSION, talk.name, "{}")
    assert await talk.delete() == 2
    for attempt in (talk.describe(), client.get_state(talk.namespace, StateScope.SESSION, talk.name), talk.delete()):
        with pytest.raises(ConversationNotFound):
            await attempt
    assert await names(client.list_conversations(talk.namespace, labels={"user": "bob"})) == []
    assert (await talk.append_messages([NewMessage(body="3", client_id="m")], absent=True)).numbers == (1,)


async def test_fork_is_a_conversation_of_its_own(client: memstream.Client, talk: memstream.Conversation) -> None:
    large = '"' + "x" * 5_000 + '"'
    await talk.update(labels={"user": "bob"}, create=True)
    await talk.append_messages([NewMessage(body=large, client_id=f"m{n}") for n in range(4)])
    await client.set_state(talk.namespace, StateScope.SESSION, talk.name, '{"a": 1}')
    made = await talk.fork("copy", 3)
    copy = client.conversation(f"{talk.namespace}/copy")
    assert (made.message_count, made.last_number, made.labels) == (3, 3, {"user": "bob"})
    assert [(one.number, one.body, one.client_id) async for one in copy.messages()] == [
        (n + 1, large, f"m{n}") for n in range(3)
    ]
    assert (await client.get_state(talk.namespace, StateScope.SESSION, "copy")).document == '{"a": 1}'
    assert (await copy.append_messages([NewMessage(body="1")], last_number=3)).numbers == (4,)
    await copy.truncate(1)
    assert (await talk.describe()).message_count == 4
    assert (await talk.fork("whole")).message_count == 4
    with pytest.raises(memstream.MemoryExists):
        await talk.fork("copy")
    with pytest.raises(ConversationNotFound):
        await talk.fork("none", 9)
    assert await names(client.list_conversations(talk.namespace)) == ["copy", "monday", "whole"]


async def test_state_with_a_passed_etag_is_refused(client: memstream.Client, space: str) -> None:
    odd = '{"b":1, "a": [1.0e2, "茶"] }'
    for scope in StateScope:
        with pytest.raises(ConversationNotFound):
            await client.get_state(space, scope, "x")
        first = await client.set_state(space, scope, "x", odd, absent=True)
        assert (await client.get_state(space, scope, "x")) == first
        second = await client.set_state(space, scope, "x", "2", etag=first.etag)
        for given in ({"etag": first.etag}, {"absent": True}):
            with pytest.raises(memstream.EtagMismatch) as caught:
                await client.set_state(space, scope, "x", "3", **given)
            assert caught.value.details["etag"] == second.etag
        assert (await client.get_state(space, scope, "x")).document == "2"
        assert [await client.delete_state(space, scope, "x") for _ in range(2)] == [True, False]
        again = await client.set_state(space, scope, "x", "4", absent=True)
        assert again.etag not in (first.etag, second.etag)


async def test_states_are_read_in_one_call(client: memstream.Client, space: str) -> None:
    keys = [StateKey(StateScope.USER, f"user-{n}") for n in range(1_200)]
    large = '"' + "x" * 1_500_000 + '"'  # two of them are more than a page
    for key in keys[:4]:
        await client.set_state(space, key.scope, key.name, large)
    await client.set_state(space, keys[-1].scope, keys[-1].name, "1")
    found = await client.get_states(space, keys)
    assert {key: state.document for key, state in found.items()} == {**dict.fromkeys(keys[:4], large), keys[-1]: "1"}
    assert found[keys[0]] == await client.get_state(space, keys[0].scope, keys[0].name)
    assert await client.get_states(space, []) == {}


async def test_a_passed_etag_deletes_nothing(client: memstream.Client, talk: memstream.Conversation) -> None:
    space = talk.namespace
    await talk.append_messages([NewMessage(content=f"{n}", client_id=f"m{n}") for n in range(1, 4)])
    first = await client.set_state(space, StateScope.APP, "x", "1")
    second = await client.set_state(space, StateScope.APP, "x", "2", etag=first.etag)
    for attempt in (
        client.delete_state(space, StateScope.APP, "x", etag=first.etag),
        talk.remove_messages([1], last_number=2),
        talk.remove_oldest(1, last_number=4),
        talk.truncate(2, last_number=0),
        talk.pop_message(last_number=2),
        talk.delete(last_number=2),
    ):
        with pytest.raises(memstream.EtagMismatch):
            await attempt
    assert [one.number async for one in talk.messages()] == [1, 2, 3]
    assert (await talk.message(client_id="m2")).content == "2"
    assert (await talk.pop_message(last_number=3)).number == 3
    assert await talk.remove_messages([1], last_number=2) == 1
    assert await client.delete_state(space, StateScope.APP, "x", etag=second.etag)
    assert await talk.delete(last_number=2) == 1


async def test_of_concurrent_states_one_is_written(client: memstream.Client, space: str) -> None:
    first = await client.set_state(space, StateScope.APP, "x", "0")
    ended = await asyncio.gather(
        *(client.set_state(space, StateScope.APP, "x", f"{n}", etag=first.etag) for n in range(8)),
        return_exceptions=True,
    )
    assert sum(isinstance(one, memstream.State) for one in ended) == 1
    assert sum(isinstance(one, memstream.EtagMismatch) for one in ended) == 7


async def test_erasing_a_user_reaches_all_of_theirs(client: memstream.Client, space: str) -> None:
    await fill(client, space)
    for user in ("ann", "bob"):
        await client.set_state(space, StateScope.USER, user, "{}")
    assert await client.erase_user(space, "ann") == 3
    assert await names(client.list_conversations(space)) == ["a-1", "a-2"]
    with pytest.raises(ConversationNotFound):
        await client.get_state(space, StateScope.USER, "ann")
    assert (await client.get_state(space, StateScope.USER, "bob")).document == "{}"
    assert await client.erase_user(space, "ann") == 0


def appending(**fields: Any) -> dict[str, Any]:
    return {"append_messages": {"conversation": "talk", "messages": [{"content": "x"}]} | fields}


def putting(key: str, **fields: Any) -> dict[str, Any]:
    return {"put_fragment": {"observation": {"external_id": key, "content": "x"}} | fields}


@pytest.mark.parametrize(
    ("rpc", "given", "field"),
    [
        ("WriteTogether", {}, "writes"),
        ("WriteTogether", {"writes": [appending()] * 1_025}, "writes"),
        ("WriteTogether", {"writes": [{}]}, "writes[0].write"),
        ("WriteTogether", {"writes": [appending(namespace="other")]}, "writes[0].append_messages.namespace"),
        ("WriteTogether", {"writes": [appending(request_id="r")]}, "writes[0].append_messages.request_id"),
        (
            "WriteTogether",
            {"writes": [appending(), appending(messages=[{"body": "{"}])]},
            "writes[1].append_messages.messages[0].body",
        ),
        ("WriteTogether", {"writes": [appending()], "memory": "joy"}, "memory"),
        ("WriteTogether", {"writes": [putting("a")]}, "writes[0].put_fragment.memory"),
        ("WriteTogether", {"writes": [putting("a", memory="x")], "memory": "joy"}, "writes[0].put_fragment.memory"),
        ("WriteTogether", {"writes": [putting("a"), putting("a")], "memory": "joy"}, "writes"),
        ("SetState", {"scope": 1, "name": "x", "document": "{"}, "document"),
        ("SetState", {"scope": 0, "name": "x", "document": "1"}, "scope"),
        ("SetState", {"scope": 2, "name": "", "document": "1"}, "name"),
        ("SetState", {"scope": 3, "name": "a/b", "document": "1"}, "name"),
        ("SetState", {"scope": 1, "name": "x", "document": "1", "etag": "x"}, "etag"),
        ("GetState", {"scope": 9, "name": "x"}, "scope"),
        ("GetStates", {}, "keys"),
        ("GetStates", {"keys": [{"scope": 1, "name": "x"}, {"scope": 1}]}, "keys[1].name"),
        ("GetStates", {"keys": [{"scope": 1, "name": "x"}] * 2}, "keys"),
        ("GetStates", {"keys": [{"scope": 1, "name": f"x{n}"} for n in range(1_001)]}, "keys"),
        ("DeleteState", {"scope": 1, "name": "x", "etag": "x"}, "etag"),
        ("DeleteConversation", {"conversation": "c", "last_number": -1}, "last_number"),
        ("PopMessage", {"conversation": "c", "last_number": -1}, "last_number"),
        ("GetMessage", {"conversation": "c", "number": 1, "client_id": "x"}, "number"),
        ("GetMessage", {"conversation": "c", "client_id": "\n"}, "client_id"),
        ("WriteTogether", {"writes": [{"remove_messages": {"conversation": "c"}}]}, "writes[0].remove_messages.which"),
        (
            "WriteTogether",
            {"writes": [{"delete_state": {"scope": 1, "name": "x", "request_id": "r"}}]},
            "writes[0].delete_state.request_id",
        ),
        ("UpdateConversation", {"conversation": "c", "ttl": {"seconds": -1}}, "ttl"),
        ("UpdateConversation", {"conversation": "c", "labels": {"labels": {"": "x"}}}, "labels"),
        ("ForkConversation", {"conversation": "c", "new_conversation": ""}, "new_conversation"),
        ("ForkConversation", {"conversation": "c", "new_conversation": "d", "number": -1}, "number"),
        ("ListConversations", {"name_prefix": "a b"}, "name_prefix"),
        ("EraseUser", {}, "user"),
    ],
)
async def test_bad_records_name_the_field(
    client: memstream.Client, space: str, rpc: str, given: dict[str, Any], field: str
) -> None:
    request = getattr(pb, f"{rpc}Request")(namespace=space, **given)
    with pytest.raises(InvalidRequest) as caught:
        await client._link.call(getattr(client._link.conversations, rpc), request)
    assert field in [violation.field for violation in caught.value.violations]


@only_sqlite("a database has files and a log of its own")
async def test_erased_user_is_in_no_data_file(client: memstream.Client, space: str, talking: ServerProcess) -> None:
    words = {
        name: f"{name}-{uuid.uuid4().hex}" for name in ("user", "small", "large", "text", "state", "own", "popped")
    }
    talk = client.conversation(f"{space}/talk-{words['user']}")
    await talk.update(labels={"user": words["user"]}, create=True)
    await talk.append("joy", f"says {words['text']}")
    large = '"' + words["large"] * 200 + '"'
    await talk.append_messages([NewMessage(body=f'"{words["small"]}"'), NewMessage(body=large), NewMessage(body="1")])
    await talk.append_messages([NewMessage(body=f'"{words["popped"]}"')])
    await talk.pop_message()
    await talk.replace_message(4, NewMessage(body=f'"{words["small"]} again"'))
    await client.set_state(space, StateScope.SESSION, talk.name, f'"{words["state"] * 9_000}"')  # in parts
    await client.set_state(space, StateScope.USER, words["user"], f'"{words["own"]}"')
    needles = {word: word.encode() for word in words.values()}
    assert files_with(talking.data_dir, needles).keys() == needles.keys()
    assert await client.erase_user(space, words["user"]) == 1
    assert files_with(talking.data_dir, needles) == {}


async def test_export_has_labels_ttl_and_states(client: memstream.Client, space: str) -> None:
    talk = client.conversation(f"{space}/monday")
    await talk.update(labels={"user": "bob"}, ttl=timedelta(days=1), create=True)
    await talk.append_messages([NewMessage(role="user", body='{"a":  1}')])
    documents = {
        (StateScope.SESSION, "monday"): f"[{'1,' * 150_000}1]",
        (StateScope.APP, "x"): "2",
        (StateScope.USER, "bob"): '"茶"',
    }
    for (scope, name), document in documents.items():
        await client.set_state(space, scope, name, document)
    lines = b"".join([part.lines async for part in client.export(space)])
    for _ in range(2):  # the second import finds all there
        ended = await client.finished(await client.import_(f"{space}-2", sent(lines)))
        assert ended.state is memstream.OperationState.SUCCEEDED, ended.error
    before, after = [await anext(client.list_conversations(name)) for name in (space, f"{space}-2")]
    assert after == replace(before, create_time=after.create_time)
    found = {at: (await client.get_state(f"{space}-2", *at)).document for at in documents}
    assert found == documents
    again = b"".join([part.lines async for part in client.export(f"{space}-2")])
    assert [json.loads(line)["type"] for line in again.splitlines()] == [
        "export",
        "conversation",
        "message",
        "state",
        "state",
        "end",
    ]
    await client.set_state(f"{space}-2", StateScope.APP, "x", "3")  # written since
    assert (
        await client.finished(await client.import_(f"{space}-2", sent(lines)))
    ).state is memstream.OperationState.SUCCEEDED
    assert (await client.get_state(f"{space}-2", StateScope.APP, "x")).document == "3"


async def test_state_and_labels_count_for_a_quota(client: memstream.Client, space: str) -> None:
    async def held() -> int:
        answer = await client._link.call(client._link.memories.ListNamespaces, memory_pb.ListNamespacesRequest())
        return next((one.stored.conversations for one in answer.namespaces if one.name == space), 0)

    await client.set_state(space, StateScope.APP, "x", '"' + "x" * 1_000 + '"')
    first = await held()
    await client.conversation(f"{space}/a").update(labels={"user": "b" * 100}, create=True)
    assert first >= 1_000
    assert await held() >= first + 100
