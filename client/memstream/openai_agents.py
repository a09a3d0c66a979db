"""A session of the OpenAI Agents SDK on a memstream server: each item is a message of a conversation."""

from __future__ import annotations

import json
from datetime import timedelta

from memstream.arguments import check_constructor
from memstream.conversation_values import NewMessage
from memstream.frameworks import AnyClient, Transcript, framework, write_json

with framework("openai-agents"):
    from agents import SessionSettings, TResponseInputItem


@check_constructor
class MemstreamSession:
    """A `Session` for `Runner.run(..., session=...)`: the conversation `namespace/session_id` of a server.

    client: blocking, or asynchronous with `any_loop=True`, because `Runner.run_sync` has event loops of its own.
    user: whose session it is; `erase_user` reaches it. ttl: how long after its last item the server deletes it.
    feed_memory: the memory of the namespace that the items feed.

    Raises a MemstreamError; InvalidArgument, also a TypeError, for an item that is not JSON.
    """

    def __init__(
        self,
        session_id: str,
        client: AnyClient,
        namespace: str = "agents",
        *,
        session_settings: SessionSettings | None = None,
        user: str = "",
        ttl: timedelta | None = None,
        feed_memory: str | None = None,
    ) -> None:
        self.session_id = session_id
        self.session_settings = session_settings or SessionSettings()
        self._items = Transcript(client, namespace, session_id, user=user, ttl=ttl, feed_memory=feed_memory)

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """All items in order, or the latest `limit`."""
        if limit is None:
            limit = self.session_settings.limit
        return [json.loads(each.body or "null") for each in await self._items.read(limit)]

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Appends items; they are durable when this returns."""
        await self._items.append(
            [
                NewMessage(
                    role=str(item.get("role", "")),
                    tool_call_id=str(item.get("call_id", "")),
                    body=write_json(f"items[{place}]", item),
                )
                for place, item in enumerate(items)
            ]
        )

    async def pop_item(self) -> TResponseInputItem | None:
        """Takes the last item away; None if there is none."""
        last = await self._items.pop()
        return None if last is None else json.loads(last.body or "null")

    async def clear_session(self) -> None:
        """Deletes all items."""
        await self._items.clear()
