"""A history provider of the Microsoft Agent Framework on a memstream server: a session is a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from memstream.conversation_values import NewMessage
from memstream.frameworks import AnyClient, Transcript, framework, write_json

with framework("agent-framework-core"):
    from agent_framework import HistoryProvider, Message
    from agent_framework._sessions import filter_new_messages


class MemstreamHistoryProvider(HistoryProvider):
    """A history provider for `Agent(context_providers=[...])`, in the namespace `namespace`.

    client: blocking, or asynchronous with `any_loop=True`, unless the agent runs in one event loop.
    user: whose sessions these are; `erase_user` deletes them. ttl: how long after its last message the server deletes a
    session. feed_memory: the memory of the namespace that the messages feed. skip_excluded: leave out messages that a
    compaction has marked. Others as of HistoryProvider.

    Raises a MemstreamError; InvalidArgument, also a TypeError, for a message that is not JSON.
    """

    DEFAULT_SOURCE_ID = "memstream"

    def __init__(
        self,
        client: AnyClient,
        namespace: str = "agents",
        source_id: str = DEFAULT_SOURCE_ID,
        *,
        user: str = "",
        ttl: timedelta | None = None,
        feed_memory: str | None = None,
        skip_excluded: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(source_id, **options)
        self._client = client
        self._namespace = namespace
        self._skip_excluded = skip_excluded
        self._made: dict[str, Any] = {"user": user, "ttl": ttl, "feed_memory": feed_memory}

    async def get_messages(
        self, session_id: str | None, *, state: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[Message]:
        """The messages of a session, in order."""
        found = await self._read(session_id)
        if self._skip_excluded:
            found = [message for message in found if not message.additional_properties.get("_excluded", False)]
        return found

    async def save_messages(
        self,
        session_id: str | None,
        messages: Sequence[Message],
        *,
        state: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Appends messages; they are durable when this returns.

        As by the framework's own providers, those that repeat the end of the history, or all of it, are left out.
        """
        # An overlap has at most as many as there are new ones; one more tells whether that is all of the history.
        stored = await self._read(session_id, len(messages) + 1)
        new = [
            NewMessage(
                role=str(message.role),
                name=message.author_name or "",
                body=write_json(f"messages[{place}]", message.to_dict()),
            )
            for place, message in enumerate(filter_new_messages(stored, messages))
        ]
        await self._transcript(session_id).append(new)

    async def _read(self, session_id: str | None, limit: int | None = None) -> list[Message]:
        found = await self._transcript(session_id).read(limit)
        return [Message.from_dict(json.loads(each.body or "{}")) for each in found]

    def _transcript(self, session_id: str | None) -> Transcript:
        if not session_id:
            raise ValueError("a session id is needed: run the agent with session=agent.create_session()")
        return Transcript(self._client, self._namespace, session_id, **self._made)
