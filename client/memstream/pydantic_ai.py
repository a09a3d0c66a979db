"""A conversation store of Pydantic AI on a memstream server.

A conversation is one of a namespace: each entry is a message with the entry's id as its client id, the record is the
state document. Entries of a branch that the conversation left stay in it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence

from memstream.client import Client
from memstream.conversation_values import NewMessage
from memstream.conversations import Conversation
from memstream.errors import ConversationNotFound, EtagMismatch, MemoryExists
from memstream.frameworks import AnyClient, asynchronous, framework, split_for_calls
from memstream.names import memory_name
from memstream.states import StateScope
from memstream.transactions import (
    AppendMessages,
    DeleteConversation,
    DeleteState,
    SetState,
    TransactionWrite,
    UpdateConversation,
)

with framework("pydantic-ai-slim"):
    from pydantic import TypeAdapter
    from pydantic_ai import ModelMessagesTypeAdapter
    from pydantic_ai.conversation_store import (
        ConversationConflict,
        ConversationEntry,
        ConversationRecord,
        ConversationStore,
    )

_RECORDS: TypeAdapter[ConversationRecord] = TypeAdapter(ConversationRecord)
"""A record whose conversation is about to be deleted: a save at the same time then fails."""
KNOWN_MAX = 10_000
"""Entries of which a store remembers the conversation: those that its last records named."""


class MemstreamConversationStore(ConversationStore):
    """A `ConversationStore` in the namespace `namespace`.

    client: blocking, or asynchronous with `any_loop=True`, because `run_sync` has an event loop of its own.

    The scope of a conversation is its label `user`: `erase_user` deletes the conversations of a scope. A fork has
    copies of the entries that it shares: deleting a conversation deletes its entries, and takes nothing from a fork.

    Raises ConversationConflict as other stores do; otherwise a MemstreamError.
    """

    def __init__(self, client: AnyClient, namespace: str = "agents") -> None:
        self._client: Client = asynchronous(client)
        self._namespace = namespace
        self._known: OrderedDict[str, str] = OrderedDict()

    async def read_record(self, conversation_id: str) -> ConversationRecord | None:
        """The record of a conversation; None if there is none."""
        return (await self._find_record(memory_name(conversation_id)))[0]

    async def read_records(self, *, scope: str | None = None, limit: int | None = None) -> Sequence[ConversationRecord]:
        """The records, or those of a scope, the latest saved first."""
        labels = None if scope is None else {"user": scope}
        listed = self._client.list_conversations(self._namespace, labels=labels, latest_first=True)
        found: list[ConversationRecord] = []
        async for each in listed:
            if limit is not None and len(found) >= limit:
                break
            record, _ = await self._find_record(each.name)
            if record is not None:
                found.append(record)
        return sorted(found, key=lambda record: record.updated_at, reverse=True)

    async def write_record(
        self,
        record: ConversationRecord,
        *,
        new_entries: Sequence[ConversationEntry] = (),
        expected_revision: str | None,
    ) -> None:
        """Stores a record with its new entries, in one transaction."""
        id_ = record.conversation_id
        talk = self._talk(memory_name(id_))
        stored, etag = await self._find_record(talk.name)
        if (None if stored is None else stored.revision) != expected_revision:
            raise ConversationConflict(id_)
        heads = {entry.id for entry in new_entries} | {None if stored is None else stored.head_id, None}
        if record.head_id not in heads and not await self._has_entry(talk, record.head_id):
            if stored is not None or not await self._copy_history(record, talk):
                raise ConversationConflict(id_)
            _, etag = await self._find_record(talk.name)
        messages = [_write_entry(entry) for entry in new_entries]
        *first, last = await split_for_calls(self._client, messages) or [[]]
        labels = {"user": record.scope} if record.scope else {}
        writes: list[TransactionWrite] = [UpdateConversation(talk.name, labels, create=True)]
        if last:
            writes.append(AppendMessages(talk.name, last))
        document = _RECORDS.dump_json(record).decode()
        writes.append(SetState(StateScope.SESSION, talk.name, document, etag, absent=etag is None))
        try:
            for part in first:  # entries before their record: no history reaches them yet
                await talk.append_messages(part)
            await self._client.write_together(self._namespace, writes)
        except EtagMismatch:
            raise ConversationConflict(id_) from None
        self._remember(record)

    async def delete_record(self, conversation_id: str, *, expected_revision: str) -> None:
        """Deletes a conversation with all of its entries."""
        talk = self._talk(memory_name(conversation_id))
        stored, etag = await self._find_record(talk.name)
        if stored is None or stored.revision != expected_revision:
            raise ConversationConflict(conversation_id)
        try:
            gone = DeleteState(StateScope.SESSION, talk.name, etag or "")
            await self._client.write_together(self._namespace, [gone, DeleteConversation(talk.name)])
        except (ConversationNotFound, EtagMismatch):
            raise ConversationConflict(conversation_id) from None

    async def read_history(self, head_id: str | None, *, limit: int | None = None) -> list[ConversationEntry]:
        """The entries up to one, in order, or the latest of them.

        Raises LookupError if it is in no conversation that this store has read.
        """
        if head_id is None or limit == 0:
            return []
        entries: list[ConversationEntry] = []
        wanted: str | None = head_id
        # An entry comes after its parent: one pass from the newest finds all.
        async for message in self._talk(self._known[head_id]).messages(newest_first=True):
            if message.client_id == wanted:
                entries.append(_read_entry(message.client_id, message.body or ""))
                wanted = entries[-1].parent_id
                if wanted is None or len(entries) == limit:
                    return entries[::-1]
        raise LookupError(f"entry {wanted} is not stored")

    async def read_entry(self, entry_id: str) -> ConversationEntry:
        """One entry. Raises LookupError as `read_history`."""
        return (await self.read_history(entry_id, limit=1))[0]

    def _talk(self, name: str) -> Conversation:
        return self._client.conversation(f"{self._namespace}/{name}")

    async def _find_record(self, name: str) -> tuple[ConversationRecord | None, str | None]:
        """The record and its etag."""
        try:
            state = await self._client.get_state(self._namespace, StateScope.SESSION, name)
        except ConversationNotFound:
            return None, None
        found = json.loads(state.document)
        id_ = found.get("conversation_id") if isinstance(found, dict) else None
        # Copied with a history and not yet replaced, or of another program.
        if not isinstance(id_, str) or memory_name(id_) != name:
            return None, state.etag
        record = _RECORDS.validate_python(found)
        self._remember(record)
        return record, state.etag

    def _remember(self, record: ConversationRecord) -> None:
        for entry in (*record.branches, record.head_id):
            if entry is not None:
                self._known[entry] = memory_name(record.conversation_id)
                self._known.move_to_end(entry)
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    async def _find_number(self, talk: Conversation, entry_id: str | None) -> int:
        """The number of an entry's message; 0 if it is not there."""
        try:
            return (await talk.message(client_id=entry_id)).number if entry_id else 0
        except ConversationNotFound:
            return 0

    async def _has_entry(self, talk: Conversation, entry_id: str | None) -> bool:
        return await self._find_number(talk, entry_id) > 0

    async def _copy_history(self, record: ConversationRecord, talk: Conversation) -> bool:
        """Copies what a fork shares; False if it is gone."""
        source = self._talk(memory_name(record.forked_from or record.conversation_id))
        number = await self._find_number(source, record.head_id)
        if not number:
            return False
        try:
            await source.fork(talk.name, number)
        except (ConversationNotFound, MemoryExists):
            return False
        return True


def _write_entry(entry: ConversationEntry) -> NewMessage:
    (message,) = json.loads(ModelMessagesTypeAdapter.dump_json([entry.message]))
    body = json.dumps({"parent_id": entry.parent_id, "message": message})
    role = "user" if entry.message.kind == "request" else "assistant"
    return NewMessage(role=role, client_id=entry.id, body=body)


def _read_entry(id_: str, body: str) -> ConversationEntry:
    found = json.loads(body)
    (message,) = ModelMessagesTypeAdapter.validate_python([found["message"]])
    return ConversationEntry(id=id_, parent_id=found["parent_id"], message=message)
