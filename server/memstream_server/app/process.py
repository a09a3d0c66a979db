"""The server process: signals, allocator, garbage collector, event loop, and the lines it prints when it serves."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVarTuple

import structlog

from memstream_server.app.embedders import explain_choice
from memstream_server.app.errors import StartStopped
from memstream_server.app.running import Running, address_written, run_server
from memstream_server.rpc.connections import RESERVED_DESCRIPTORS, raise_descriptor_limit
from memstream_server.settings import Settings

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

log = structlog.get_logger(__name__)

SWITCH_INTERVAL_S = 0.0001
M_ARENA_MAX = -8
"""The parameter's number in malloc.h."""
MALLOC_ARENAS = 2
Args = TypeVarTuple("Args")
BYTES_MAX = 4_096
"""Bytes read at once, far more than the socket holds."""


async def serve(settings: Settings, *, announce: Callable[[str], None]) -> None:
    """Runs until SIGTERM, SIGINT or the end of the last user (`users_file`), then drains.

    Raises StartError, or Unreadable for the data directory.
    """
    # sqlite3 releases the interpreter lock at every row that it steps over. With the default of 5 ms its threads get
    # the lock back too late while the event loop is busy: 574 to 4,012 committed observations a second became 4,700
    # with 0.5 ms.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _tame_allocator()
    log.info("open_files", limit=raise_descriptor_limit(), reserved=RESERVED_DESCRIPTORS)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    if settings.users_file is not None:
        _stop_without_users(settings.users_file, lambda: loop.call_soon_threadsafe(stop.set))
    with contextlib.suppress(StartStopped):
        async with run_server(settings, stop=stop) as server:
            # Imported objects live as long as the process, so the collector need not scan them: there are 120,000. It
            # did so every second while observations came in, and stopped everything for 60 to 280 ms each time. No
            # collection first: it finds 80 objects, 1,300 at a first start, and takes a tenth of the start. No second
            # freeze later: objects of that time may become cycles that the collector must find.
            gc.freeze()
            gc.enable()
            _announce_server(settings, server, announce)
            with address_written(settings, server.address):
                await stop.wait()
            announce("memstream drains and stops")


def _announce_server(settings: Settings, server: Running, announce: Callable[[str], None]) -> None:
    info = server.engine.info()
    announce(f"memstream listens on {server.address}")
    if server.http_url:
        announce(f"  http       {server.http_url}{' (with the console)' if settings.console else ''}")
    announce(f"  data       {settings.data_dir}")
    announce(f"  journal    {info.journal}")
    announce(f"  embedding  {info.embedding.name}, {info.embedding.dimension} dimensions{explain_choice(settings)}")
    announce(f"  importance {info.scorer_model or 'constant 0.5 (no LLM rates it)'}")
    announce(f"  insights   {info.insight_model or 'none (no LLM derives them)'}")
    announce(f"  index      {info.index}")
    if settings.reranker_model_dir is not None:
        announce(f"  reranker   {settings.reranker_model_dir.resolve().name}")


def _stop_without_users(file: Path, stop: Callable[[], object]) -> None:
    """Calls `stop` from a thread when no process holds a shared lock on `file`. Raises OSError if it cannot be opened.

    The kernel counts the users: it releases the lock of a process that is killed. The exclusive lock is kept until this
    process ends, so that a new user sees that this server is ending.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)

    def wait() -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(RuntimeError):  # a signal has ended the event loop before
            stop()

    threading.Thread(target=wait, name="memstream users", daemon=True).start()


def _tame_allocator() -> None:
    """Two heaps for all threads instead of eight a core: memory that one thread frees is of no use to another heap.

    A mixed load on two cores had 15 heaps, a fifth of the process, half empty and never returned.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        mallopt(M_ARENA_MAX, MALLOC_ARENAS)


class EventLoop(asyncio.SelectorEventLoop):
    """asyncio's own, which also drains the wake-up socket of gRPC: for `asyncio.Runner(loop_factory=EventLoop)`.

    grpc.aio's poller thread writes one byte to a socket for each event. The loop's reader handles all available events,
    but reads only one byte. If several events arrive in one iteration of a busy loop, bytes are left over. Once they
    fill the socket (278 of them on Linux), the poller blocks at every event until the next iteration reads a byte, and
    so delivers one event per iteration: calls that the server answered in two iterations waited for 100 to 300 ms.
    """

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
