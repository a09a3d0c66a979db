"""What the adapters of agent frameworks share: the versions that they take, and a session as JSON in a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import metadata
from typing import Any, TypeAlias

from memstream.client import Client
from memstream.conversation_values import Message, NewMessage
from memstream.conversations import Conversation
from memstream.errors import ConversationNotFound, InvalidArgument, MemoryExists
from memstream.names import memory_name
from memstream.sync import Client as SyncClient
from memstream.transactions import AppendMessages, UpdateConversation

AnyClient: TypeAlias = Client | SyncClient
"""A blocking client, or an asynchronous one: for frameworks with event loops of their own, with `any_loop=True`."""
Version: TypeAlias = tuple[int, ...]

FRAMEWORKS: dict[str, tuple[Version, Version]] = {
    "agent-framework-core": ((1, 23), (1, 24)),
    "anthropic": ((2, 14), (2, 15)),
    "crewai": ((1, 15, 30), (1, 16)),
    "dbgpt": ((0, 8), (0, 9)),
    "google-adk": ((2, 13), (2, 14)),
    "langgraph-checkpoint": ((4, 1), (5,)),
    "llama-index-core": ((0, 14), (0, 15)),
    "openai-agents": ((0, 24), (0, 25)),
    "pydantic-ai-slim": ((2, 68), (2, 69)),
    "strands-agents": ((1, 62), (1, 63)),
}
"""For each package, the lowest version that its adapter takes, and the first that it does not."""
CALL_BYTES_MAX = 3 << 20
"""Bodies in one call: below the server's limit of a message, unless one body alone is larger."""


@contextmanager
def framework(package: str) -> Iterator[None]:
    """Imports of a framework go inside. Raises ImportError, which says what to install, if the package is not there or
    its version is not one that the adapter takes."""
    lowest, below = (".".join(map(str, version)) for version in FRAMEWORKS[package])
    wanted = f"{package}>={lowest},<{below}"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"needs {wanted}, which is not installed: pip install '{wanted}'", name=package) from None
    numbers = tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", found, maxsplit=1)[0])))
    if not FRAMEWORKS[package][0] <= numbers < FRAMEWORKS[package][1]:
        raise ImportError(f"needs {wanted}, and {found} is installed: pip install '{wanted}'", name=package)
    yield


def asynchronous(client: AnyClient) -> Client:
    """The asynchronous client of a client."""
    return client.asynchronous if isinstance(client, SyncClient) else client


def write_json(name: str, value: object, default: Callable[[Any], Any] | None = None) -> str:
    """A framework's value as JSON. Raises InvalidArgument, which is a TypeError and a ValueError, if it is not JSON."""
    try:
        return json.dumps(value, allow_nan=False, default=default)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(name, f"cannot be written as JSON: {error}") from error


async def split_for_calls(client: Client, messages: Sequence[NewMessage]) -> list[list[NewMessage]]:
    """The messages of each call, in order. Raises InvalidArgument if a body is larger than the server takes."""
    sizes = [len((message.body or "").encode()) for message in messages]
    if sum(sizes) <= CALL_BYTES_MAX:
        return [list(messages)] if messages else []
    bytes_max = (await client.server_info()).limits.message_bytes_max
    parts: list[list[NewMessage]] = []
    left = 0
    for place, (message, size) in enumerate(zip(messages, sizes, strict=True)):
        if size > bytes_max:
            raise InvalidArgument(f"items[{place}]", f"has {size} bytes of JSON, the server takes {bytes_max}")
        if size > left:
            parts.append([])
            left = CALL_BYTES_MAX
        parts[-1].append(message)
        left -= size
    return parts


class Transcript:
    """A framework's session: a conversation whose messages have the framework's items as their JSON bodies.

    The first item creates the conversation, with the label `user`, time to live and memory to feed that are given.
    """

    def __init__(
        self,
        client: AnyClient,
        namespace: str,
        session_id: str,
        *,
        user: str = "",
        ttl: timedelta | None = None,
        feed_memory: str | None = None,
    ) -> None:
        self._client = asynchronous(client)
        self._talk: Conversation = self._client.conversation(f"{namespace}/{memory_name(session_id)}")
        labels = {"user": user} if user else None
        self._made = UpdateConversation(self._talk.name, labels, ttl, absent=True, feed_memory=feed_memory)
        self._is_made = (labels, ttl, feed_memory) == (None, None, None)

    async def append(self, messages: Sequence[NewMessage]) -> None:
        """Appends messages in order; in one call, all or none, unless their bodies are too large for one.

        Raises InvalidArgument, and appends none, if one body is larger than the server takes.
        """
        for part in await split_for_calls(self._client, messages):
            if not self._is_made:
                self._is_made = True
                with suppress(MemoryExists):
                    append = AppendMessages(self._talk.name, part)
                    await self._client.write_together(self._talk.namespace, [self._made, append])
                    continue
            await self._talk.append_messages(part)

    async def read(self, limit: int | None = None) -> list[Message]:
        """The messages in order: all, or the latest."""
        if limit is not None and limit <= 0:
            return []
        try:
            found = [each async for each in self._talk.messages(limit=limit or 0, newest_first=limit is not None)]
        except ConversationNotFound:
            return []
        return found if limit is None else found[::-1]

    async def pop(self) -> Message | None:
        """Takes the last message away; None if there is none."""
        try:
            return await self._talk.pop_message()
        except ConversationNotFound:
            return None

    async def clear(self) -> None:
        """Deletes all messages."""
        with suppress(ConversationNotFound):
            await self._talk.delete_messages()
