"""The Microsoft Agent Framework with its history on a server: an agent to be driven, and tests of the provider.

Most tests run on the framework's own FileHistoryProvider too, which must behave alike.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_framework import Agent, Content, FileHistoryProvider, HistoryProvider, Message
from agent_framework.openai import OpenAIChatCompletionClient

import memstream
from memstream.agent_framework import MemstreamHistoryProvider
from tests.toolchains.with_frameworks import driver


async def main() -> None:
    model = OpenAIChatCompletionClient(model="scripted", base_url=driver.MODEL, api_key="secret")
    async with memstream.connect(driver.TARGET) as client:
        provider = MemstreamHistoryProvider(client, driver.NAMESPACE)
        agent = Agent(model, tools=[driver.read_log, driver.crash], context_providers=[provider])

        async def answer(session: str, text: str) -> str:
            return str((await agent.run(text, session=agent.create_session(session_id=session))).text)

        await driver.take_turns(answer)


@pytest.fixture
async def client() -> AsyncIterator[memstream.Client]:
    async with memstream.connect(driver.TARGET) as connected:
        yield connected


@pytest.fixture
def namespace() -> str:
    return f"af-{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=["memstream", "file"])
def provider(
    request: pytest.FixtureRequest, client: memstream.Client, namespace: str, tmp_path: Path
) -> HistoryProvider:
    if request.param == "memstream":
        return MemstreamHistoryProvider(client, namespace, skip_excluded=True)
    return FileHistoryProvider(tmp_path, skip_excluded=True)


def said(text: str, role: str = "user", **more: Any) -> Message:
    return Message(role, [text], **more)


def texts(messages: list[Message]) -> list[str]:
    return [message.text for message in messages]


async def test_messages_are_returned_in_order_by_session(provider: HistoryProvider) -> None:
    assert await provider.get_messages("bob@home") == []
    await provider.save_messages("bob@home", [])
    await provider.save_messages("bob@home", [said("a"), said("b", "assistant", author_name="joy")])
    await provider.save_messages("bob@home", [said("c")])
    await provider.save_messages("another", [said("x")])
    found = await provider.get_messages("bob@home")
    assert texts(found) == ["a", "b", "c"]
    assert (found[1].role, found[1].author_name) == ("assistant", "joy")
    assert texts(await provider.get_messages("another")) == ["x"]


async def test_messages_that_repeat_the_history_are_left_out(provider: HistoryProvider) -> None:
    first = [said(text, "assistant", message_id=text) for text in "abc"]
    await provider.save_messages("s", first)
    await provider.save_messages("s", [*first, said("d", "assistant", message_id="d")])
    await provider.save_messages("s", [said("d", "assistant", message_id="d"), said("e")])
    await provider.save_messages("s", [said("e")])
    assert texts(await provider.get_messages("s")) == [*"abcde", "e"], "a question that is asked twice is kept"


async def test_excluded_messages_are_not_loaded(provider: HistoryProvider) -> None:
    hidden = said("hidden", additional_properties={"_excluded": True})
    await provider.save_messages("s", [said("a"), hidden, said("b")])
    assert texts(await provider.get_messages("s")) == ["a", "b"]


async def test_every_kind_of_content_is_returned_unchanged(provider: HistoryProvider) -> None:
    messages = [
        Message("user", ["see", Content.from_data(bytes(range(256)), "image/png")]),
        Message("assistant", [Content.from_function_call("c", "look", arguments={"at": [None, {"deep": 1.5}]})]),
        Message("tool", [Content.from_function_result("c", result="x" * 1_000_000)]),
    ]
    await provider.save_messages("s", messages)
    assert [one.to_dict() for one in await provider.get_messages("s")] == [one.to_dict() for one in messages]


@pytest.mark.parametrize(
    "odd", [None, {"a": [None, {"b": [1.5, True]}]}, datetime.now(UTC), b"x", np.zeros(2), object()], ids=type
)
async def test_odd_values_are_what_the_framework_writes(provider: HistoryProvider, odd: Any) -> None:
    message = said("a", additional_properties={"known": 1, "odd": odd})
    written = message.to_dict()["additional_properties"]
    assert written["known"] == 1
    await provider.save_messages("s", [message])
    (found,) = await provider.get_messages("s")
    assert found.to_dict()["additional_properties"] == written
    if odd is None or isinstance(odd, dict):
        assert found.additional_properties == message.additional_properties


async def test_a_session_without_an_id_is_refused(client: memstream.Client, namespace: str) -> None:
    with pytest.raises(ValueError, match="session id"):
        await MemstreamHistoryProvider(client, namespace).get_messages(None)


async def test_a_user_is_erased_with_their_sessions(client: memstream.Client, namespace: str) -> None:
    provider = MemstreamHistoryProvider(client, namespace, user="bob")
    await provider.save_messages("s", [said("a")])
    await provider.save_messages("s", [said("b")])
    assert await client.erase_user(namespace, "bob") == 1
    assert await provider.get_messages("s") == []


if __name__ == "__main__":
    asyncio.run(main())
