"""Pydantic AI with its conversations on a server: an agent to be driven, and tests of the store.

Most tests run on Pydantic AI's own in-memory store too, which must behave alike.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from pydantic_ai import Agent, BinaryContent, ModelMessage, ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import ConversationConflict, ConversationStore, InMemoryConversationStore
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.providers.openai import OpenAIProvider

import memstream
from memstream.pydantic_ai import MemstreamConversationStore
from tests.toolchains.with_frameworks import driver


async def main() -> None:
    model = OpenAIChatModel("scripted", provider=OpenAIProvider(base_url=driver.MODEL, api_key="secret"))
    agent = Agent(model, tools=[driver.read_log, driver.crash])
    async with memstream.connect(driver.TARGET) as client:
        store = MemstreamConversationStore(client, driver.NAMESPACE)

        async def answer(session: str, text: str) -> str:
            conversation = await store.load(session) or Conversation(conversation_id=session)
            result = await agent.run(text, conversation=conversation)
            await store.save(result)
            return result.output

        await driver.take_turns(answer)


@pytest.fixture
async def client() -> AsyncIterator[memstream.Client]:
    async with memstream.connect(driver.TARGET) as connected:
        yield connected


@pytest.fixture
def namespace() -> str:
    return f"pai-{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=["memstream", "in_memory"])
def store(request: pytest.FixtureRequest, client: memstream.Client, namespace: str) -> ConversationStore:
    if request.param == "memstream":
        return MemstreamConversationStore(client, namespace)
    return InMemoryConversationStore()


def asked(text: str) -> ModelMessage:
    return ModelRequest(parts=[UserPromptPart(text)])


def told(text: str) -> ModelMessage:
    return ModelResponse(parts=[TextPart(text)])


def texts(conversation: Conversation | None) -> list[str]:
    assert conversation is not None
    return [str(message.parts[0].content) for message in conversation.messages]  # type: ignore[union-attr]


async def make(store: ConversationStore, id_: str, *said: str, scope: str | None = None) -> Conversation:
    messages = [(told if place % 2 else asked)(text) for place, text in enumerate(said)]
    made = Conversation(conversation_id=id_, messages=messages)
    await store.save(made, scope=scope)
    return made


async def test_a_conversation_is_saved_extended_and_deleted(store: ConversationStore) -> None:
    assert await store.load("bob@home/1") is None
    await make(store, "bob@home/1", "a", "b")
    loaded = await store.load("bob@home/1")
    assert texts(loaded) == ["a", "b"]
    assert loaded is not None
    result = await Agent(TestModel(custom_output_text="d")).run("c", conversation=loaded)
    assert len(await store.save(result)) == 2
    again = await store.load("bob@home/1")
    assert texts(again) == ["a", "b", "c", "d"]
    assert again is not None
    assert again.usage == result.conversation.usage
    assert texts(await store.load("bob@home/1", limit=3)) == ["b", "c", "d"]
    assert texts(await store.load("bob@home/1", limit=0)) == []
    await store.delete("bob@home/1")
    await store.delete("bob@home/1")
    assert await store.load("bob@home/1") is None
    await make(store, "bob@home/1", "new")
    assert texts(await store.load("bob@home/1")) == ["new"]


async def test_of_two_writers_the_later_gets_a_conflict(store: ConversationStore) -> None:
    made = await make(store, "c", "a")
    late, early = await store.load("c"), await store.load("c")
    assert early is not None
    assert late is not None
    early.messages.append(told("early"))
    late.messages.append(told("late"))
    await store.save(early)
    for outdated in (late, made, Conversation(conversation_id="c")):
        with pytest.raises(ConversationConflict):
            await store.save(outdated)
    assert texts(await store.load("c")) == ["a", "early"]
    await store.delete("c")
    with pytest.raises(ConversationConflict):
        await store.save(early)
    assert await store.load("c") is None


async def test_branches_and_forks_keep_what_they_leave(store: ConversationStore) -> None:
    made = await make(store, "c", "a", "b", "c", "d")
    entries = await store.load_entries("c")
    assert entries is not None
    branched = await store.branch("c", at=2, expected_revision=made.revision)
    branched.messages.append(asked("other"))
    await store.save(branched)
    assert texts(await store.load("c")) == ["a", "b", "other"]
    fork = await store.fork("c", from_entry=entries[2].id, new_conversation_id="fork")
    assert texts(fork) == ["a", "b", "c"]
    fork.messages.append(told("forked"))
    await store.save(fork)
    back = await store.branch("c", from_entry=entries[3].id, expected_revision=branched.revision)
    assert texts(back) == ["a", "b", "c", "d"]
    with pytest.raises(ConversationConflict):
        await store.fork("c", new_conversation_id="fork")
    with pytest.raises(UserError):
        await store.branch("c", from_entry="none", expected_revision=back.revision)
    await store.delete("c")
    assert texts(await store.load("fork")) == ["a", "b", "c", "forked"]
    assert texts(await store.fork("fork", at=1)) == ["a"]
    assert texts(await store.load("fork", limit=2)) == ["c", "forked"]


async def test_conversations_are_listed_by_scope_the_latest_first(store: ConversationStore) -> None:
    for id_, scope in (("1", "ann"), ("2", "bob"), ("3", "bob")):
        await make(store, id_, "a", scope=scope)
    again = await store.load("2", scope="bob")
    assert again is not None
    again.messages.append(told("b"))
    await store.save(again)
    assert [one.conversation_id for one in await store.list_conversations(scope="bob")] == ["2", "3"]
    assert [one.conversation_id for one in await store.list_conversations(limit=2)] == ["2", "3"]
    assert await store.load("2", scope="ann") is None
    await store.delete("2", scope="ann")
    assert texts(await store.load("2")) == ["a", "b"]


async def test_every_kind_of_part_is_returned_unchanged(store: ConversationStore) -> None:
    messages: list[ModelMessage] = [
        ModelRequest(parts=[UserPromptPart(["see", BinaryContent(bytes(range(256)), media_type="application/pdf")])]),
        ModelResponse(parts=[ToolCallPart("look", {"at": [None, {"deep": 1.5}]}, tool_call_id="c")]),
        ModelRequest(parts=[ToolReturnPart("look", "x" * 1_000_000, tool_call_id="c")]),
        *(ModelRequest(parts=[ToolReturnPart("look", "y" * 2_000_000, tool_call_id="d")]) for _ in range(2)),
    ]
    await store.save(Conversation(conversation_id="c", messages=messages))
    loaded = await store.load("c")
    assert loaded is not None
    assert loaded.messages == messages


@pytest.mark.parametrize(
    ("odd", "kept"),
    [
        (None, None),
        ({"a": [None, {"b": 1}]}, {"a": [None, {"b": 1}]}),
        (datetime(2026, 5, 1, tzinfo=UTC), "2026-05-01T00:00:00Z"),
        (b"abc", "YWJj"),
    ],
    ids=["none", "nested", "datetime", "bytes"],
)
async def test_odd_values_are_kept_as_pydantic_writes_them(
    client: memstream.Client, namespace: str, odd: Any, kept: Any
) -> None:
    store = MemstreamConversationStore(client, namespace)
    part = ToolReturnPart("look", odd, tool_call_id="c")
    await store.save(Conversation(conversation_id="c", messages=[ModelRequest(parts=[part])]))
    loaded = await store.load("c")
    assert loaded is not None
    assert loaded.messages[0].parts[0].content == kept  # type: ignore[union-attr]


async def test_values_that_pydantic_cannot_write_raise_its_error(client: memstream.Client, namespace: str) -> None:
    store = MemstreamConversationStore(client, namespace)
    part = ToolReturnPart("look", np.zeros(2), tool_call_id="c")
    with pytest.raises(ValueError, match="serialize"):
        await store.save(Conversation(conversation_id="c", messages=[asked("a"), ModelRequest(parts=[part])]))
    assert await store.load("c") is None


async def test_conversations_of_other_programs_are_left_out(client: memstream.Client, namespace: str) -> None:
    await client.set_state(namespace, memstream.StateScope.SESSION, "another", '{"of": "another program"}')
    store = MemstreamConversationStore(client, namespace)
    await make(store, "c", "a")
    assert [one.conversation_id for one in await store.list_conversations()] == ["c"]


async def test_a_scope_is_erased_as_a_user(client: memstream.Client, namespace: str) -> None:
    store = MemstreamConversationStore(client, namespace)
    await make(store, "c", "a", scope="bob")
    assert await client.erase_user(namespace, "bob") == 1
    assert await MemstreamConversationStore(client, namespace).load("c") is None


if __name__ == "__main__":
    asyncio.run(main())
