"""The base of blocking iterators that end when they are closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from memstream.sync.loop import LOOP

Item_co = TypeVar("Item_co", covariant=True)


class _Closable(Protocol[Item_co]):
    """The wrapped asynchronous iterator."""

    def __aiter__(self) -> AsyncIterator[Item_co]: ...

    async def __anext__(self) -> Item_co: ...

    async def __aenter__(self) -> object: ...

    async def aclose(self) -> None: ...


class Iterated(Generic[Item_co]):
    """A blocking iterator; `with` or iteration opens it, leaving `with` closes it."""

    def __init__(self, inner: _Closable[Item_co]) -> None:
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
