"""Sends hostile HTTP requests over raw connections and checks every answer."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import struct
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import quote

from tests.support.http_fuzzing import HostileRequest, HttpFuzzer

BAD_CODES = {"internal", "unknown", "data_loss"}
OF_PROTOCOL = "protocol error: sent compressed message"
"""Connect and gRPC demand the code internal for a compressed message of a stream without an encoding."""
STREAMS = ("application/connect+", "application/grpc-web")
SILENCE_S = 0.1
"""A stream or a request that is not whole is left after this much silence."""
CALL_S = 60.0
"""A longer call counts as hung."""
RETURN_CODES_MAX = 505


@dataclass
class HttpReport:
    """The outcome of all requests."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Count by what was wrong and the outcome."""
    rpcs: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return self.outcomes.total()

    def by_outcome(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for (_, outcome), count in self.outcomes.items():
            total[outcome] += count
        return dict(total.most_common())


@dataclass(frozen=True)
class Answer:
    """One HTTP answer. `ended`: whether its body is whole."""

    status: int
    headers: dict[str, str]
    body: bytes
    ended: bool


async def run_hostile(address: str, fuzzer: HttpFuzzer, calls: int, report: HttpReport, at_once: int = 12) -> None:
    """Sends `calls` requests."""
    left = calls

    async def work() -> None:
        nonlocal left
        while left > 0 and len(report.failures) < 20:
            left -= 1
            await _send(address, fuzzer.request(), report)

    await asyncio.gather(*(work() for _ in range(at_once)))


async def _send(address: str, request: HostileRequest, report: HttpReport) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    report.rpcs.add(request.method.name)
    complete = request.whole and not request.method.server_streaming  # a stream may have nothing to send
    try:
        writer.write(request.data)
        answer = await read_answer(reader, CALL_S if complete else SILENCE_S)
    except (ConnectionError, asyncio.IncompleteReadError):
        outcome = "closed"
    except TimeoutError:
        outcome = "left"
        if complete:
            _fail(report, request, "no answer in time")
    else:
        outcome = str(answer.status)
        problem = find_problem(answer)
        if problem:
            _fail(report, request, problem)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    report.outcomes[request.wrong, outcome] += 1


def _fail(report: HttpReport, request: HostileRequest, what: str) -> None:
    report.failures.append(f"{request.method.name}, {request.wrong}: {what}; sent {request.data[:1_500]!r}")


async def read_answer(reader: asyncio.StreamReader, within_s: float) -> Answer:
    """The next answer of a connection. Raises TimeoutError if its head does not arrive in time."""
    head = await _read_head(reader, within_s)
    if head.startswith(b"HTTP/1.1 100"):
        head = await _read_head(reader, within_s)
    line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines if each)}
    body, ended = b"", False
    streamed = headers.get("content-type", "").startswith(STREAMS)
    with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(SILENCE_S if streamed else within_s):
            if "content-length" in headers:
                body = await reader.readexactly(int(headers["content-length"]))
            elif headers.get("transfer-encoding") == "chunked":
                while size := int(await reader.readuntil(b"\r\n"), 16):
                    body += await reader.readexactly(size)
                    await reader.readexactly(2)
                await reader.readexactly(2)
            else:
                body = await reader.read()
            ended = True
    return Answer(int(line.split(" ")[1]), headers, body, ended)


async def _read_head(reader: asyncio.StreamReader, within_s: float) -> bytes:
    """In two halves: if this process was stopped meanwhile, the first one ends before anything is read."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s / 2):
            return await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(within_s / 2):
        return await reader.readuntil(b"\r\n\r\n")


def find_problem(answer: Answer) -> str:
    """What an answer must not be; empty for a sound one."""
    if answer.status == 500 or answer.status > RETURN_CODES_MAX:
        return f"status {answer.status}: {answer.body[:300]!r}"
    if answer.headers.get("grpc-status") in {"2", "13", "15"}:
        return f"grpc-status {answer.headers['grpc-status']}: {answer.headers.get('grpc-message')}"
    kind = answer.headers.get("content-type", "")
    if answer.status != 200 and kind == "application/json" and answer.ended:
        return _problem_of_error(answer.body)
    if answer.status == 200 and (kind.startswith(STREAMS)):
        return _problem_of_stream(answer.body)
    return ""


def _problem_of_error(body: bytes) -> str:
    found = json.loads(body)
    if found["code"] in BAD_CODES and not found.get("message", "").startswith(OF_PROTOCOL):
        return f"code {found['code']}: {found.get('message')}"
    message = found.get("message", "")
    if not message.isprintable() or len(message) > 600:
        return f"message {message!r}"
    return ""


def _problem_of_stream(body: bytes) -> str:
    while len(body) >= 5:
        flag, size = struct.unpack(">BI", body[:5])
        frame, body = body[5 : 5 + size], body[5 + size :]
        if len(frame) < size:
            return ""
        if flag & 1:
            frame = gzip.decompress(frame)
        of_protocol = f"grpc-message: {quote(OF_PROTOCOL)}".encode() in frame
        if (
            flag & 0x80
            and not of_protocol
            and any(f"grpc-status: {code}\r" in frame.decode("latin-1") for code in ("2", "13", "15"))
        ):
            return f"trailers {frame[:300]!r}"
        if flag & 2 and (error := json.loads(frame).get("error")) is not None:
            return _problem_of_error(json.dumps(error).encode())
    return ""
