"""Strands Agents with their sessions on a server: an agent to be driven, and tests of the session manager.

Most tests run on Strands' own FileSessionManager too, which must behave alike.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.session import FileSessionManager, RepositorySessionManager
from strands.types.exceptions import SessionException
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

import memstream
from memstream.strands import MemstreamSessionManager
from tests.toolchains.with_frameworks import driver


async def main() -> None:
    model = OpenAIModel(client_args={"base_url": driver.MODEL, "api_key": "secret"}, model_id="scripted", stream=False)
    with memstream.sync.connect(driver.TARGET) as client:

        async def answer(session: str, text: str) -> str:
            manager = MemstreamSessionManager(session, client, driver.NAMESPACE)
            tools = [tool(driver.read_log), tool(driver.crash)]
            agent = Agent(
                model,
                agent_id="joy",
                tools=tools,
                session_manager=manager,
                callback_handler=None,
                conversation_manager=None,
            )
            return str(await agent.invoke_async(text)).strip()

        await driver.take_turns(answer)


Make = Callable[[str], Any]


@pytest.fixture(scope="module")
def client() -> Iterator[memstream.sync.Client]:
    with memstream.sync.connect(driver.TARGET) as connected:
        yield connected


@pytest.fixture
def namespace() -> str:
    return f"st-{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=["memstream", "file"])
def make(request: pytest.FixtureRequest, client: memstream.sync.Client, namespace: str, tmp_path: Path) -> Make:
    if request.param == "memstream":
        return lambda session_id: MemstreamSessionManager(session_id, client, namespace)
    return lambda session_id: FileSessionManager(session_id, storage_dir=str(tmp_path))


def said(number: int, text: Any = "hello") -> SessionMessage:
    return SessionMessage.from_message({"role": "user", "content": [{"text": text}]}, number)


def agent(id_: str = "joy", **state: Any) -> SessionAgent:
    return SessionAgent(agent_id=id_, state=state, conversation_manager_state={})


def test_sessions_are_created_read_and_deleted(make: Make) -> None:
    manager = make("bob@home")
    assert isinstance(manager, RepositorySessionManager)
    assert manager.read_session("none") is None
    read = manager.read_session("bob@home")
    assert read == manager.session
    with pytest.raises(SessionException):
        manager.create_session(Session("bob@home", SessionType.AGENT))
    assert make("bob@home").session == manager.session, "another manager finds it"
    manager.create_agent("bob@home", agent())
    manager.delete_session("bob@home")
    assert manager.read_session("bob@home") is None
    assert manager.read_agent("bob@home", "joy") is None
    with pytest.raises(SessionException):
        manager.delete_session("bob@home")


def test_agents_have_states_of_their_own(make: Make) -> None:
    manager = make("s")
    assert manager.read_agent("s", "joy") is None
    with pytest.raises(SessionException):
        manager.update_agent("s", agent())
    manager.create_agent("s", agent(mood="glad", odd=[None, {"a": b"bytes"}]))
    manager.create_agent("s", agent("sad"))
    first = manager.read_agent("s", "joy")
    assert first.state == {"mood": "glad", "odd": [None, {"a": b"bytes"}]}
    manager.update_agent("s", agent(mood="calm"))
    later = make("s").read_agent("s", "joy")
    assert (later.state, later.created_at) == ({"mood": "calm"}, first.created_at)
    assert manager.read_agent("s", "sad").state == {}


def test_messages_are_listed_read_and_replaced(make: Make) -> None:
    manager = make("s")
    with pytest.raises(SessionException):
        manager.list_messages("s", "joy")
    manager.create_agent("s", agent())
    assert manager.list_messages("s", "joy") == []
    written = [said(number, "x" * (1_000_000 if number == 2 else 1)) for number in range(5)]
    for message in written:
        manager.create_message("s", "joy", message)
    assert manager.list_messages("s", "joy") == written
    assert manager.list_messages("s", "joy", limit=2, offset=1) == written[1:3]
    assert manager.list_messages("s", "joy", offset=4) == written[4:]
    assert manager.list_messages("s", "joy", limit=0) == []
    assert manager.list_messages("s", "joy", offset=9) == []
    assert manager.read_message("s", "joy", 2) == written[2]
    assert manager.read_message("s", "joy", 9) is None
    redacted = said(3, "hello again")
    redacted.redact_message = {"role": "user", "content": [{"text": "[redacted]"}]}
    manager.update_message("s", "joy", redacted)
    read = manager.read_message("s", "joy", 3)
    assert (read.to_message(), read.created_at) == (redacted.redact_message, written[3].created_at)
    with pytest.raises(SessionException):
        manager.update_message("s", "joy", said(9))


class Team:
    """What a manager uses of a graph or swarm."""

    id = "team"

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def serialize_state(self) -> dict[str, Any]:
        return self.state


def test_teams_of_agents_have_states(make: Make) -> None:
    manager = make("s")
    assert manager.read_multi_agent("s", "team") is None
    with pytest.raises(SessionException):
        manager.update_multi_agent("s", Team({}))
    manager.create_multi_agent("s", Team({"at": 1}))
    manager.update_multi_agent("s", Team({"at": [2, None]}))
    assert make("s").read_multi_agent("s", "team") == {"at": [2, None]}


@pytest.mark.parametrize("odd", [np.float32(1), np.zeros(2), datetime.now(UTC), {1, 2}, object()], ids=type)
def test_values_that_are_no_json_raise_type_error(make: Make, odd: Any) -> None:
    manager = make("s")
    manager.create_agent("s", agent())
    with pytest.raises(TypeError):
        manager.create_message("s", "joy", said(0, odd))
    assert manager.list_messages("s", "joy") == []


def test_bytes_and_none_are_kept(make: Make) -> None:
    manager = make("s")
    manager.create_agent("s", agent())
    image = {"image": {"format": "png", "source": {"bytes": bytes(range(256))}}, "none": None}
    message = SessionMessage.from_message({"role": "user", "content": [image]}, 0)  # type: ignore[list-item]
    manager.create_message("s", "joy", message)
    assert manager.list_messages("s", "joy") == [message]


def test_a_user_is_erased_with_their_sessions(client: memstream.sync.Client, namespace: str) -> None:
    manager = MemstreamSessionManager("s", client, namespace, user="bob")
    manager.create_agent("s", agent())
    manager.create_message("s", "joy", said(0))
    assert client.erase_user(namespace, "bob") == 2
    assert manager.read_session("s") is None
    assert manager.read_agent("s", "joy") is None


if __name__ == "__main__":
    asyncio.run(main())
