"""The server's event loop: asyncio's own, which also drains the wake-up socket of gRPC.

grpc.aio's poller thread writes one byte to a socket for each event. The loop's reader handles all available events, but
reads only one byte. If several events arrive in one iteration of a busy loop, bytes are left over. Once they fill the
socket (278 of them on Linux), the poller blocks at every event until the next iteration reads a byte, and so delivers
one event per iteration: calls that the server answered in two iterations waited for 100 to 300 ms.
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
"""Bytes read at once, far more than the socket holds."""


class EventLoop(asyncio.SelectorEventLoop):
    """For `asyncio.Runner(loop_factory=EventLoop)`."""

    def add_reader(self, fd: FileDescriptorLike, callback: Callable[[*Args], Any], *args: *Args) -> None:
        """As in asyncio, but first reads the bytes that gRPC's reader would leave."""
        if isinstance(fd, socket.socket) and _is_poller(callback):
            super().add_reader(fd, _drain_socket, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)


def _is_poller(callback: Callable[..., Any]) -> bool:
    """Whether this is the callback of grpc.aio: `functools.partial(queue._handle_events, loop)`."""
    handler = callback.func if isinstance(callback, functools.partial) else callback
    return type(getattr(handler, "__self__", None)).__name__ == "PollerCompletionQueue"


def _drain_socket(bell: socket.socket, callback: Callable[[*Args], Any], *args: *Args) -> None:
    """Reads all bytes but one, which the callback reads. It must run before the callback: an event precedes its byte,
    so only bytes read earlier surely belong to events that the callback finds."""
    try:
        waiting = len(bell.recv(BYTES_MAX, socket.MSG_PEEK))
    except BlockingIOError:
        return  # another thread's loop has read them
    if waiting > 1:
        bell.recv(waiting - 1)
    callback(*args)
