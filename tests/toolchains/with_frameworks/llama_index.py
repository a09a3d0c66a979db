"""LlamaIndex with its chat store and a memory block on a server: an agent to be driven, and tests of both.

Most tests run on LlamaIndex's own SimpleChatStore too, which must behave alike.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage, DocumentBlock, ImageBlock, TextBlock
from llama_index.core.memory import ChatMemoryBuffer, Memory
from llama_index.core.storage.chat_store import SimpleChatStore
from llama_index.core.storage.chat_store.base import BaseChatStore
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

import memstream
from memstream.llama_index import MemstreamChatStore, MemstreamMemoryBlock
from tests.toolchains.with_frameworks import driver


async def main() -> None:
    model = OpenAILike(
        "scripted", api_base=driver.MODEL, api_key="secret", is_chat_model=True, is_function_calling_model=True
    )
    tools = [FunctionTool.from_defaults(driver.read_log), FunctionTool.from_defaults(driver.crash)]
    agent = FunctionAgent(tools=tools, llm=model, streaming=False)  # type: ignore[arg-type]
    with memstream.sync.connect(driver.TARGET) as client:
        store = MemstreamChatStore(client, driver.NAMESPACE)

        async def answer(session: str, text: str) -> str:
            memory = ChatMemoryBuffer(chat_store=store, chat_store_key=session, token_limit=10**7, tokenizer_fn=list)
            return str(await agent.run(text, memory=memory))

        await driver.take_turns(answer)


@pytest.fixture(scope="module")
def client() -> Iterator[memstream.sync.Client]:
    with memstream.sync.connect(driver.TARGET) as connected:
        yield connected


@pytest.fixture
def namespace() -> str:
    return f"li-{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=["memstream", "simple"])
def store(request: pytest.FixtureRequest, client: memstream.sync.Client, namespace: str) -> BaseChatStore:
    return MemstreamChatStore(client, namespace) if request.param == "memstream" else SimpleChatStore()


def said(text: str, role: str = "user", **more: Any) -> ChatMessage:
    return ChatMessage(role=role, content=text, additional_kwargs=more)


def texts(messages: list[ChatMessage] | None) -> list[str | None]:
    assert messages is not None
    return [message.content for message in messages]


def test_messages_are_added_replaced_and_deleted(store: BaseChatStore) -> None:
    key = "bob@home/monday"
    assert store.get_messages(key) == []
    assert store.get_keys() == []
    assert store.delete_last_message(key) is None
    for text in "abcd":
        store.add_message(key, said(text))
    assert texts(store.get_messages(key)) == list("abcd")
    assert store.get_keys() == [key]
    assert texts([store.delete_message(key, 1)]) == ["b"]  # type: ignore[list-item]
    assert store.delete_message(key, 9) is None
    assert texts([store.delete_last_message(key)]) == ["d"]  # type: ignore[list-item]
    assert texts(store.get_messages(key)) == ["a", "c"]
    store.set_messages(key, [said("x"), said("y", "assistant")])
    assert texts(store.get_messages(key)) == ["x", "y"]
    assert texts(store.delete_messages(key)) == ["x", "y"]
    assert store.delete_messages(key) is None
    assert store.get_messages(key) == []
    assert store.get_keys() == []


async def use_asynchronously(store: BaseChatStore) -> None:
    await store.aset_messages("k", [said("a")])
    await store.async_add_message("k", said("b"))
    assert texts(await store.aget_messages("k")) == ["a", "b"]
    assert await store.aget_keys() == ["k"]
    assert texts([await store.adelete_message("k", 0)]) == ["a"]  # type: ignore[list-item]
    assert texts([await store.adelete_last_message("k")]) == ["b"]  # type: ignore[list-item]
    store.add_message("k", said("while a loop runs"))
    assert len(await store.adelete_messages("k") or ()) == 1


def test_any_event_loop_may_use_a_store(store: BaseChatStore) -> None:
    asyncio.run(use_asynchronously(store))
    asyncio.run(use_asynchronously(store))


def test_every_kind_of_block_is_returned_unchanged(client: memstream.sync.Client, namespace: str) -> None:
    store = MemstreamChatStore(client, namespace)
    blocks = [TextBlock(text="x" * 1_000_000), ImageBlock(image=bytes(range(256)), image_mimetype="image/png")]
    messages = [
        ChatMessage(role="user", blocks=[*blocks, DocumentBlock(data=b"abc", document_mimetype="text/plain")]),
        said("called", "assistant", tool_calls=[{"id": "c", "deep": [None, {"a": 1.5}]}]),
        said("", "tool", tool_call_id="c"),
    ]
    store.set_messages("k", messages)
    assert store.get_messages("k") == messages


@pytest.mark.parametrize(
    "odd", [None, {"a": [None, 1]}, datetime(2026, 5, 1, tzinfo=UTC), b"abc", np.zeros(2), {1}, object()], ids=type
)
def test_odd_values_are_kept_or_refused_as_llama_index_does(
    client: memstream.sync.Client, namespace: str, odd: Any
) -> None:
    own = MemstreamChatStore(client, namespace)
    try:
        kept = ChatMessage.model_validate_json(said("a", odd=odd).model_dump_json())
    except Exception as refused:
        with pytest.raises(type(refused)):
            own.add_message("k", said("a", odd=odd))
        assert own.get_messages("k") == []
    else:
        own.add_message("k", said("a", odd=odd))
        assert own.get_messages("k") == [kept]


async def test_a_memory_recalls_what_left_the_chat(client: memstream.sync.Client, namespace: str) -> None:
    block = MemstreamMemoryBlock(client, f"{namespace}/bob")
    where: dict[str, Any] = {"token_limit": 120, "token_flush_size": 40, "memory_blocks": [block]}
    memory = Memory.from_defaults(session_id="monday", **where, tokenizer_fn=str.split)
    await memory.aput(said("I like plays about trains"))
    for number in range(30):
        await memory.aput(said(f"{number}: " + "something else " * 5, "assistant" if number % 2 else "user"))
    later = Memory.from_defaults(session_id="tuesday", **where, tokenizer_fn=str.split)
    await later.aput(said("What kind of plays do I like?"))
    known = "\n".join(map(str, texts(await later.aget())))
    assert "I like plays about trains" in known
    cut = await block.atruncate("one\ntwo\nthree", 1)
    assert cut == "one\ntwo"
    assert await block.atruncate("one", 9) is None


if __name__ == "__main__":
    asyncio.run(main())
