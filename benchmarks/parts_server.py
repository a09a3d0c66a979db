"""All parts of an observation, or of a recall, in one bare gRPC server: what they cost together, in caches that the
others have used meanwhile.

Run as a program (`python parts_server.py PORT_FILE ...`), it is that server's process.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio
from google.protobuf.message import Message
from parts import Commits, ObservationParts, RecallParts, make_fragments
from recalls import Texts
from served import cpu_s

from memstream.v1 import stream_service_pb2 as pb

START_MAX_S = 60.0
_OBSERVE, _RECALL = "observe", "recall"
_SERVICE, _METHOD = "bare.Parts", "Call"
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0))


class PartsServer:
    """The server in its own process; made by `observing` or `recalling`."""

    def __init__(self, scratch: Path, *arguments: str) -> None:
        self._port_file = scratch / "parts.address"
        self._port_file.unlink(missing_ok=True)
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    @classmethod
    def observing(cls, scratch: Path, served: Path, memory: str, count: int, group: int) -> Self:
        """Answers each batch of a stream of ObserveRequest, and commits `count` rows of a memory in the database
        `served`, `group` per transaction.
        """
        return cls(scratch, _OBSERVE, str(served), memory, str(count), str(group))

    @classmethod
    def recalling(cls, scratch: Path, texts: Texts, answer: pb.RecallResponse) -> Self:
        """Answers each query of a stream of RecallRequest with `answer`. Its query_id is the place of its memory in
        `texts`.
        """
        (scratch / "answer").write_bytes(answer.SerializeToString())
        (scratch / "texts").write_text("\n\n".join("\n".join(each) for each in texts.sentences), "utf-8")
        return cls(scratch, _RECALL)

    def __enter__(self) -> Self:
        # As in memstream: numpy's threads slow down small searches.
        single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(self._port_file), *self._arguments]
        self._process = subprocess.Popen(command, env=os.environ | single)
        until = time.monotonic() + START_MAX_S
        while not self._port_file.exists():
            if self._process.poll() is not None or time.monotonic() > until:
                self.__exit__(None, None, None)
                raise RuntimeError("the server of the parts did not start")
            time.sleep(0.02)
        self.address = self._port_file.read_text("utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def measure(self, warming: Sequence[Message], messages: Sequence[Message], at_once: int) -> float:
        """CPU seconds of the server for `messages`, at most `at_once` in flight, after those that warm it up."""
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            call: Any = channel.stream_stream(f"/{_SERVICE}/{_METHOD}", _serialize)()
            await _exchange_all(call, warming, at_once)
            before = self._cpu_s()
            await _exchange_all(call, messages, at_once)
            used_s = self._cpu_s() - before
            call.cancel()
            return used_s

    def _cpu_s(self) -> float:
        assert self._process is not None
        return cpu_s(self._process.pid)


async def _exchange_all(call: Any, messages: Sequence[Message], at_once: int) -> None:
    """Each message has one answer."""
    for number, message in enumerate(messages):
        await call.write(message)
        if number >= at_once - 1:
            await call.read()
    for _ in range(min(at_once - 1, len(messages))):
        await call.read()


class _Observing:
    """Takes each batch, and answers it when it is decided; commits in a thread, so that fsync does not block the event
    loop.
    """

    def __init__(self, commits: Commits, group: int) -> None:
        self._parts, self._commits, self._group = ObservationParts(), commits, group
        self._thread = ThreadPoolExecutor(1)

    async def handle(
        self, requests: AsyncIterator[pb.ObserveRequest], _context: object
    ) -> AsyncIterator[pb.ObserveResponse]:
        waiting, loop = 0, asyncio.get_running_loop()
        async for request in requests:
            fragments = make_fragments(request.batch)
            self._parts.take(fragments)
            waiting += len(fragments)
            if waiting >= self._group:
                await loop.run_in_executor(self._thread, self._commits.commit_next, waiting)
                waiting = 0
            yield pb.ObserveResponse(ack=pb.Ack(received=fragments[-1].position, stored=fragments[-1].position))


class _Recalling:
    """Answers each query."""

    def __init__(self, parts: RecallParts) -> None:
        self._parts = parts

    async def handle(
        self, requests: AsyncIterator[pb.RecallRequest], _context: object
    ) -> AsyncIterator[pb.RecallResponse]:
        async for request in requests:
            yield self._parts.answer(int(request.query.query_id), request.query.text)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _make_handler(port_file: Path, what: str, given: list[str]) -> Any:
    stream: Any = grpc.stream_stream_rpc_method_handler  # its type covers threaded handlers only
    if what == _OBSERVE:
        served, memory, count, group = given
        file = port_file.with_suffix(".db")
        file.unlink(missing_ok=True)
        observing = _Observing(Commits(Path(served), memory, int(count), file), int(group))
        return stream(observing.handle, pb.ObserveRequest.FromString, _serialize)
    answer = pb.RecallResponse.FromString(port_file.with_name("answer").read_bytes())
    sentences = port_file.with_name("texts").read_text("utf-8").split("\n\n")
    recalling = _Recalling(RecallParts(Texts([each.split("\n") for each in sentences]), answer))
    return stream(recalling.handle, pb.RecallRequest.FromString, _serialize)


async def _serve(port_file: Path, what: str, given: list[str]) -> None:
    server = grpc.aio.server(options=_OPTIONS)
    handlers = {_METHOD: _make_handler(port_file, what, given)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    part = port_file.with_suffix(".part")
    part.write_text(f"127.0.0.1:{port}", "utf-8")
    part.replace(port_file)
    await server.wait_for_termination()


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
