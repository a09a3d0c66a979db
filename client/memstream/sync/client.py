"""The blocking Client.

Written by scripts/sync_sdk.py: change the asynchronous class, then run `make generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Unpack

import memstream.client
from memstream.answer_values import Answer
from memstream.argument_types import Count, Items, Several
from memstream.arguments import check_methods
from memstream.context import ContextOptions, ContextText
from memstream.listed_values import ConversationSummary
from memstream.policy import PolicyLike, Profile
from memstream.resources import MemoryInfo, Namespace, Operation, ServerInfo, ServerStatus
from memstream.states import State, StateKey, StateScope
from memstream.sync.bases import Connected, Context
from memstream.sync.conversations import Conversation
from memstream.sync.loop import LOOP
from memstream.sync.memory import Memory
from memstream.sync.streams import RecallStream
from memstream.transactions import TransactionResult, TransactionWrite
from memstream.transfer import ExportPart
from memstream.values import Filter, MemoryKind, RecallOptions, Scope, Structured


@check_methods
class Client(Connected):
    """See memstream.Client."""

    def __init__(self, inner: memstream.client.Client) -> None:
        super().__init__(inner)
        self._inner = inner

    def server_info(self) -> ServerInfo:
        """The server's version, models, capabilities and limits."""
        return LOOP.run(self._inner.server_info())

    def server_status(self) -> ServerStatus:
        """What the server uses and does: RAM, disk, calls, settings. Needs the right `admin` in every namespace."""
        return LOOP.run(self._inner.server_status())

    def memory(self, path: str) -> Memory:
        """A handle of the memory `namespace/name`; does not check whether it exists."""
        return Memory(self._inner.memory(path))

    def conversation(self, path: str) -> Conversation:
        """A handle of the conversation `namespace/name`; does not check whether it exists."""
        return Conversation(self._inner.conversation(path))

    def create_memory(
        self,
        path: str,
        *,
        kind: MemoryKind | None = None,
        profile: Profile | None = None,
        policy: PolicyLike | None = None,
        labels: Mapping[str, str] | None = None,
        exist_ok: bool = False,
    ) -> Memory:
        """Creates the memory `namespace/name`, hybrid by default; unset policy fields take the profile's defaults.

        With `exist_ok`, returns an existing memory if its kind, policy fields and labels equal the ones passed
        (arguments that are not passed are not compared). Else raises MemoryExists, whose `details["differs"]` names
        the differences.
        """
        return Memory(
            LOOP.run(
                self._inner.create_memory(
                    path, kind=kind, profile=profile, policy=policy, labels=labels, exist_ok=exist_ok
                )
            )
        )

    def get_memory(self, path: str) -> MemoryInfo:
        """The memory's kind, policy, labels and revision; same as `memory(path).describe()`."""
        return LOOP.run(self._inner.get_memory(path))

    def list_memories(
        self, namespace: str, *, name_prefix: str = "", labels: Mapping[str, str] | None = None, page_size: Count = 0
    ) -> Iterator[MemoryInfo]:
        """A namespace's memories in order of name, optionally only names that begin with `name_prefix`, and only
        memories that have each of `labels` with exactly that value."""
        return LOOP.iterate_from(
            lambda: self._inner.list_memories(namespace, name_prefix=name_prefix, labels=labels, page_size=page_size)
        )

    def list_namespaces(self, *, page_size: Count = 0) -> Iterator[Namespace]:
        """Namespaces that have memories, in order of name."""
        return LOOP.iterate_from(lambda: self._inner.list_namespaces(page_size=page_size))

    def list_conversations(
        self,
        namespace: str,
        *,
        name_prefix: str = "",
        labels: Mapping[str, str] | None = None,
        latest_first: bool = False,
        page_size: Count = 0,
    ) -> Iterator[ConversationSummary]:
        """A namespace's conversations in order of name, or the latest changed first; optionally only names that begin
        with `name_prefix`, and only conversations that have each of `labels` with exactly that value."""
        return LOOP.iterate_from(
            lambda: self._inner.list_conversations(
                namespace, name_prefix=name_prefix, labels=labels, latest_first=latest_first, page_size=page_size
            )
        )

    def get_state(self, namespace: str, scope: StateScope, name: str) -> State:
        """The state document of an app, a user or a session. Raises ConversationNotFound when there is none."""
        return LOOP.run(self._inner.get_state(namespace, scope, name))

    def get_states(self, namespace: str, keys: Items[StateKey]) -> dict[StateKey, State]:
        """State documents in one read, by key: those that exist. Of one moment, unless they are larger than a page
        (2 MiB) together."""
        return LOOP.run(self._inner.get_states(namespace, keys))

    def set_state(
        self,
        namespace: str,
        scope: StateScope,
        name: str,
        document: str,
        *,
        etag: str | None = None,
        absent: bool = False,
    ) -> State:
        """Writes a state document, any JSON as text. Raises EtagMismatch unless `etag` is the present one; with
        `absent`, unless there is none. That of a session creates the conversation if needed."""
        return LOOP.run(self._inner.set_state(namespace, scope, name, document, etag=etag, absent=absent))

    def delete_state(self, namespace: str, scope: StateScope, name: str, *, etag: str = "") -> bool:
        """Deletes a state document, and returns whether there was one. Raises EtagMismatch unless `etag`, if it is not
        empty, is the present one."""
        return LOOP.run(self._inner.delete_state(namespace, scope, name, etag=etag))

    def write_together(
        self, namespace: str, writes: Several[TransactionWrite], *, memory: str = ""
    ) -> tuple[TransactionResult, ...]:
        """Writes messages, conversations, state documents and fragments in one transaction: all or nothing. Returns
        the result of each, in their order.

        memory: the name of the memory of every PutFragment. Raises what the writes raise alone, when the precondition
        of one does not hold.
        """
        return LOOP.run(self._inner.write_together(namespace, writes, memory=memory))

    def erase_user(self, namespace: str, user: str) -> int:
        """Deletes a user's state and the conversations with the label `user` of that value; returns how many these
        were. Nothing of them stays in the server's files."""
        return LOOP.run(self._inner.erase_user(namespace, user))

    def recall(self, scopes: Several[str | Scope], *, session: str = "", partial: bool = False) -> RecallStream:
        """A stream of queries over several memories, each answered by one ranking; also of standing queries. See
        `recall_once`; a prefix and labels select the memories that exist when a query is ranked."""
        return RecallStream(LOOP.make(lambda: self._inner.recall(scopes, session=session, partial=partial)))

    def recall_once(
        self,
        scopes: Several[str | Scope],
        what: str | Structured,
        *,
        session: str = "",
        partial: bool = False,
        **options: Unpack[RecallOptions],
    ) -> Answer:
        """Answers one query over several memories by one ranking: `["user/bob", "team/core"]`, or scopes with weights,
        limits, filters, prefixes or labels. See RecallOptions; `min_revision` is given by scope.

        A memory that does not exist or that you may not recall raises MemoryNotFound or PermissionDenied; with
        `partial` it is left out.
        """
        return LOOP.run(self._inner.recall_once(scopes, what, session=session, partial=partial, **options))

    def context(
        self,
        scopes: Several[str | Scope],
        question: str,
        *,
        conversation: str = "",
        blocks: Several[str] = (),
        budget: Count = 0,
        after: ContextText | bytes | None = None,
        partial: bool = False,
        **options: Unpack[ContextOptions],
    ) -> Context:
        """What an agent sends to its model before a turn: blocks, the end of the conversation, memories, the question,
        within `budget` tokens (default 4,000). See docs/context.md.

        `scopes`: the memories, as in `recall_once`. `blocks`: paths such as "agent/joy#persona". `after`: the context
        of the turn before; the text then begins with its text, so that the model's prompt cache reads it, or
        `broken_by` says why not. `partial`: leaves out what does not exist or may not be recalled.
        """
        return Context(
            LOOP.run(
                self._inner.context(
                    scopes,
                    question,
                    conversation=conversation,
                    blocks=blocks,
                    budget=budget,
                    after=after,
                    partial=partial,
                    **options,
                )
            )
        )

    def delete_memory(self, path: str, *, etag: str = "") -> None:
        """Deletes a memory and all of its content permanently."""
        LOOP.run(self._inner.delete_memory(path, etag=etag))

    def export(
        self, namespace: str, memory: str = "", *, include_vectors: bool = False, filter: Filter | None = None
    ) -> Iterator[ExportPart]:
        """Exports a memory, or a namespace with its conversations, as JSON Lines; see docs/export.md.

        Each memory is a snapshot at one revision. The last line has the type "end"; without it the export is truncated.
        With a filter, it has the matching fragments alone: no conversations, and no links to what it leaves out.
        """
        return LOOP.iterate_from(
            lambda: self._inner.export(namespace, memory, include_vectors=include_vectors, filter=filter)
        )

    def start_reindex(self, *, embed: bool = False, missing: bool = False) -> Operation:
        """Rebuilds the vector index from stored vectors; with `embed` re-embeds all content, with `missing` what has no
        vector. Recalls keep working."""
        return LOOP.run(self._inner.start_reindex(embed=embed, missing=missing))

    def start_purge(self, namespace: str = "", memory: str = "") -> Operation:
        """Erases forgotten fragments past their grace period now; an empty name means all."""
        return LOOP.run(self._inner.start_purge(namespace, memory))

    def operations(self, namespace: str = "", memory: str = "", *, page_size: Count = 0) -> Iterator[Operation]:
        """Operations, newest first; an empty name means all. The server keeps them for 7 days after their end."""
        return LOOP.iterate_from(lambda: self._inner.operations(namespace, memory, page_size=page_size))

    def operation(self, id: str) -> Operation:
        """The state and progress of an operation."""
        return LOOP.run(self._inner.operation(id))

    def cancel_operation(self, id: str) -> Operation:
        """Cancels an operation; completed work is kept."""
        return LOOP.run(self._inner.cancel_operation(id))

    def finished(self, operation: Operation | str, progress: Callable[[Operation], None] | None = None) -> Operation:
        """Waits until an operation (or the operation with this id) ends; reconnects as streams do.

        `progress` is called after every poll. Returns the operation, succeeded or cancelled; raises its error if it
        failed.
        """
        return LOOP.run(self._inner.finished(operation, progress))
