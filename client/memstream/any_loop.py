"""Makes a client usable from any event loop: what it awaits runs on the background loop of memstream.sync.

A handle gets a subclass of its class in which every public coroutine, iteration and `async with` is sent to that loop.
The handles that it returns get one, too, so all that comes from such a client behaves alike. On the background loop
itself nothing is sent.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Generator
from typing import Any, TypeVar

from memstream.errors import StreamClosed
from memstream.status import task_is_cancelled
from memstream.sync.loop import LOOP

T = TypeVar("T")
HANDLES = (
    "blocks.BlockWatch",
    "blocks.Blocks",
    "client.Client",
    "context.Context",
    "conversations.Conversation",
    "conversation_watch.ConversationWatch",
    "fragment_listing.FragmentListing",
    "memory.Memory",
    "observe.ObserveStream",
    "recall.RecallStream",
    "sent.Sent",
    "standing.StandingQuery",
    "watch.Watch",
)
"""Classes of the package whose objects belong to one event loop, by name: their modules import this one."""
_made: dict[type[Any], type[Any]] = {}
_SPECIAL = ("__aenter__", "__aexit__", "__anext__")


async def run_on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` on the background loop and waits for it, from any event loop. Cancelling the wait cancels it."""
    if LOOP.is_current():
        return await work
    try:
        return await asyncio.wrap_future(LOOP.submit(work))
    except asyncio.CancelledError:
        if task_is_cancelled():
            raise
        raise StreamClosed("the client was closed during the call") from None


def use_anywhere(handle: T) -> T:
    """The handle, which every event loop may use from now on."""
    kind: type[Any] = type(handle)
    if kind not in _made.values() and _is_handle(handle):
        if kind not in _made:
            _made[kind] = _make_class(kind)
        handle.__class__ = _made[kind]
    return handle


def _is_handle(value: object) -> bool:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("memstream.") in HANDLES


def _make_class(kind: type[Any]) -> type[Any]:
    sent: dict[str, Any] = {"__slots__": (), "__module__": kind.__module__, "__doc__": kind.__doc__}
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        if isinstance(member, property) and member.fget is not None and not name.startswith("_"):
            sent[name] = property(_send_results(member.fget), doc=member.__doc__)
        if not inspect.isfunction(member) or (name.startswith("_") and name not in _SPECIAL):
            continue
        sent[name] = _send_coroutine(member) if inspect.iscoroutinefunction(member) else _send_results(member)
    if hasattr(kind, "__await__"):
        sent["__await__"] = _send_await(kind.__await__)
    return type(kind.__name__, (kind,), sent)


def _send_coroutine(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def sent(*arguments: Any, **named: Any) -> Any:
        if LOOP.is_current():
            return use_anywhere(await method(*arguments, **named))
        caller = asyncio.get_running_loop()
        brought = [_bring(each, caller) for each in arguments]
        work = method(*brought, **{name: _bring(each, caller) for name, each in named.items()})
        return use_anywhere(await run_on_loop(work))

    return sent


def _send_results(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        if _is_handle(result):
            return use_anywhere(result)
        return _SentItems(result) if isinstance(result, AsyncIterator) else result

    return called


def _send_await(start: Callable[[Any], Generator[Any, None, Any]]) -> Callable[[Any], Generator[Any, None, Any]]:
    def await_handle(handle: Any) -> Generator[Any, None, Any]:
        async def wait() -> Any:
            return await _Awaited(lambda: start(handle))

        return run_on_loop(wait()).__await__()

    return await_handle


class _Awaited:
    """An awaitable of a function that starts it."""

    def __init__(self, start: Callable[[], Generator[Any, None, Any]]) -> None:
        self._start = start

    def __await__(self) -> Generator[Any, None, Any]:
        return self._start()


class _SentItems(AsyncIterator[Any]):
    """An asynchronous iterator that runs on the background loop."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items = items

    async def __anext__(self) -> Any:
        async def take() -> Any:
            return await anext(self._items)

        return use_anywhere(await run_on_loop(take()))

    async def aclose(self) -> None:
        """Ends the iteration."""
        if (close := getattr(self._items, "aclose", None)) is not None:
            await run_on_loop(close())


class _BroughtItems(AsyncIterator[Any]):
    """An asynchronous iterable of the caller, which stays on the caller's loop."""

    def __init__(self, items: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._items = items.__aiter__()
        self._loop = loop

    async def __anext__(self) -> Any:
        found = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._take(), self._loop))
        if not found:
            raise StopAsyncIteration
        return found[0]

    async def _take(self) -> list[Any]:
        # StopAsyncIteration cannot be the result of a future.
        try:
            return [await anext(self._items)]
        except StopAsyncIteration:
            return []


def _bring(argument: Any, caller: asyncio.AbstractEventLoop) -> Any:
    is_theirs = isinstance(argument, AsyncIterable) and not _is_handle(argument)
    return _BroughtItems(argument, caller) if is_theirs else argument
