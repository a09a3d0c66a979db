"""A session manager of Strands Agents on a memstream server.

Each agent of a session is a conversation: its messages are messages, its state is the state document. A session has a
conversation of its own, for its record. All have the label `session`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from memstream.conversation_values import Message, NewMessage
from memstream.errors import AlreadyExists, ConversationNotFound
from memstream.frameworks import AnyClient, asynchronous, framework, write_json
from memstream.states import StateScope
from memstream.sync import Client, Conversation
from memstream.transactions import SetState, UpdateConversation

with framework("strands-agents"):
    from strands.session import RepositorySessionManager, SessionRepository
    from strands.types.exceptions import SessionException
    from strands.types.session import Session, SessionAgent, SessionMessage

_SESSION, _AGENT, _MULTI_AGENT = "session", "agent", "multi-agent"


class MemstreamSessionManager(RepositorySessionManager, SessionRepository):
    """A session manager for `Agent(session_manager=...)`, in the namespace `namespace`.

    client: a blocking client. user: whose sessions these are, as the label `user`: `erase_user` deletes them.

    Raises SessionException as Strands' own managers do, InvalidArgument, also a TypeError, for what is not JSON;
    otherwise a MemstreamError.
    """

    def __init__(
        self, session_id: str, client: AnyClient, namespace: str = "agents", *, user: str = "", **kwargs: Any
    ) -> None:
        self._client = Client(asynchronous(client))
        self._namespace = namespace
        self._user = {"user": user} if user else {}
        super().__init__(session_id=session_id, session_repository=self, **kwargs)

    def create_session(self, session: Session, **kwargs: Any) -> Session:
        """Stores a new session."""
        try:
            self._create(session.session_id, _SESSION, "", session.to_dict())
        except AlreadyExists:
            raise SessionException(f"Session {session.session_id} already exists") from None
        return session

    def read_session(self, session_id: str, **kwargs: Any) -> Session | None:
        """A session; None if there is none."""
        found = self._read(session_id, _SESSION, "")
        return None if found is None else Session.from_dict(found)

    def delete_session(self, session_id: str, **kwargs: Any) -> None:
        """Deletes a session with its agents."""
        if self.read_session(session_id) is None:
            raise SessionException(f"Session {session_id} does not exist")
        for each in list(self._client.list_conversations(self._namespace, labels={_SESSION: session_id})):
            self._client.conversation(f"{self._namespace}/{each.name}").delete()

    def create_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Stores a new agent of a session."""
        self._create(session_id, _AGENT, session_agent.agent_id, session_agent.to_dict())

    def read_agent(self, session_id: str, agent_id: str, **kwargs: Any) -> SessionAgent | None:
        """An agent of a session; None if there is none."""
        found = self._read(session_id, _AGENT, agent_id)
        return None if found is None else SessionAgent.from_dict(found)

    def update_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Stores the state of an agent."""
        before = self.read_agent(session_id, session_agent.agent_id)
        if before is None:
            raise SessionException(f"Agent {session_agent.agent_id} in session {session_id} does not exist")
        session_agent.created_at = before.created_at
        self._write(session_id, _AGENT, session_agent.agent_id, session_agent.to_dict())

    def create_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        """Appends a message; it is durable when this returns."""
        self._talk(session_id, _AGENT, agent_id).append_messages([_write_message(session_message)])

    def read_message(self, session_id: str, agent_id: str, message_id: int, **kwargs: Any) -> SessionMessage | None:
        """A message; None if there is none."""
        found = self._find_message(session_id, agent_id, message_id)
        return None if found is None else _read_message(found)

    def update_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        """Replaces a message."""
        found = self._find_message(session_id, agent_id, session_message.message_id)
        if found is None:
            raise SessionException(f"Message {session_message.message_id} does not exist")
        session_message.created_at = _read_message(found).created_at
        self._talk(session_id, _AGENT, agent_id).replace_message(found.number, _write_message(session_message))

    def list_messages(
        self, session_id: str, agent_id: str, limit: int | None = None, offset: int = 0, **kwargs: Any
    ) -> list[SessionMessage]:
        """The messages of an agent in order, from the one at `offset`."""
        if self.read_agent(session_id, agent_id) is None:
            raise SessionException(f"Messages directory missing from agent: {agent_id} in session {session_id}")
        found = list(self._messages(session_id, agent_id, limit=0 if limit is None else offset + limit))
        return [] if limit == 0 else list(map(_read_message, found[offset:]))

    def create_multi_agent(self, session_id: str, multi_agent: Any, **kwargs: Any) -> None:
        """Stores the state of a graph or swarm."""
        self._create(session_id, _MULTI_AGENT, multi_agent.id, multi_agent.serialize_state())

    def read_multi_agent(self, session_id: str, multi_agent_id: str, **kwargs: Any) -> dict[str, Any] | None:
        """The state of a graph or swarm; None if there is none."""
        return self._read(session_id, _MULTI_AGENT, multi_agent_id)

    def update_multi_agent(self, session_id: str, multi_agent: Any, **kwargs: Any) -> None:
        """Stores the state of a graph or swarm that is there."""
        if self.read_multi_agent(session_id, multi_agent.id) is None:
            raise SessionException(f"MultiAgent state {multi_agent.id} in session {session_id} does not exist")
        self._write(session_id, _MULTI_AGENT, multi_agent.id, multi_agent.serialize_state())

    def _talk(self, session_id: str, kind: str, id_: str) -> Conversation:
        digest = blake2b(json.dumps([session_id, kind, id_]).encode(), digest_size=16).hexdigest()
        return self._client.conversation(f"{self._namespace}/strands-{kind}-{digest}")

    def _create(self, session_id: str, kind: str, id_: str, record: dict[str, Any]) -> None:
        name = self._talk(session_id, kind, id_).name
        labels = {_SESSION: session_id, **self._user} | ({kind: id_} if id_ else {})
        document = write_json(kind, record)
        make = UpdateConversation(name, labels, absent=kind == _SESSION, create=kind != _SESSION)
        self._client.write_together(self._namespace, [make, SetState(StateScope.SESSION, name, document)])

    def _read(self, session_id: str, kind: str, id_: str) -> dict[str, Any] | None:
        name = self._talk(session_id, kind, id_).name
        try:
            found: dict[str, Any] = json.loads(
                self._client.get_state(self._namespace, StateScope.SESSION, name).document
            )
        except ConversationNotFound:
            return None
        return found

    def _write(self, session_id: str, kind: str, id_: str, record: dict[str, Any]) -> None:
        name = self._talk(session_id, kind, id_).name
        self._client.set_state(self._namespace, StateScope.SESSION, name, write_json(kind, record))

    def _messages(self, session_id: str, agent_id: str, **query: Any) -> Iterator[Message]:
        try:
            yield from self._talk(session_id, _AGENT, agent_id).messages(**query)
        except ConversationNotFound:
            return

    def _find_message(self, session_id: str, agent_id: str, message_id: int) -> Message | None:
        listed = self._messages(session_id, agent_id, newest_first=True)
        return next((one for one in listed if _read_message(one).message_id == message_id), None)


def _write_message(message: SessionMessage) -> NewMessage:
    return NewMessage(role=message.message["role"], body=write_json("message", message.to_dict()))


def _read_message(message: Message) -> SessionMessage:
    return SessionMessage.from_dict(json.loads(message.body or "{}"))
