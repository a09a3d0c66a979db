"""Google's ADK with its sessions and memory on a server: an agent to be driven, and tests of both services.

Most tests run on ADK's own in-memory services too, which must behave alike.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from google.adk.agents import LlmAgent
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.memory import BaseMemoryService, InMemoryMemoryService
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService, InMemorySessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types
from openai import AsyncOpenAI

import memstream
from memstream.google_adk import MemstreamMemoryService, MemstreamSessionService
from tests.toolchains.with_frameworks import driver

USER: dict[str, Any] = {"user_id": "bob@home"}


class ChatModel(BaseLlm):
    """A model with OpenAI's interface: ADK's own way there is litellm, which no test needs otherwise."""

    async def generate_content_async(self, llm_request: LlmRequest, stream: bool = False) -> AsyncIterator[LlmResponse]:
        messages: list[Any] = []
        for content in llm_request.contents:
            for part in content.parts or []:
                if part.function_call is not None:
                    call = part.function_call
                    function = {"name": call.name, "arguments": json.dumps(call.args or {})}
                    calls = [{"id": call.id, "type": "function", "function": function}]
                    messages.append({"role": "assistant", "content": None, "tool_calls": calls})
                elif part.function_response is not None:
                    said = json.dumps(part.function_response.response)
                    messages.append({"role": "tool", "tool_call_id": part.function_response.id, "content": said})
                else:
                    messages.append({"role": "user" if content.role == "user" else "assistant", "content": part.text})
        async with AsyncOpenAI(base_url=driver.MODEL, api_key="secret") as client:
            answer = (await client.chat.completions.create(model=self.model, messages=messages)).choices[0].message
        parts = [types.Part(text=answer.content)] if answer.content else []
        for call in answer.tool_calls or ():
            asked = types.FunctionCall(id=call.id, name=call.function.name, args=json.loads(call.function.arguments))
            parts.append(types.Part(function_call=asked))
        yield LlmResponse(content=types.Content(role="model", parts=parts))


async def main() -> None:
    logging.disable()
    agent = LlmAgent(name="joy", model=ChatModel(model="scripted"), tools=[driver.read_log, driver.crash])
    async with memstream.connect(driver.TARGET) as client:
        runner = Runner(
            app_name=driver.NAMESPACE,
            agent=agent,
            session_service=MemstreamSessionService(client),
            auto_create_session=True,
        )

        async def answer(session: str, text: str) -> str:
            new = types.Content(role="user", parts=[types.Part(text=text)])
            said = ""
            async for event in runner.run_async(user_id="bob", session_id=session, new_message=new):
                if event.is_final_response() and event.content and event.content.parts:
                    said = event.content.parts[0].text or ""
            return said

        await driver.take_turns(answer)


@pytest.fixture
async def client() -> AsyncIterator[memstream.Client]:
    async with memstream.connect(driver.TARGET) as connected:
        yield connected


@pytest.fixture
def app() -> str:
    return f"an app {uuid.uuid4().hex[:8]}"


@pytest.fixture(params=["memstream", "in_memory"])
def service(request: pytest.FixtureRequest, client: memstream.Client) -> BaseSessionService:
    return MemstreamSessionService(client) if request.param == "memstream" else InMemorySessionService()


@pytest.fixture(params=["memstream", "in_memory"])
def memory(request: pytest.FixtureRequest, client: memstream.Client) -> BaseMemoryService:
    return MemstreamMemoryService(client) if request.param == "memstream" else InMemoryMemoryService()


def said(text: str, author: str = "user", **delta: Any) -> Event:
    content = types.Content(role="user" if author == "user" else "model", parts=[types.Part(text=text)])
    actions = EventActions(state_delta={name.replace("__", ":"): value for name, value in delta.items()})
    return Event(invocation_id="i", author=author, content=content, actions=actions)


async def test_a_session_is_created_read_and_deleted(service: BaseSessionService, app: str) -> None:
    where: dict[str, Any] = {"app_name": app, **USER}
    assert await service.get_session(**where, session_id="none") is None
    made = await service.create_session(**where, state={"key": "value", "temp:x": 1})
    assert made.id
    assert made.state == {"key": "value"}
    assert await service.get_session(**where, session_id=made.id) == made
    with pytest.raises(AlreadyExistsError):
        await service.create_session(**where, session_id=made.id)
    await service.delete_session(**where, session_id=made.id)
    await service.delete_session(**where, session_id=made.id)
    assert await service.get_session(**where, session_id=made.id) is None


async def test_sessions_are_listed_by_user_the_latest_last(service: BaseSessionService, app: str) -> None:
    for user, session in (("ann", "1"), ("bob", "2"), ("bob", "3"), ("a/b", "c"), ("a", "b/c")):
        await service.create_session(app_name=app, user_id=user, session_id=session, state={"of": session})
    session = await service.get_session(app_name=app, user_id="bob", session_id="2")
    assert session is not None
    await service.append_event(session, said("hello"))
    listed = (await service.list_sessions(app_name=app, user_id="bob")).sessions
    assert [(one.id, one.state, one.events) for one in listed] == [("3", {"of": "3"}, []), ("2", {"of": "2"}, [])]
    everyone = (await service.list_sessions(app_name=app)).sessions
    assert sorted((one.user_id, one.id) for one in everyone) == [
        ("a", "b/c"),
        ("a/b", "c"),
        ("ann", "1"),
        ("bob", "2"),
        ("bob", "3"),
    ]
    assert (await service.list_sessions(app_name=f"{app} of others")).sessions == []


async def test_states_belong_to_app_user_and_session(service: BaseSessionService, app: str) -> None:
    first = await service.create_session(app_name=app, user_id="bob", state={"app:a": 1, "user:u": 1, "s": 1})
    await service.append_event(first, said("x", app__a=2, user__v=2, t=[1, {"deep": None}], temp__gone=1))
    assert first.state["temp:gone"] == 1
    read = await service.get_session(app_name=app, user_id="bob", session_id=first.id)
    assert read is not None
    assert read.state == {"app:a": 2, "user:u": 1, "user:v": 2, "s": 1, "t": [1, {"deep": None}]}
    assert "temp:gone" not in read.events[0].actions.state_delta
    again = await service.create_session(app_name=app, user_id="bob")
    assert again.state == {"app:a": 2, "user:u": 1, "user:v": 2}
    other = await service.create_session(app_name=app, user_id="ann")
    assert other.state == {"app:a": 2}
    assert await service.get_user_state(app_name=app, user_id="bob") == {"u": 1, "v": 2}
    assert await service.get_user_state(app_name=app, user_id="nobody") == {}


async def test_events_are_returned_as_they_were_appended(service: BaseSessionService, app: str) -> None:
    session = await service.create_session(app_name=app, **USER)
    blob = types.Part(inline_data=types.Blob(data=bytes(range(256)), mime_type="image/png"))
    call = types.Part(function_call=types.FunctionCall(id="c", name="f", args={"a": [None, 1.5]}))
    large = types.Part(function_response=types.FunctionResponse(id="c", name="f", response={"r": "x" * 1_000_000}))
    for part in (blob, call, large):
        event = Event(invocation_id="i", author="joy", content=types.Content(role="model", parts=[part]))
        event.timestamp = 1_000.0 + len(session.events)
        await service.append_event(session, event)
    partial = said("half")
    partial.partial = True
    await service.append_event(session, partial)
    where: dict[str, Any] = {"app_name": app, **USER, "session_id": session.id}

    async def ids(**config: Any) -> list[str]:
        read = await service.get_session(**where, config=GetSessionConfig(**config))
        assert read is not None
        return [event.id for event in read.events]

    read = await service.get_session(**where)
    assert read is not None
    assert read.events == session.events
    known = [event.id for event in session.events]
    assert len(known) == 3
    assert await ids(num_recent_events=2) == known[1:]
    assert await ids(num_recent_events=0) == []
    assert await ids(after_timestamp=1_001.0) == known[1:]
    assert await ids(after_timestamp=1_001.0, num_recent_events=1) == known[2:]
    assert await ids(after_timestamp=5_000.0) == []


async def test_a_stale_session_is_refused_as_by_the_database(client: memstream.Client, app: str) -> None:
    service = MemstreamSessionService(client)
    session = await service.create_session(app_name=app, **USER)
    copy = await service.get_session(app_name=app, **USER, session_id=session.id)
    assert copy is not None
    await service.append_event(session, said("first", user__n=1))
    await service.append_event(session, said("second"))
    with pytest.raises(ValueError, match="modified in storage"):
        await service.append_event(copy, said("late", user__n=2))
    await service.delete_session(app_name=app, **USER, session_id=session.id)
    with pytest.raises(ValueError, match="not found"):
        await service.append_event(session, said("gone"))
    assert await service.get_user_state(app_name=app, **USER) == {"n": 1}
    own = Session(id="s", app_name=app, user_id="bob")  # not read from the service
    await service.create_session(app_name=app, user_id="bob", session_id="s")
    await service.append_event(own, said("hello"))


async def test_concurrent_changes_of_a_state_are_all_kept(client: memstream.Client, app: str) -> None:
    service = MemstreamSessionService(client)
    sessions = [await service.create_session(app_name=app, **USER) for _ in range(4)]
    await asyncio.gather(*(service.append_event(one, said("x", **{f"app__k{n}": n})) for n, one in enumerate(sessions)))
    read = await service.create_session(app_name=app, user_id="another")
    assert read.state == {f"app:k{n}": n for n in range(4)}


@pytest.mark.parametrize(
    ("odd", "kept"),
    [(datetime(2026, 5, 1, tzinfo=UTC), "2026-05-01T00:00:00Z"), ({1}, [1]), (b"x", "x"), (None, None)],
    ids=["datetime", "set", "bytes", "none"],
)
async def test_odd_values_of_a_state_are_kept_as_by_adks_database(
    client: memstream.Client, app: str, odd: Any, kept: Any
) -> None:
    service = MemstreamSessionService(client)
    session = await service.create_session(app_name=app, **USER, state={"of": odd})
    read = await service.get_session(app_name=app, **USER, session_id=session.id)
    assert read is not None
    assert read.state == {"of": kept}


async def test_numbers_of_numpy_become_text_as_in_adks_database(client: memstream.Client, app: str) -> None:
    service = MemstreamSessionService(client)
    session = await service.create_session(app_name=app, **USER, state={"of": np.zeros(2)})
    assert isinstance(session.state["of"], str)


async def test_memory_finds_what_sessions_said(memory: BaseMemoryService, app: str) -> None:
    where: dict[str, Any] = {"app_name": app, **USER}
    assert (await memory.search_memory(**where, query="trains")).memories == []
    session = Session(id="s", **where)
    session.events = [said("I like plays about trains"), said("Noted.", "joy"), Event(author="joy")]
    await memory.add_session_to_memory(session)
    await memory.add_session_to_memory(session)
    await memory.add_events_to_memory(**where, events=[said("Trains to Lyon are late")], session_id="t")
    found = (await memory.search_memory(**where, query="trains")).memories
    texts = [one.content.parts[0].text for one in found if one.content.parts]
    assert sorted(map(str, texts)) == ["I like plays about trains", "Trains to Lyon are late"]
    assert {one.author for one in found} == {"user"}
    assert all(one.timestamp and one.id for one in found)
    assert (await memory.search_memory(app_name=app, user_id="ann", query="trains")).memories == []
    await memory.delete_memory(**where, memory_id=found[0].id)
    await memory.delete_memory(**where, memory_id=found[0].id)
    left = (await memory.search_memory(**where, query="trains")).memories
    assert found[0].id not in [one.id for one in left]
    assert found[1].id in [one.id for one in left]


if __name__ == "__main__":
    asyncio.run(main())
