"""Sessions, state and memory of Google's Agent Development Kit on a memstream server.

An app is a namespace, a session a conversation in it with an event in the body of each message, and a user's memory a
memory of the namespace. State documents hold the state of app, user and session.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, NoReturn

from memstream.client import Client
from memstream.conversation_values import Appended, NewMessage
from memstream.conversations import Conversation
from memstream.errors import ConversationNotFound, EtagMismatch, FragmentNotFound, MemoryExists, MemoryNotFound
from memstream.frameworks import AnyClient, asynchronous, framework, write_json
from memstream.listed_values import ConversationSummary
from memstream.names import memory_name
from memstream.states import StateKey, StateScope
from memstream.transactions import AppendMessages, SetState, TransactionWrite, UpdateConversation
from memstream.values import Observation, Role

with framework("google-adk"):
    from google.adk.errors._stale_session_error import StaleSessionError
    from google.adk.errors.already_exists_error import AlreadyExistsError
    from google.adk.errors.session_not_found_error import SessionNotFoundError
    from google.adk.events.event import Event
    from google.adk.memory.base_memory_service import BaseMemoryService, SearchMemoryResponse
    from google.adk.memory.memory_entry import MemoryEntry
    from google.adk.sessions import Session, State
    from google.adk.sessions._session_util import extract_json_safe_state_delta
    from google.adk.sessions.base_session_service import (
        BaseSessionService,
        GetSessionConfig,
        ListSessionsResponse,
    )
    from google.genai import types

ATTEMPTS_MAX = 10
"""Of a write whose state documents another session of the user or app changes at the same time."""
_SESSION, _USER = "session", "user"
_States = dict[StateKey, tuple[dict[str, Any], str | None]]
_PREFIXES = {StateScope.APP: State.APP_PREFIX, StateScope.USER: State.USER_PREFIX, StateScope.SESSION: ""}


class MemstreamSessionService(BaseSessionService):
    """A session service for a `Runner`.

    client: blocking, or asynchronous with `any_loop=True`, because `Runner.run` has an event loop of its own.

    An event and what it changes in the states are one transaction. Raises ADK's errors for sessions that exist, do not
    exist, or were changed by another process since they were read (StaleSessionError); otherwise a MemstreamError.
    """

    def __init__(self, client: AnyClient) -> None:
        self._client: Client = asynchronous(client)

    async def create_session(
        self, *, app_name: str, user_id: str, state: dict[str, Any] | None = None, session_id: str | None = None
    ) -> Session:
        """Creates a session. Raises AlreadyExistsError."""
        id_ = (session_id or "").strip() or str(uuid.uuid4())
        talk = self._talk(app_name, user_id, id_)
        labels = {_USER: user_id, _SESSION: id_}
        make = UpdateConversation(talk.name, labels, absent=True)
        try:
            await self._write(app_name, user_id, talk, [make], state or {})
        except MemoryExists:
            raise AlreadyExistsError(f"Session with id {id_} already exists.") from None
        (session,) = await self._read(app_name, [await talk.describe()])
        return session

    async def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: GetSessionConfig | None = None
    ) -> Session | None:
        """A session with its events and the states of app, user and session; None if there is none."""
        talk = self._talk(app_name, user_id, session_id.strip())
        try:
            summary = await talk.describe()
            (session,) = await self._read(app_name, [summary])
            session.events = await _read_events(talk, summary.last_number, config or GetSessionConfig())
        except ConversationNotFound:
            return None
        return session

    async def list_sessions(self, *, app_name: str, user_id: str | None = None) -> ListSessionsResponse:
        """The sessions of a user or of all, with states and without events, the latest changed last."""
        labels = None if user_id is None else {_USER: user_id}
        listed = self._client.list_conversations(_namespace(app_name), labels=labels, latest_first=True)
        found = [one async for one in listed if one.labels.keys() >= {_SESSION, _USER}]
        return ListSessionsResponse(sessions=await self._read(app_name, found[::-1]))

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Deletes a session with its events and state."""
        try:
            await self._talk(app_name, user_id, session_id.strip()).delete()
        except ConversationNotFound:
            return

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """A user's state; the keys have no prefix."""
        key = StateKey(StateScope.USER, user_id)
        return (await self._states(app_name, [key]))[key][0]

    async def append_event(self, session: Session, event: Event) -> Event:
        """Appends an event, and writes what it changes in the states, in one transaction."""
        if event.partial:
            return event
        self._apply_temp_state(session, event)
        event = self._trim_temp_delta_state(event)
        talk = self._talk(session.app_name, session.user_id, session.id)
        marker = session._storage_update_marker
        message = NewMessage(
            role="user" if event.author == "user" else "assistant",
            name=event.author,
            body=write_json("event", event.model_dump(exclude_none=True, mode="json", by_alias=False)),
            time=datetime.fromtimestamp(event.timestamp, UTC),
        )
        append = AppendMessages(talk.name, [message], last_number=None if marker is None else int(marker))
        delta = event.actions.state_delta if event.actions else None
        exists = UpdateConversation(talk.name)
        try:
            done = await self._write(session.app_name, session.user_id, talk, [exists, append], delta or {})
        except ConversationNotFound:
            raise SessionNotFoundError(f"Session {session.id} not found.") from None
        appended = next(one for one in done if isinstance(one, Appended))
        session._storage_update_marker = str(appended.last_number)
        if appended.create_time is not None:
            session.last_update_time = appended.create_time.timestamp()
        return self._commit_event_to_session(session, event)

    def _talk(self, app_name: str, user_id: str, session_id: str) -> Conversation:
        digest = blake2b(json.dumps([user_id, session_id]).encode(), digest_size=16).hexdigest()
        return self._client.conversation(f"{_namespace(app_name)}/session-{digest}")

    async def _states(
        self, app_name: str, keys: Sequence[StateKey]
    ) -> dict[StateKey, tuple[dict[str, Any], str | None]]:
        """States and their etags."""
        found = await self._client.get_states(_namespace(app_name), keys)
        read = {key: (json.loads(state.document), state.etag) for key, state in found.items()}
        return {key: read.get(key, ({}, None)) for key in keys}

    async def _write(
        self,
        app_name: str,
        user_id: str,
        talk: Conversation,
        writes: Sequence[TransactionWrite],
        delta: Mapping[str, Any],
    ) -> Sequence[Any]:
        """Writes, with what changes in the states of app, user and session, all or nothing."""
        changes = extract_json_safe_state_delta(dict(delta))
        keys = [key for key in _keys(app_name, user_id, talk.name) if changes[key.scope.value]]
        append = next((one for one in writes if isinstance(one, AppendMessages)), None)
        for attempt in range(ATTEMPTS_MAX):
            states: list[TransactionWrite] = []
            for key, (known, etag) in (await self._states(app_name, keys)).items():
                document = write_json("state", known | changes[key.scope.value])
                states.append(SetState(key.scope, key.name, document, etag, absent=etag is None))
            try:
                return await self._client.write_together(_namespace(app_name), [*writes, *states])
            except EtagMismatch:
                if append is not None and append.last_number not in (None, (await talk.describe()).last_number):
                    _raise_stale()
                if attempt + 1 == ATTEMPTS_MAX:
                    raise
        raise AssertionError("unreachable")

    async def _read(self, app_name: str, listed: Sequence[ConversationSummary]) -> list[Session]:
        """Sessions without events."""
        keys = {one.name: _keys(app_name, one.labels[_USER], one.name) for one in listed}
        found = await self._states(app_name, list({key for some in keys.values() for key in some}))
        sessions: list[Session] = []
        for one in listed:
            states = [(key.scope, found[key][0]) for key in keys[one.name]]
            session = Session(
                app_name=app_name,
                user_id=one.labels[_USER],
                id=one.labels[_SESSION],
                state={_PREFIXES[scope] + name: value for scope, state in states for name, value in state.items()},
                last_update_time=one.update_time.timestamp(),
            )
            session._storage_update_marker = str(one.last_number)
            sessions.append(session)
        return sessions


