"""LangGraph's BaseCheckpointSaver on a server: a thread is a conversation.

Each checkpoint, each new value of a channel and each pending write is a message. A checkpoint names the messages of its
values, so a value that did not change is stored once. The client id of a message makes a repeat harmless.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from memstream.client import Client
from memstream.conversation_values import Message, NewMessage
from memstream.conversations import Conversation
from memstream.errors import ConversationNotFound, MemoryExists
from memstream.frameworks import AnyClient, asynchronous, split_for_calls
from memstream.sync.loop import LOOP

_CHECKPOINT, _VALUE, _WRITE = "checkpoint", "value", "write"
_LABEL = "thread"
PAGE = 1_000


class MemstreamSaver(BaseCheckpointSaver[str]):
    """A checkpointer for `compile(checkpointer=...)`, in the namespace `namespace`.

    client: a blocking client; the asynchronous methods may be called in any event loop. user: whose threads these are,
    as the label `user`: `erase_user` deletes them. A value of a channel has at most 3 MB.
    """

    def __init__(
        self,
        client: AnyClient,
        namespace: str = "checkpoints",
        *,
        user: str = "",
        serde: SerializerProtocol | None = None,
    ) -> None:
        super().__init__(serde=serde)
        self._client: Client = asynchronous(client)
        self._namespace = namespace
        self._user = {"user": user} if user else {}
        self._made: set[str] = set()

    # ---- read

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """A checkpoint by its id, or the latest of a thread; None if there is none."""
        async for found in self.alist(config, limit=1):
            return found
        return None

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """The checkpoints of a thread, or of all, the latest first."""
        until = get_checkpoint_id(before) if before else None
        left = limit
        async for thread in self._list_threads(config):
            chosen = None if config is None else config["configurable"].get("checkpoint_ns")
            wanted = None if config is None else get_checkpoint_id(config)
            writes: dict[tuple[str, str], list[int]] = {}
            async for message in self._listed(thread):
                ns, id_ = str(message.metadata.get("ns", "")), str(message.metadata.get("id", ""))
                if message.name == _WRITE:  # after its checkpoint, so it is listed before
                    writes.setdefault((ns, id_), []).append(message.number)
                if message.name != _CHECKPOINT or chosen not in (None, ns) or wanted not in (None, id_):
                    continue
                if until is not None and id_ >= until:
                    continue
                if left is not None and left <= 0:
                    return
                found = await self._read_tuple(thread, ns, id_, message.number, writes.get((ns, id_), []), filter)
                if found is not None:
                    left = None if left is None else left - 1
                    yield found
                if wanted is not None:
                    break

    async def _list_threads(self, config: RunnableConfig | None) -> AsyncIterator[str]:
        if config is not None:
            yield str(config["configurable"]["thread_id"])
            return
        async for each in self._client.list_conversations(self._namespace, latest_first=True):
            if _LABEL in each.labels:
                yield each.labels[_LABEL]

    async def _listed(self, thread: str) -> AsyncIterator[Message]:
        """The messages of a thread without their bodies, the latest first."""
        try:
            async for message in self._talk(thread).messages(newest_first=True, bodies=False, page_size=PAGE):
                yield message
        except ConversationNotFound:
            return

    async def _read_tuple(
        self, thread: str, ns: str, id_: str, number: int, writes: list[int], filter: dict[str, Any] | None
    ) -> CheckpointTuple | None:
        """A checkpoint with its values and pending writes; None if its metadata do not match."""
        record = await self._read_body(thread, number)
        metadata: Any = self._load(record["metadata"])
        if any(metadata.get(key) != value for key, value in (filter or {}).items()):
            return None
        channels: dict[str, int | str] = record["values"]
        bodies = await asyncio.gather(*(self._read_body(thread, each) for each in [*channels.values(), *writes]))
        values = {channel: self._load(body) for channel, body in zip(channels, bodies, strict=False)}
        pending = list(bodies[len(channels) :])
        pending.sort(key=lambda one: (one["path"], one["task"], one["index"]))
        checkpoint: Any = {**self._load(record["checkpoint"]), "channel_values": values}
        return CheckpointTuple(
            config=_config(thread, ns, id_),
            checkpoint=checkpoint,
            metadata=metadata,
            parent_config=_config(thread, ns, record["parent"]) if record["parent"] else None,
            pending_writes=[(one["task"], one["channel"], self._load(one)) for one in pending],
        )

    async def _read_body(self, thread: str, which: int | str) -> Any:
        """Of a message, by its number or its client id."""
        talk = self._talk(thread)
        found = talk.message(which) if isinstance(which, int) else talk.message(client_id=which)
        return json.loads((await found).body or "{}")

    # ---- write

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Stores a checkpoint, and the values of its channels that the server does not have."""
        where = config["configurable"]
        thread, ns, id_ = str(where["thread_id"]), str(where.get("checkpoint_ns", "")), checkpoint["id"]
        record: dict[str, Any] = dict(checkpoint)
        values: dict[str, Any] = record.pop("channel_values")
        channels = [channel for channel in checkpoint["channel_versions"] if channel in values]
        given = [
            self._message(_VALUE, [ns, channel, checkpoint["channel_versions"][channel]], self._dump(values[channel]))
            for channel in channels
        ]
        body = {
            "checkpoint": self._dump(record),
            "metadata": self._dump(get_checkpoint_metadata(config, metadata)),
            "parent": where.get("checkpoint_id"),
            "values": {channel: value.client_id for channel, value in zip(channels, given, strict=True)},
        }
        await self._append(thread, [*given, self._message(_CHECKPOINT, [ns, id_], body, ns, id_)])
        return _config(thread, ns, id_)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Stores what a task has written. Writes that are there stay; errors and interrupts are replaced."""
        where = config["configurable"]
        thread, ns, id_ = str(where["thread_id"]), str(where.get("checkpoint_ns", "")), str(where["checkpoint_id"])
        for place, (channel, value) in enumerate(writes):
            index = WRITES_IDX_MAP.get(channel, place)
            more = {"task": task_id, "path": task_path, "channel": channel, "index": index}
            message = self._message(_WRITE, [ns, id_, task_id, index], self._dump(value) | more, ns, id_)
            (number,) = await self._append(thread, [message])
            if index < 0:
                await self._talk(thread).replace_message(number, message)

    async def adelete_thread(self, thread_id: str) -> None:
        """Deletes a thread with all of its checkpoints."""
        self._made.discard(str(thread_id))
        try:
            await self._talk(str(thread_id)).delete()
        except ConversationNotFound:
            return

    def get_next_version(self, current: str | int | float | None, channel: None) -> str:
        """A version that sorts after `current`; two branches of a thread get different ones."""
        number = int(str(current).partition(".")[0]) if current is not None else 0
        return f"{number + 1:032}.{random.random():016}"

    def _talk(self, thread: str) -> Conversation:
        return self._client.conversation(f"{self._namespace}/thread-{_digest([thread])}")

    async def _append(self, thread: str, messages: list[NewMessage]) -> list[int]:
        """Appends messages; the number of each."""
        talk = self._talk(thread)
        if thread not in self._made:
            with suppress(MemoryExists):
                await talk.update(labels={_LABEL: thread, **self._user}, absent=True)
            self._made.add(thread)
        numbers: list[int] = []
        for part in await split_for_calls(self._client, messages):
            numbers += (await talk.append_messages(part)).numbers
        return numbers

    def _message(self, kind: str, key: list[Any], body: Any, ns: str = "", id_: str = "") -> NewMessage:
        metadata = {"ns": ns, "id": id_} if id_ else {}
        return NewMessage(name=kind, client_id=f"{kind}-{_digest(key)}", metadata=metadata, body=json.dumps(body))

    def _dump(self, value: Any) -> dict[str, str]:
        kind, data = self.serde.dumps_typed(value)
        return {"type": kind, "data": base64.b64encode(data).decode()}

    def _load(self, stored: dict[str, str]) -> Any:
        return self.serde.loads_typed((stored["type"], base64.b64decode(stored["data"])))

    # ---- without an event loop

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See aget_tuple."""
        return LOOP.run(self.aget_tuple(config))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """See alist."""
        return LOOP.iterate_from(lambda: self.alist(config, filter=filter, before=before, limit=limit))

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See aput."""
        return LOOP.run(self.aput(config, checkpoint, metadata, new_versions))

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """See aput_writes."""
        LOOP.run(self.aput_writes(config, writes, task_id, task_path))

    def delete_thread(self, thread_id: str) -> None:
        """See adelete_thread."""
        LOOP.run(self.adelete_thread(thread_id))


def _config(thread: str, ns: str, id_: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ns, "checkpoint_id": id_}}


def _digest(key: list[Any]) -> str:
    return blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
