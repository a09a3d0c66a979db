"""A bare gRPC echo of Observe and Recall messages, in a separate process like memstream.

Run as a program (`python echo.py PORT_FILE [probed]`), it is that process.
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
from probe import Pause, Probe, longest_pause
from served import cpu_s

from memstream.v1 import stream_service_pb2 as pb

_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0))


async def _echo_requests(
    requests: AsyncIterator[pb.ObserveRequest], context: object
) -> AsyncIterator[pb.ObserveRequest]:
    """Parse each message and send it back."""
    async for request in requests:
        yield request


async def _answer_requests(
    requests: AsyncIterator[pb.RecallRequest], context: object
) -> AsyncIterator[pb.RecallResponse]:
    """The first message's text is the hexadecimal answer to itself and to all later messages."""
    answer: pb.RecallResponse | None = None
    async for request in requests:
        if answer is None:
            answer = pb.RecallResponse.FromString(bytes.fromhex(request.query.text))
        yield answer


def _serialise(message: Message) -> bytes:
    return message.SerializeToString()


async def _serve_echo(port_file: Path, probed: bool) -> None:
    server = grpc.aio.server(options=_OPTIONS)
    stream: Any = grpc.stream_stream_rpc_method_handler  # its type covers threaded handlers only
    handlers = {
        "Observe": stream(_echo_requests, pb.ObserveRequest.FromString, _serialise),
        "Recall": stream(_answer_requests, pb.RecallRequest.FromString, _serialise),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    if probed:
        Probe(port_file.with_suffix(".pauses")).start()
    part = port_file.with_suffix(".part")
    part.write_text(f"127.0.0.1:{port}", "utf-8")
    part.replace(port_file)
    await server.wait_for_termination()


Ask = Callable[[], Awaitable[float]]
"""Send one question, await its answer; returns the seconds between them."""


class EchoServer:
    """The echo in its own process; with `probed`, with the same event-loop probe as the server."""

    def __init__(self, scratch: Path, *, probed: bool = True) -> None:
        self.address = ""
        self._probed = probed
        self._port_file = scratch / "echo.address"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        probed = ["probed"] if self._probed else []
        self._process = subprocess.Popen([sys.executable, __file__, str(self._port_file), *probed])
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

    def longest_pause(self, since: float) -> Pause:
        """The longest event-loop pause from `since` (`time.monotonic()`) until now."""
        return longest_pause(self._port_file.with_suffix(".pauses"), since, time.monotonic())

    async def time_observe(self, streams: Sequence[Sequence[pb.ObserveRequest]]) -> float:
        """Seconds until every message has come back, all streams concurrently."""
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            call_of: Any = channel.stream_stream("/bare.Echo/Observe", _serialise, pb.ObserveRequest.FromString)
            began = time.perf_counter()
            await asyncio.gather(*(_exchange_all(call_of(), messages) for messages in streams))
            return time.perf_counter() - began

    @contextlib.asynccontextmanager
    async def open_answering(self, query: pb.RecallRequest, answer: pb.RecallResponse) -> AsyncIterator[Ask]:
        """Open a stream that sends `query` and receives `answer`, one at a time."""
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            call: Any = channel.stream_stream("/bare.Echo/Recall", _serialise, pb.RecallResponse.FromString)()
            await call.write(pb.RecallRequest(query=pb.RecallQuery(text=answer.SerializeToString().hex())))
            await call.read()
            yield lambda: _time_exchange(call, query)
            call.cancel()

    @contextlib.asynccontextmanager
    async def open_echoing(self, message: pb.ObserveRequest) -> AsyncIterator[Ask]:
        """Open a stream that sends `message` and receives it back, one at a time."""
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            call: Any = channel.stream_stream("/bare.Echo/Observe", _serialise, pb.ObserveRequest.FromString)()
            yield lambda: _time_exchange(call, message)
            call.cancel()


async def _time_exchange(call: Any, message: Message) -> float:
    began = time.perf_counter()
    await call.write(message)
    await call.read()
    return time.perf_counter() - began


async def _exchange_all(call: Any, messages: Sequence[pb.ObserveRequest]) -> None:
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
    asyncio.run(_serve_echo(Path(sys.argv[1]), "probed" in sys.argv[2:]))
