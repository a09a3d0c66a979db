"""The SDK for scripts without an event loop: the same names, each call waiting for its answer.

    with memstream.sync.connect("127.0.0.1:7700") as client:
        joy = client.create_memory("comedy/joy", exist_ok=True)
        with joy.observe(producer="joy-1") as stream:
            stream.send("user: My name is Bob")
        print(joy.recall_once("What's my name?")[0].fragment.content)

All clients share one event loop on one background thread (grpc.aio wants one a process); they may be used from any
other thread, and not after a fork. A program that runs an event loop of its own uses the asynchronous SDK.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import memstream.client
from memstream.argument_types import Count, Items, KeepaliveSeconds, Seconds
from memstream.arguments import check_arguments, check_methods
from memstream.backoff import Retry
from memstream.channel import Tls, Token, Tracing
from memstream.kinds import kind_of
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
    """A client of the server at `target`; use it with `with`. Arguments as of memstream.connect."""
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


@check_methods
class Client:
    """See memstream.Client."""

    def __init__(self, inner: memstream.client.Client) -> None:
        self._inner = inner

    @property
    def asynchronous(self) -> memstream.client.Client:
        """The client underneath, for coroutines that run on the background loop (memstream.sync.loop.LOOP) only."""
        return self._inner

    def __enter__(self) -> Self:
        LOOP.run(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and every stream on it."""
        LOOP.run(self._inner.close())

    def server_info(self) -> ServerInfo:
        """What the server is and can do."""
        return LOOP.run(self._inner.server_info())

    def memory(self, path: str) -> Memory:
        """The memory `namespace/name`, without asking whether it exists."""
        return Memory(self._inner.memory(path))

    def conversation(self, path: str) -> Conversation:
        """The conversation `namespace/name`, without asking whether it exists."""
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
        """Makes the memory `namespace/name`; `exist_ok` takes an existing one that has what is given here."""
        return Memory(
            LOOP.run(
                self._inner.create_memory(
                    path, kind=kind, profile=profile, policy=policy, labels=labels, exist_ok=exist_ok
                )
            )
        )

    def get_memory(self, path: str) -> MemoryInfo:
        """The memory as the server has it."""
        return LOOP.run(self._inner.get_memory(path))

    def list_memories(self, namespace: str, *, name_prefix: str = "", page_size: Count = 0) -> Iterator[MemoryInfo]:
        """A namespace's memories by name: those whose name begins with `name_prefix`."""
        return LOOP.iterate(self._inner.list_memories(namespace, name_prefix=name_prefix, page_size=page_size))

    def list_namespaces(self, *, page_size: Count = 0) -> Iterator[Namespace]:
        """Namespaces that have memories, by name."""
        return LOOP.iterate(self._inner.list_namespaces(page_size=page_size))

    def delete_memory(self, path: str, *, etag: str = "") -> None:
        """Deletes a memory and all of its content for good."""
        LOOP.run(self._inner.delete_memory(path, etag=etag))

    def export(self, namespace: str, memory: str = "", *, include_vectors: bool = False) -> Iterator[ExportPart]:
        """Lines of JSON with all of a memory, or of a namespace with its conversations; see docs/export.md."""

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
        """Sends an export (a file, or its bytes) to be imported; wait with `finished`."""

        async def each(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
            # Not on the loop, which would stand still: what makes them may take its time, or use this SDK.
            while part := await asyncio.to_thread(_some, chunks):
                yield part

        given = source if isinstance(source, Path | str) else each(iter(source))
        return LOOP.run(
            self._inner.import_(namespace, given, memory=memory, request_id=request_id, validate_only=validate_only)
        )

    def start_reindex(self, *, embed: bool = False) -> Operation:
        """Rebuilds the vector index from stored vectors, or embeds everything anew, while recalls go on."""
        return LOOP.run(self._inner.start_reindex(embed=embed))

    def start_purge(self, namespace: str = "", memory: str = "") -> Operation:
        """Erases what was forgotten and whose grace has passed, now instead of in time; empty names do not restrict."""
        return LOOP.run(self._inner.start_purge(namespace, memory))

    def operations(self, namespace: str = "", memory: str = "", *, page_size: Count = 0) -> Iterator[Operation]:
        """Pieces of long work, the newest first; empty names do not restrict."""
        return LOOP.iterate(self._inner.operations(namespace, memory, page_size=page_size))

    def operation(self, id: str) -> Operation:
        """How far a piece of long work is."""
        return LOOP.run(self._inner.operation(id))

    def cancel_operation(self, id: str) -> Operation:
        """Asks a piece of long work to end; what it has done stays done."""
        return LOOP.run(self._inner.cancel_operation(id))

    def finished(self, operation: Operation | str, progress: Callable[[Operation], None] | None = None) -> Operation:
        """Waits for the end of a piece of long work; `progress` is called on another thread. Raises its error."""
        return LOOP.run(self._inner.finished(operation, progress))


def _some(chunks: Iterator[bytes]) -> bytes:
    """The next chunks, about as much as a message takes; nothing at their end."""
    part = bytearray()
    for chunk in chunks:
        kind_of(bytes).check("source", chunk)
        part += chunk
        if len(part) >= PART_BYTES:
            break
    return bytes(part)
