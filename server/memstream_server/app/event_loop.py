"""The server's event loop: asyncio's own, that empties gRPC's bell each time it hears it.

grpc.aio's poller thread rings once for each event: it writes one byte to a socket. The loop's reader takes all events
there are, and one byte. Where several events come in one turn of a busy loop, bytes are left over; once they fill the
socket (278 of them on Linux) the poller blocks at every event until the next turn has taken one, and so hands on one
event a turn, however many have come: calls waited for 100 to 300 ms that the server answered in two.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

Args = TypeVarTuple("Args")
BYTES_MAX = 4_096
"""Taken at once, far more than fit."""


class EventLoop(asyncio.SelectorEventLoop):
    """For `asyncio.Runner(loop_factory=EventLoop)`."""

    def add_reader(self, fd: FileDescriptorLike, callback: Callable[[*Args], Any], *args: *Args) -> None:
        """As in asyncio; what gRPC's reader would leave is taken before it."""
        if isinstance(fd, socket.socket) and _is_poller(callback):
            super().add_reader(fd, _emptied, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)


def _is_poller(callback: Callable[..., Any]) -> bool:
    """Whether this is grpc.aio's, which gives `functools.partial(queue._handle_events, loop)`."""
    handler = callback.func if isinstance(callback, functools.partial) else callback
    return type(getattr(handler, "__self__", None)).__name__ == "PollerCompletionQueue"


def _emptied(bell: socket.socket, callback: Callable[[*Args], Any], *args: *Args) -> None:
    """Take all bytes but one, which the callback takes. Not after it: an event comes before its byte, so only what is
    taken before the callback looks is surely of events that it finds."""
    try:
        waiting = len(bell.recv(BYTES_MAX, socket.MSG_PEEK))
    except BlockingIOError:
        return  # another thread's loop was quicker
    if waiting > 1:
        bell.recv(waiting - 1)
    callback(*args)
