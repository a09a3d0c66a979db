"""What the server is compared with: a gRPC echo, a grouped SQLite commit, a numpy scan, a Milvus Lite search.

Run as a program (`python bare.py echo PORT_FILE`) it is the echo server, in a process of its own as memstream is.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio
import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from memstream.v1 import stream_service_pb2 as pb

Floats = npt.NDArray[np.float32]
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
    part = port_file.with_suffix(".part")
    part.write_text(f"127.0.0.1:{port}", "utf-8")
    part.replace(port_file)
    await server.wait_for_termination()


class EchoServer:
    """The echo in a process of its own."""

    def __init__(self, scratch: Path) -> None:
        self.address = ""
        self._port_file = scratch / "echo.address"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen([sys.executable, __file__, "echo", str(self._port_file)])
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

    async def observe(self, streams: Sequence[Sequence[pb.ObserveRequest]]) -> float:
        """Seconds until every message has come back, all streams at once."""
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            call_of: Any = channel.stream_stream("/bare.Echo/Observe", _serialised, pb.ObserveRequest.FromString)
            began = time.perf_counter()
            await asyncio.gather(*(_echoed(call_of(), messages) for messages in streams))
            return time.perf_counter() - began

    async def recall(self, query: pb.RecallRequest, answer: pb.RecallResponse, count: int) -> list[float]:
        """Seconds of each of `count` questions, one at a time."""
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            call: Any = channel.stream_stream("/bare.Echo/Recall", _serialised, pb.RecallResponse.FromString)()
            await call.write(pb.RecallRequest(query=pb.RecallQuery(text=answer.SerializeToString().hex())))
            await call.read()
            seconds = []
            for _ in range(count):
                began = time.perf_counter()
                await call.write(query)
                await call.read()
                seconds.append(time.perf_counter() - began)
            call.cancel()
            return seconds


async def _echoed(call: Any, messages: Sequence[pb.ObserveRequest]) -> None:
    async def write() -> None:
        for message in messages:
            await call.write(message)
        await call.done_writing()

    writing = asyncio.create_task(write())
    for _ in messages:
        await call.read()
    await writing


def committed(file: Path, rows: Sequence[tuple[bytes, bytes]], group: int) -> float:
    """Seconds to commit rows of (observation, vector) `group` at a time, each group on the disk before the next."""
    database = sqlite3.connect(file, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, observation BLOB, vector BLOB)")
        began = time.perf_counter()
        for start in range(0, len(rows), group):
            database.execute("BEGIN IMMEDIATE")
            database.executemany("INSERT INTO rows (observation, vector) VALUES (?, ?)", rows[start : start + group])
            database.execute("COMMIT")
        return time.perf_counter() - began
    finally:
        database.close()


def scanned(matrix: Floats, queries: Floats, limit: int) -> list[float]:
    """Seconds of each exact search of one memory's vectors for the `limit` nearest."""
    seconds = []
    for query in queries:
        began = time.perf_counter()
        cosines = matrix @ query
        nearest = np.argpartition(-cosines, min(limit, len(cosines) - 1))[:limit]
        nearest[np.argsort(-cosines[nearest])]
        seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    asyncio.run(_serve(Path(sys.argv[2])))
