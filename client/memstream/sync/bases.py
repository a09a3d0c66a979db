"""The bases of the blocking classes: what has no asynchronous counterpart of the same form."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar, Unpack

import memstream.any_loop
import memstream.client
import memstream.context
import memstream.recall
import memstream.sent
from memstream.answer_values import Answer
from memstream.argument_types import Items
from memstream.arguments import check_constructor, check_methods
from memstream.kinds import kind_of
from memstream.resources import Operation
from memstream.sync.loop import LOOP
from memstream.transfer import PART_BYTES
from memstream.values import RecallOptions, Structured

Item_co = TypeVar("Item_co", covariant=True)


class _Openable(Protocol):
    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Iterable(Protocol[Item_co]):
    def __aiter__(self) -> AsyncIterator[Item_co]: ...

    async def __anext__(self) -> Item_co: ...

    async def __aenter__(self) -> object: ...

    async def aclose(self) -> None: ...


class _Addressed(Protocol):
    @property
    def path(self) -> str: ...


class Handle:
    """A handle of a resource with a path."""

    def __init__(self, inner: _Addressed) -> None:
        self._addressed = inner

    def __repr__(self) -> str:
        return f"<sync.{type(self).__name__} {self._addressed.path}>"


@check_methods
class Context(memstream.context.ContextText):
    """See memstream.Context."""

    def __init__(self, inner: memstream.context.Context) -> None:
        vars(self).update(vars(inner))
        self._inner = inner

    def record(self, question: str, reply: str, *, memory: str = "") -> None:
        """See memstream.Context.record."""
        LOOP.run(self._inner.record(question, reply, memory=memory))


class Opened:
    """`with` opens the stream; leaving it closes it, or abandons it after an error."""

    def __init__(self, inner: _Openable) -> None:
        self._opened = inner

    def __enter__(self) -> Self:
        LOOP.run(self._opened.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        LOOP.run(self._opened.__aexit__(kind, error, trace))


@check_methods
class OpenedRecall(Opened):
    """A stream of queries. Use several threads, or `submit`, to have many queries in flight."""

    def __init__(self, inner: memstream.recall.RecallStream) -> None:
        super().__init__(inner)
        self._recall = inner

    def submit(self, what: str | Structured, **options: Unpack[RecallOptions]) -> concurrent.futures.Future[Answer]:
        """Sends a query and returns a future of the answer; cancelling it cancels the query."""
        return LOOP.submit(self._recall.query(what, **options))


class Iterated(Generic[Item_co]):
    """A blocking iterator; `with` or iteration opens it, leaving `with` closes it."""

    def __init__(self, inner: _Iterable[Item_co]) -> None:
        self._iterated = inner

    def __enter__(self) -> Self:
        LOOP.run(self._iterated.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Item_co]:
        return LOOP.iterate(self._iterated)

    def close(self) -> None:
        """Closes the iterator; further iteration raises StreamClosed."""
        LOOP.run(self._iterated.aclose())


class Listed(Iterator[Item_co]):
    """An iterator over the pages of a listing."""

    def __init__(self, inner: AsyncIterator[Item_co]) -> None:
        self._items = LOOP.iterate(inner)

    def __next__(self) -> Item_co:
        return next(self._items)


class Sent:
    """A numbered observation that will be delivered; `wait` waits until it is stored."""

    def __init__(self, inner: memstream.sent.Sent) -> None:
        self._inner = inner

    @property
    def sequence(self) -> int:
        """Its number."""
        return self._inner.sequence

    @property
    def done(self) -> bool:
        """Whether it is stored or rejected."""
        return self._inner.done

    def wait(self) -> memstream.sent.Stored:
        """Waits until it is stored; raises the error if it was rejected."""

        async def stored() -> memstream.sent.Stored:
            return await self._inner

        return LOOP.run(stored())


@check_methods
@check_constructor
class Connected:
    """A client: `with` closes it."""

    def __init__(self, inner: memstream.client.Client) -> None:
        self._connected = inner

    @property
    def asynchronous(self) -> memstream.client.Client:
        """The asynchronous client of the same connections: any event loop may use it, also several at once."""
        return memstream.any_loop.use_anywhere(self._connected)

    def __enter__(self) -> Self:
        LOOP.run(self._connected.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and every stream on it."""
        LOOP.run(self._connected.close())

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
            self._connected.import_(namespace, given, memory=memory, request_id=request_id, validate_only=validate_only)
        )


def _join_chunks(chunks: Iterator[bytes]) -> bytes:
    """The next chunks, joined to about the size of a message; empty at the end."""
    part = bytearray()
    for chunk in chunks:
        kind_of(bytes).check("source", chunk)
        part += chunk
        if len(part) >= PART_BYTES:
            break
    return bytes(part)
