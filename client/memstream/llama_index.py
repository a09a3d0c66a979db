"""LlamaIndex on a memstream server: a chat store, and a block of long-term memory."""

from __future__ import annotations

from typing import Any

from memstream.client import Client
from memstream.conversation_values import NewMessage
from memstream.conversations import Conversation
from memstream.errors import ConversationNotFound, MemoryNotFound
from memstream.frameworks import AnyClient, asynchronous, framework, split_for_calls
from memstream.names import memory_name, user_id_of
from memstream.sync.loop import LOOP
from memstream.transactions import AppendMessages, RemoveMessages, TransactionWrite
from memstream.values import Observation, Role

with framework("llama-index-core"):
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.llms import ChatMessage, MessageRole
    from llama_index.core.memory import BaseMemoryBlock
    from llama_index.core.storage.chat_store.base import BaseChatStore


class MemstreamChatStore(BaseChatStore):
    """A chat store for `ChatMemoryBuffer` and others: each key is a conversation of the namespace.

    client: a blocking client; the asynchronous methods may be called in any event loop.
    """

    namespace: str = Field(default="agents", description="The namespace of the conversations.")
    _client: Client = PrivateAttr()

    def __init__(self, client: AnyClient, namespace: str = "agents", **kwargs: Any) -> None:
        super().__init__(namespace=namespace, **kwargs)
        self._client = asynchronous(client)

    @classmethod
    def class_name(cls) -> str:
        """The name of the class."""
        return "MemstreamChatStore"

    async def aset_messages(self, key: str, messages: list[ChatMessage]) -> None:
        """Replaces all messages in one transaction; if they are too many for one call, it stores the others before."""
        talk, parts = self._talk(key), await split_for_calls(self._client, [_written(one) for one in messages])
        old = (await talk.update(create=True)).message_count
        for part in parts[:-1]:
            await talk.append_messages(part)
        writes: list[TransactionWrite] = [AppendMessages(talk.name, part) for part in parts[-1:]]
        if old and len(parts) < 2:
            writes.insert(0, RemoveMessages(talk.name, from_number=1))
        if writes:
            await self._client.write_together(self.namespace, writes)
        if old and len(parts) > 1:
            await talk.remove_oldest(old)

    async def aget_messages(self, key: str) -> list[ChatMessage]:
        """The messages of a key."""
        return [ChatMessage.model_validate_json(each.body or "{}") async for each in self._listed(key)]

    async def async_add_message(self, key: str, message: ChatMessage) -> None:
        """Appends a message; it is durable when this returns."""
        await self._append(key, [message])

    async def adelete_messages(self, key: str) -> list[ChatMessage] | None:
        """Deletes a key and returns its messages; None if there is none."""
        found = await self.aget_messages(key)
        try:
            await self._talk(key).delete()
        except ConversationNotFound:
            return None
        return found

    async def adelete_message(self, key: str, idx: int) -> ChatMessage | None:
        """Deletes the message at an index and returns it; None if there is none."""
        numbers = [message.number async for message in self._listed(key, bodies=False)]
        if not -len(numbers) <= idx < len(numbers):
            return None
        try:
            found = await self._talk(key).message(numbers[idx])
            await self._talk(key).remove_messages([numbers[idx]])
        except ConversationNotFound:
            return None
        return ChatMessage.model_validate_json(found.body or "{}")

    async def adelete_last_message(self, key: str) -> ChatMessage | None:
        """Deletes the last message and returns it; None if there is none."""
        try:
            return ChatMessage.model_validate_json((await self._talk(key).pop_message()).body or "{}")
        except ConversationNotFound:
            return None

    async def aget_keys(self) -> list[str]:
        """The keys that have messages."""
        listed = self._client.list_conversations(self.namespace)
        return [user_id_of(each.name) async for each in listed if each.message_count]

    def set_messages(self, key: str, messages: list[ChatMessage]) -> None:
        """See aset_messages."""
        LOOP.run(self.aset_messages(key, messages))

    def get_messages(self, key: str) -> list[ChatMessage]:
        """See aget_messages."""
        return LOOP.run(self.aget_messages(key))

    def add_message(self, key: str, message: ChatMessage) -> None:
        """See async_add_message."""
        LOOP.run(self.async_add_message(key, message))

    def delete_messages(self, key: str) -> list[ChatMessage] | None:
        """See adelete_messages."""
        return LOOP.run(self.adelete_messages(key))

    def delete_message(self, key: str, idx: int) -> ChatMessage | None:
        """See adelete_message."""
        return LOOP.run(self.adelete_message(key, idx))

    def delete_last_message(self, key: str) -> ChatMessage | None:
        """See adelete_last_message."""
        return LOOP.run(self.adelete_last_message(key))

    def get_keys(self) -> list[str]:
        """See aget_keys."""
        return LOOP.run(self.aget_keys())

    def _talk(self, key: str) -> Conversation:
        return self._client.conversation(f"{self.namespace}/{memory_name(key)}")

    async def _listed(self, key: str, bodies: bool = True) -> Any:
        try:
            async for message in self._talk(key).messages(bodies=bodies):
                yield message
        except ConversationNotFound:
            return

    async def _append(self, key: str, messages: list[ChatMessage]) -> None:
        for part in await split_for_calls(self._client, [_written(message) for message in messages]):
            await self._talk(key).append_messages(part)


def _written(message: ChatMessage) -> NewMessage:
    return NewMessage(role=message.role.value, body=message.model_dump_json())


class MemstreamMemoryBlock(BaseMemoryBlock[str]):
    """A block for `Memory(memory_blocks=[...])`: stores what leaves the short-term memory, and recalls what matters for
    the latest message of the user.

    client: a blocking client, or an asynchronous one. memory: "namespace/name", created if it does not exist.
    """

    name: str = Field(default="RecalledMemories", description="The name of the block.")
    memory: str = Field(description="The memory, namespace/name.")
    limit: int = Field(default=10, description="Most recollections.")
    token_budget: int = Field(default=0, description="Most tokens of the recollections; 0 for no limit.")
    _client: Client = PrivateAttr()

    def __init__(self, client: AnyClient, memory: str, **kwargs: Any) -> None:
        super().__init__(memory=memory, **kwargs)
        self._client = asynchronous(client)

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        asked = [one.content for one in messages or () if one.role == MessageRole.USER and one.content]
        if not asked:
            return ""
        try:
            found = await self._client.memory(self.memory).recall_once(
                asked[-1], limit=self.limit, token_budget=self.token_budget, omit_working_memory=True
            )
        except MemoryNotFound:
            return ""
        return "\n".join(hit.fragment.content for hit in found)

    async def _aput(self, messages: list[ChatMessage]) -> None:
        said = [
            Observation(
                message.content,
                speaker=message.role.value,
                role=Role.USER if message.role == MessageRole.USER else Role.ASSISTANT,
            )
            for message in messages
            if message.content and message.role in (MessageRole.USER, MessageRole.ASSISTANT)
        ]
        if not said:
            return
        memory = await self._client.create_memory(self.memory, exist_ok=True)
        for refused in (await memory.observe_batch(said)).rejected:
            raise refused.error

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """The content without its last recollections: four bytes are about a token."""
        kept = content.encode()[: -4 * tokens_to_truncate].decode(errors="ignore")
        return kept.rpartition("\n")[0] or None
