"""The blocking SDK, for scripts without an event loop: the same names, and each call waits for its answer.

    with memstream.sync.connect("127.0.0.1:7700") as client:
        joy = client.create_memory("comedy/joy", exist_ok=True)
        with joy.observe(producer="joy-1") as stream:
            stream.send("user: My name is Bob")
        print(joy.recall_once("What's my name?")[0].fragment.content)

All clients share one event loop on one background thread (grpc.aio supports one per process); they may be used from any
other thread, but not after a fork. A program with its own event loop uses the asynchronous SDK.

Modules:
memory: Memory and its fragment listing.
streams: the Observe, Recall and Watch streams, and standing queries.
conversations: conversations and their watch.
iterated: the base of blocking iterators.
loop: the background event loop.
agent: AgentMemory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import memstream.client
from memstream.any_loop import use_anywhere
from memstream.argument_types import Count, Items, KeepaliveSeconds, LocalSetting, Seconds
from memstream.arguments import check_arguments, check_methods
from memstream.backoff import Retry
from memstream.channel import Tls, Token, Tracing
from memstream.kinds import kind_of
from memstream.local_client import client_of, local_server
from memstream.policy import PolicyLike, Profile
from memstream.resources import MemoryInfo, Namespace, Operation, ServerInfo
from memstream.sync.conversations import Conversation, ConversationWatch
from memstream.sync.loop import LOOP
from memstream.sync.memory import FragmentListing, Memory
from memstream.sync.streams import ObserveStream, RecallStream, Sent, StandingQuery, Watch
from memstream.transfer import PART_BYTES, ExportPart
from memstream.values import MemoryKind

__all__ = [
    "Client",
    "Conversation",
    "ConversationWatch",
    "FragmentListing",
    "Memory",
    "ObserveStream",
    "RecallStream",
    "Sent",
    "StandingQuery",
    "Watch",
    "connect",
    "local",
]


@check_arguments
def connect(
    target: str,
    *,
    token: Token | None = None,
    tls: Tls | None = None,
    timeout_s: Seconds = 30.0,
    retry: Retry | None = None,
    keepalive_s: KeepaliveSeconds = 60.0,
    receive_bytes_max: Count = 64 << 20,
    options: Sequence[tuple[str, str | int]] = (),
    tracing: Tracing | None = None,
) -> Client:
    """A client of the server at `target`; use it with `with`. The arguments are those of memstream.connect."""
    return Client(
        memstream.client.connect(
            target,
            token=token,
            tls=tls,
            timeout_s=timeout_s,
            retry=retry,
            keepalive_s=keepalive_s,
            receive_bytes_max=receive_bytes_max,
            options=options,
            tracing=tracing,
        )
    )


def local(
    path: str | Path,
    *,
    timeout_s: Seconds = 30.0,
    retry: Retry | None = None,
    tracing: Tracing | None = None,
    start_timeout_s: Seconds = 30.0,
    **settings: LocalSetting,
) -> Client:
    """A client of the server of the data directory `path`, which is found or started; use it with `with`.

    The arguments and errors are those of memstream.local.
    """
    kind_of(Seconds).check("timeout_s", timeout_s)
    server = local_server(path, start_timeout_s, settings)
    server.open()
    return Client(client_of(server, timeout_s, retry, tracing))


@check_methods
class Client:
    """See memstream.Client."""

    def __init__(self, inner: memstream.client.Client) -> None:
        self._inner = inner

    @property
    def asynchronous(self) -> memstream.client.Client:
        """The asynchronous client of the same connections: any event loop may use it, also several at once."""
        return use_anywhere(self._inner)

    def __enter__(self) -> Self:
        LOOP.run(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and every stream on it."""
        LOOP.run(self._inner.close())

    def server_info(self) -> ServerInfo:
        """The server's version, models, capabilities and limits."""
        return LOOP.run(self._inner.server_info())

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
        """Creates the memory `namespace/name`; `exist_ok` returns an existing one that equals the arguments passed."""
        return Memory(
            LOOP.run(
                self._inner.create_memory(
                    path, kind=kind, profile=profile, policy=policy, labels=labels, exist_ok=exist_ok
                )
            )
        )

    def get_memory(self, path: str) -> MemoryInfo:
        """The memory's kind, policy, labels and revision."""
        return LOOP.run(self._inner.get_memory(path))

    def list_memories(
        self,
        namespace: str,
        *,
        name_prefix: str = "",
        labels: Mapping[str, str] | None = None,
        page_size: Count = 0,
    ) -> Iterator[MemoryInfo]:
        """A namespace's memories in order of name, optionally only names that begin with `name_prefix`, and only
        memories that have each of `labels` with exactly that value.
        """
        return LOOP.iterate(
            self._inner.list_memories(namespace, name_prefix=name_prefix, labels=labels, page_size=page_size)
        )

    def list_namespaces(self, *, page_size: Count = 0) -> Iterator[Namespace]:
        """Namespaces that have memories, in order of name."""
        return LOOP.iterate(self._inner.list_namespaces(page_size=page_size))

    def delete_memory(self, path: str, *, etag: str = "") -> None:
        """Deletes a memory and all of its content permanently."""
        LOOP.run(self._inner.delete_memory(path, etag=etag))

    def export(self, namespace: str, memory: str = "", *, include_vectors: bool = False) -> Iterator[ExportPart]:
        """Exports a memory, or a namespace with its conversations, as JSON Lines; see docs/export.md."""

        async def make() -> AsyncIterator[ExportPart]:
            return self._inner.export(namespace, memory, include_vectors=include_vectors)

        return LOOP.iterate(LOOP.run(make()))

    def import_(
        self,
        namespace: str,
        source: Path | str | Items[bytes],
        *,
        memory: str = "",
        request_id: str = "",
        validate_only: bool = False,
    ) -> Operation:
        """Uploads an export (a file, or its bytes) and starts the import; wait for it with `finished`."""

        async def each(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
            # In a thread: the iterator may block, or call this SDK, and would stop the event loop.
            while part := await asyncio.to_thread(_join_chunks, chunks):
                yield part

        given = source if isinstance(source, Path | str) else each(iter(source))
        return LOOP.run(
            self._inner.import_(namespace, given, memory=memory, request_id=request_id, validate_only=validate_only)
        )

    def start_reindex(self, *, embed: bool = False, missing: bool = False) -> Operation:
        """Rebuilds the vector index from stored vectors; with `embed` re-embeds all content, with `missing` what has no
        vector. Recalls keep working.
        """
        return LOOP.run(self._inner.start_reindex(embed=embed, missing=missing))

    def start_purge(self, namespace: str = "", memory: str = "") -> Operation:
        """Erases forgotten fragments past their grace period now; an empty name means all."""
        return LOOP.run(self._inner.start_purge(namespace, memory))

    def operations(self, namespace: str = "", memory: str = "", *, page_size: Count = 0) -> Iterator[Operation]:
        """Operations, newest first; an empty name means all."""
        return LOOP.iterate(self._inner.operations(namespace, memory, page_size=page_size))

    def operation(self, id: str) -> Operation:
        """The state and progress of an operation."""
        return LOOP.run(self._inner.operation(id))

    def cancel_operation(self, id: str) -> Operation:
        """Cancels an operation; completed work is kept."""
        return LOOP.run(self._inner.cancel_operation(id))

    def finished(self, operation: Operation | str, progress: Callable[[Operation], None] | None = None) -> Operation:
        """Waits until an operation ends; `progress` is called on another thread. Raises the operation's error."""
        return LOOP.run(self._inner.finished(operation, progress))


def _join_chunks(chunks: Iterator[bytes]) -> bytes:
    """The next chunks, joined to about the size of a message; empty at the end."""
    part = bytearray()
    for chunk in chunks:
        kind_of(bytes).check("source", chunk)
        part += chunk
        if len(part) >= PART_BYTES:
            break
    return bytes(part)