class MemstreamMemoryService(BaseMemoryService):
    """A memory service: what a user of an app said in any session, as one memory.

    An event that is added again is not stored again.
    """

    def __init__(self, client: AnyClient, *, limit: int = 10) -> None:
        self._client: Client = asynchronous(client)
        self._limit = limit

    async def add_session_to_memory(self, session: Session) -> None:
        """Stores the texts of a session's events."""
        await self.add_events_to_memory(
            app_name=session.app_name, user_id=session.user_id, events=session.events, session_id=session.id
        )

    async def add_events_to_memory(
        self,
        *,
        app_name: str,
        user_id: str,
        events: Sequence[Event],
        session_id: str | None = None,
        custom_metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Stores the texts of events."""
        said = [
            _observation(event.content, event.author, event.id, event.timestamp, session_id or "", custom_metadata)
            for event in events
        ]
        await self._observe(app_name, user_id, said)

    async def add_memory(
        self,
        *,
        app_name: str,
        user_id: str,
        memories: Sequence[MemoryEntry],
        custom_metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Stores texts."""
        said = [
            _observation(
                one.content,
                one.author or "",
                one.id or "",
                None if one.timestamp is None else datetime.fromisoformat(one.timestamp).timestamp(),
                "",
                {**(custom_metadata or {}), **one.custom_metadata},
            )
            for one in memories
        ]
        await self._observe(app_name, user_id, said)

    async def search_memory(self, *, app_name: str, user_id: str, query: str) -> SearchMemoryResponse:
        """The texts that matter most for a query, the best first."""
        try:
            found = await self._client.memory(_memory(app_name, user_id)).recall_once(
                query, limit=self._limit, omit_working_memory=True
            )
        except MemoryNotFound:
            return SearchMemoryResponse()
        return SearchMemoryResponse(
            memories=[
                MemoryEntry(
                    id=hit.fragment.id,
                    content=types.Content(
                        role="user" if hit.fragment.role is Role.USER else "model",
                        parts=[types.Part(text=hit.fragment.content)],
                    ),
                    author=hit.fragment.speaker or None,
                    timestamp=hit.fragment.observe_time.isoformat() if hit.fragment.observe_time else None,
                    custom_metadata=dict(hit.fragment.metadata),
                )
                for hit in found
            ]
        )

    async def delete_memory(self, *, app_name: str, user_id: str, memory_id: str | None = None) -> None:
        """Erases one text, by the id that a search returned."""
        if memory_id is None:
            raise ValueError("memory_id is required")
        try:
            erased = await self._client.memory(_memory(app_name, user_id)).erase_fragments([memory_id])
        except (FragmentNotFound, MemoryNotFound):
            return
        await self._client.finished(erased)

    async def _observe(self, app_name: str, user_id: str, said: Sequence[Observation | None]) -> None:
        given = [one for one in said if one is not None]
        if not given:
            return
        path = _memory(app_name, user_id)
        try:
            done = await self._client.memory(path).observe_batch(given)
        except MemoryNotFound:
            memory = await self._client.create_memory(path, labels={_USER: user_id}, exist_ok=True)
            done = await memory.observe_batch(given)
        for refused in done.rejected:
            raise refused.error


def _namespace(app_name: str) -> str:
    return memory_name(app_name)


def _memory(app_name: str, user_id: str) -> str:
    return f"{_namespace(app_name)}/{memory_name(user_id)}"


def _keys(app_name: str, user_id: str, talk: str) -> list[StateKey]:
    names = {StateScope.APP: app_name, StateScope.USER: user_id, StateScope.SESSION: talk}
    return [StateKey(scope, name) for scope, name in names.items()]


def _raise_stale() -> NoReturn:
    raise StaleSessionError(
        "The session has been modified in storage since it was loaded. "
        "Please reload the session before appending more events."
    ) from None


async def _read_events(talk: Conversation, last_number: int, config: GetSessionConfig) -> list[Event]:
    """The events up to a number: all, the latest, or those since a time."""
    if config.num_recent_events == 0:
        return []
    events: list[Event] = []
    newest = talk.messages(limit=config.num_recent_events or 0, newest_first=True, before=last_number + 1)
    async for message in newest:
        event = Event.model_validate_json(message.body or "{}")
        if config.after_timestamp is not None and event.timestamp < config.after_timestamp:
            break
        events.append(event)
    return events[::-1]


def _observation(
    content: types.Content | None,
    author: str,
    id_: str,
    timestamp: float | None,
    session: str,
    metadata: Mapping[str, object] | None,
) -> Observation | None:
    """The observation of the texts of a content; None if it has none."""
    parts = (content.parts if content is not None else None) or []
    text = "\n".join(part.text for part in parts if part.text and not part.thought)
    if not text.strip():
        return None
    return Observation(
        text,
        speaker=author,
        role=Role.USER if author == "user" else Role.ASSISTANT,
        session=session,
        external_id=id_,
        observe_time=None if timestamp is None else datetime.fromtimestamp(timestamp, UTC),
        metadata=json.loads(write_json("custom_metadata", dict(metadata or {}))),
    )
