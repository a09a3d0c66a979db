"""A bare gRPC echo of Observe and Recall messages, in a process of its own as memstream is.

Run as a program (`python echo.py PORT_FILE`) it is that process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio
from google.protobuf.message import Message
from probe import Pause, Probe, longest
from served import cpu_s

from memstream.v1 import stream_service_pb2 as pb

_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0))


async def _echo(requests: AsyncIterator[pb.ObserveRequest], context: object) -> AsyncIterator[pb.ObserveRequest]:
    """Parses what comes and sends it back."""
    async for request in requests:
        yield request


async def _answer(requests: AsyncIterator[pb.RecallRequest], context: object) -> AsyncIterator[pb.RecallResponse]:
    """The first message's text is, in hexadecimal, the answer to it and to all others."""
    answer: pb.RecallResponse | None = None
    async for request in requests:
        if answer is None:
            answer = pb.RecallResponse.FromString(bytes.fromhex(request.query.text))
        yield answer


def _serialised(message: Message) -> bytes:
    return message.SerializeToString()


async def _serve(port_file: Path) -> None:
    server = grpc.aio.server(options=_OPTIONS)
    stream: Any = grpc.stream_stream_rpc_method_handler  # typed for the handlers of threads only
    handlers = {
        "Observe": stream(_echo, pb.ObserveRequest.FromString, _serialised),
        "Recall": stream(_answer, pb.RecallRequest.FromString, _serialised),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    Probe(port_file.with_suffix(".pauses")).start()
    part = port_file.with_suffix(".part")
    part.write_text(f"127.0.0.1:{port}", "utf-8")
    part.replace(port_file)
    await server.wait_for_termination()


Ask = Callable[[], Awaitable[float]]
"""One question and its answer; the seconds between them."""


class EchoServer:
    """The echo in a process of its own, with the same probe in its event loop as the server has."""

    def __init__(self, scratch: Path) -> None:
        self.address = ""
        self._port_file = scratch / "echo.address"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen([sys.executable, __file__, str(self._port_file)])
        until = time.monotonic() + 60
        while not self._port_file.exists():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the echo server did not start")
            time.sleep(0.02)
        self.address = self._port_file.read_text("utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def cpu_s(self) -> float:
        """CPU seconds used so far."""
        assert self._process is not None
        return cpu_s(self._process.pid)

    def pause(self, since: float) -> Pause:
        """The longest of its event loop from that moment (`time.monotonic()`) until now."""
        return longest(self._port_file.with_suffix(".pauses"), since, time.monotonic())

    async def observe(self, streams: Sequence[Sequence[pb.ObserveRequest]]) -> float:
        """Seconds until every message has come back, all streams at once."""
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            call_of: Any = channel.stream_stream("/bare.Echo/Observe", _serialised, pb.ObserveRequest.FromString)
            began = time.perf_counter()
            await asyncio.gather(*(_echoed(call_of(), messages) for messages in streams))
            return time.perf_counter() - began

    @contextlib.asynccontextmanager
    async def answering(self, query: pb.RecallRequest, answer: pb.RecallResponse) -> AsyncIterator[Ask]:
        """A stream on which to ask that question, and get that answer, one at a time."""
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            call: Any = channel.stream_stream("/bare.Echo/Recall", _serialised, pb.RecallResponse.FromString)()
            await call.write(pb.RecallRequest(query=pb.RecallQuery(text=answer.SerializeToString().hex())))
            await call.read()
            yield lambda: _asked(call, query)
            call.cancel()

    @contextlib.asynccontextmanager
    async def echoing(self, message: pb.ObserveRequest) -> AsyncIterator[Ask]:
        """A stream on which to send that message and get it back, one at a time."""
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            call: Any = channel.stream_stream("/bare.Echo/Observe", _serialised, pb.ObserveRequest.FromString)()
            yield lambda: _asked(call, message)
            call.cancel()


async def _asked(call: Any, message: Message) -> float:
    began = time.perf_counter()
    await call.write(message)
    await call.read()
    return time.perf_counter() - began


async def _echoed(call: Any, messages: Sequence[pb.ObserveRequest]) -> None:
    async def write() -> None:
        for message in messages:
            await call.write(message)
        await call.done_writing()

    writing = asyncio.create_task(write())
    for _ in messages:
        await call.read()
    await writing


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    asyncio.run(_serve(Path(sys.argv[1])))
