"""The OpenAI Agents SDK with its session on a server: an agent to be driven, and tests of the session."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    Session,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

import memstream
from memstream.openai_agents import MemstreamSession
from tests.toolchains.with_frameworks import driver


async def main() -> None:
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("scripted", AsyncOpenAI(base_url=driver.MODEL, api_key="secret"))
    agent = Agent("joy", model=model, tools=[function_tool(driver.read_log), function_tool(driver.crash)])
    async with memstream.connect(driver.TARGET) as client:

        async def answer(session: str, text: str) -> str:
            done = await Runner.run(agent, text, session=MemstreamSession(session, client, driver.NAMESPACE))
            return str(done.final_output)

        await driver.take_turns(answer)


@pytest.fixture(params=["memstream", "sqlite"])
async def session(request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    """Ours, and the SDK's own, which must behave alike."""
    if request.param == "sqlite":
        yield SQLiteSession("bob@home")
        return
    async with memstream.connect(driver.TARGET) as client:
        yield MemstreamSession("bob@home", client, f"oa-{uuid.uuid4().hex[:12]}")


ITEMS: list[Any] = [
    {"role": "user", "content": "Grüße 🚂\x00"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "x" * 80_000}]},
    {"role": "assistant", "content": None, "deep": {"a": [None, {"b": [1.5, True]}]}},
]


async def test_items_are_returned_in_order_and_unchanged(session: Session) -> None:
    assert isinstance(session, Session)
    assert await session.get_items() == []
    assert await session.pop_item() is None
    await session.add_items([])
    await session.add_items(ITEMS[:1])
    await session.add_items(ITEMS[1:])
    assert await session.get_items() == ITEMS
    assert await session.get_items(limit=2) == ITEMS[2:]
    assert await session.get_items(limit=0) == []
    assert await session.pop_item() == ITEMS[3]
    assert await session.get_items(9) == ITEMS[:3]
    await session.clear_session()
    await session.clear_session()
    assert await session.get_items() == []
    await session.add_items(ITEMS[:1])
    assert await session.get_items() == ITEMS[:1]


@pytest.mark.parametrize("odd", [np.float32(1), np.zeros(2), datetime.now(UTC), b"x", {1, 2}, object()], ids=type)
async def test_values_that_are_no_json_raise_type_error(session: Session, odd: Any) -> None:
    with pytest.raises(TypeError):
        await session.add_items([{"role": "user", "content": "first"}, {"role": "user", "content": odd}])
    assert await session.get_items() == [], "and nothing is stored"


async def test_settings_limit_what_is_read(session: Session) -> None:
    await session.add_items(ITEMS)
    assert session.session_settings is not None
    session.session_settings.limit = 1
    assert await session.get_items() == ITEMS[3:]
    assert await session.get_items(2) == ITEMS[2:]


@pytest.fixture
async def client() -> AsyncIterator[memstream.Client]:
    async with memstream.connect(driver.TARGET) as connected:
        yield connected


async def test_items_of_more_than_one_call_are_stored(client: memstream.Client) -> None:
    session = MemstreamSession("large", client, f"oa-{uuid.uuid4().hex[:12]}")
    large: Any = [{"call_id": str(n), "output": "x" * 2_000_000} for n in range(4)]
    await session.add_items(large)
    assert await session.get_items() == large
    with pytest.raises(memstream.InvalidArgument, match=r"items\[1\]"):
        await session.add_items([{"call_id": "a"}, {"call_id": "a", "output": "x" * 5_000_000}])
    assert len(await session.get_items()) == 4, "a call is not stored without its output"


async def test_a_user_is_erased_with_their_sessions(client: memstream.Client) -> None:
    namespace = f"oa-{uuid.uuid4().hex[:12]}"
    session = MemstreamSession("s", client, namespace, user="bob", feed_memory="bob")
    await client.create_memory(f"{namespace}/bob")
    await session.add_items(ITEMS)
    assert [one.labels async for one in client.list_conversations(namespace)] == [{"user": "bob"}]
    assert await client.erase_user(namespace, "bob") == 1
    assert await session.get_items() == []


def test_each_run_may_have_an_event_loop_of_its_own() -> None:
    with memstream.sync.connect(driver.TARGET) as client:
        session = MemstreamSession("loops", client, f"oa-{uuid.uuid4().hex[:12]}")
        asyncio.run(session.add_items(ITEMS[:1]))
        assert asyncio.run(session.get_items()) == ITEMS[:1]


if __name__ == "__main__":
    asyncio.run(main())
