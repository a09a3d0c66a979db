"""Sends many concurrent fuzzed calls to a server and checks every answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from memstream_server.rpc.errors import CODES, DOMAIN, RULES
from tests.access.calls import path_of
from tests.support.contract import METHODS
from tests.support.fuzzing import Fuzzer, parse_answer

CALL_S = 120.0
"""A longer call counts as hung. Calls that may wait until their deadline get a short one."""
WAITING = {"RecallOnce": 1.0}
STREAM_S = 0.05
"""A stream is abandoned after this much silence."""
CLIENT_ERRORS = ("Internal error from Core", "Failed to serialize")
"""Errors of the client library itself, when it was still writing after the server ended the call."""
CALL_WEIGHTS = {
    "StartReindex": 0.02,
    "EraseFragments": 0.05,
    "ImportMemories": 0.3,
    "ExportMemories": 0.3,
    "StartPurge": 0.1,
}
CALL_WEIGHTS |= {"DeleteMemory": 0.05, "ReflectMemory": 0.3, "ClearMemory": 0.1}
BAD = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
NOT_OF_CLIENTS = {"INTERNAL", "STORAGE_FULL", "MODEL_UNAVAILABLE", "SHUTTING_DOWN", "OWNER_UNAVAILABLE"}
"""Reasons that no request may cause on a healthy server."""


@dataclass
class Caller:
    """A caller: its generator, its credentials, and texts that no answer to it may contain."""

    fuzzer: Fuzzer
    token: str = ""
    foreign: tuple[bytes, ...] = ()


@dataclass
class Report:
    """The outcome of all calls."""

    codes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Count by rpc, code and reason."""
    failures: list[str] = field(default_factory=list)
    texts: Counter[str] = field(default_factory=Counter)
    """Messages of unavailability errors."""

    @property
    def calls(self) -> int:
        return self.codes.total()

    def by_code(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for (_, code, _), count in self.codes.items():
            total[code] += count
        return dict(total.most_common())

    def fail(self, what: str, method: MethodDescriptor, sent: Sequence[bytes]) -> None:
        self.failures.append(f"{method.name}: {what}; sent {[each[:400].hex() for each in sent[:6]]}")


async def run_calls(address: str, callers: Sequence[Caller], calls: int, report: Report, at_once: int = 24) -> None:
    """Make `calls` calls, each caller on its own channel."""
    weights = [CALL_WEIGHTS.get(method.name, 1.0) for method in METHODS]
    left = calls
    first = list(METHODS)  # every rpc once, then by weight
    async with contextlib.AsyncExitStack() as stack:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(address, options)) for _ in callers]

        async def work(number: int) -> None:
            nonlocal left
            caller, channel = callers[number % len(callers)], channels[number % len(callers)]
            while left > 0 and len(report.failures) < 50:
                left -= 1
                method = first.pop() if first else caller.fuzzer.draw.choices(METHODS, weights)[0]
                await _make_call(channel, caller, method, report)

        await asyncio.gather(*(work(number) for number in range(at_once)))


async def _make_call(channel: grpc.aio.Channel, caller: Caller, method: MethodDescriptor, report: Report) -> None:
    sent = caller.fuzzer.requests(method)
    metadata = list(caller.fuzzer.headers())
    if caller.token:
        metadata.append(("authorization", f"Bearer {caller.token}"))
    make = channel.stream_stream if method.client_streaming else channel.unary_stream
    deadline_s = WAITING.get(method.name, CALL_S)
    call = make(path_of(method))(None if method.client_streaming else sent[0], metadata=metadata, timeout=deadline_s)
    answers: list[bytes] = []
    ended = False
    writing = asyncio.create_task(_write_requests(call, sent)) if method.client_streaming else None
    try:
        ended = await _read_answers(call, answers, method.server_streaming)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        _judge_error(error, caller, method, sent, report)
    else:
        report.codes[method.name, "OK" if ended else "LEFT", ""] += 1
    finally:
        call.cancel()
        if writing is not None:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
    for data in answers:
        _judge_answer(data, caller, method, sent, report)
    if method.name == "ExportMemories" and ended:
        parts = [parse_answer(method, data) for data in answers]
        caller.fuzzer.learn_export(b"".join(part.lines for part in parts if part is not None))  # type: ignore[attr-defined]


async def _write_requests(call: Any, sent: Sequence[bytes]) -> None:
    for each in sent:
        await call.write(each)
    await call.done_writing()


async def _read_answers(call: Any, answers: list[bytes], streamed: bool) -> bool:
    """Read answers until the end (True), or until a stream is silent for a while."""
    while len(answers) < 40:
        reading = asyncio.ensure_future(call.read())
        await asyncio.wait({reading}, timeout=STREAM_S if streamed else CALL_S + 30)
        if not reading.done():
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            return False
        if (answer := reading.result()) is grpc.aio.EOF:
            return True
        answers.append(answer)
    return False


def _judge_answer(data: bytes, caller: Caller, method: MethodDescriptor, sent: Sequence[bytes], report: Report) -> None:
    message = parse_answer(method, data)
    if message is None:
        report.fail("an answer that does not parse", method, sent)
        return
    caller.fuzzer.learn(message, GetMessageClass(method.input_type).FromString(sent[0]))
    if not method.client_streaming:
        caller.fuzzer.learn_page(method, sent[0], message)
    if any(mark in data for mark in caller.foreign):
        report.fail("an answer with another caller's data", method, sent)
    for failed in _statuses(message):
        _judge_status(failed, caller, method, sent, report)


def _statuses(message: Any) -> list[status_pb2.Status]:
    """Statuses inside an answer: of queries and of observations."""
    name = message.WhichOneof("message") if "message" in message.DESCRIPTOR.oneofs_by_name else ""
    part = getattr(message, name) if name else getattr(message, "ack", None)
    if name == "failed":
        return [part.status]
    return [each.status for each in getattr(part, "rejected", ())]


def _judge_error(
    error: grpc.aio.AioRpcError | asyncio.InvalidStateError,
    caller: Caller,
    method: MethodDescriptor,
    sent: Sequence[bytes],
    report: Report,
) -> None:
    if isinstance(error, asyncio.InvalidStateError) or (error.details() or "").startswith(CLIENT_ERRORS):
        report.codes[method.name, "LOST", ""] += 1
        return
    code, reason = error.code(), ""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            reason = _judge_status(status_pb2.Status.FromString(value), caller, method, sent, report)
    report.codes[method.name, code.name, reason] += 1
    if code in BAD:
        report.fail(f"{code.name} {error.details()!r}", method, sent)
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED and method.name not in WAITING:
        report.fail("the call hangs", method, sent)
    elif not reason and code not in _WITHOUT_REASON:
        report.fail(f"{code.name} without a reason: {error.details()!r}", method, sent)


_WITHOUT_REASON = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
"""Codes that gRPC itself produces."""


def _judge_status(
    status: status_pb2.Status, caller: Caller, method: MethodDescriptor, sent: Sequence[bytes], report: Report
) -> str:
    """Returns the reason. It must be known, with its code, domain and documented keys, and a printable message."""
    info = error_details_pb2.ErrorInfo()
    with contextlib.suppress(DecodeError):
        next((detail for detail in status.details if detail.Unpack(info)), None)
    rule = RULES.get(info.reason)
    given = set(info.metadata)
    if rule is None or info.domain != DOMAIN:
        report.fail(f"reason {info.reason!r} of {info.domain!r}: {status}", method, sent)
        return info.reason
    if not set(rule.metadata) <= given <= {*rule.metadata, *rule.optional_metadata}:
        report.fail(f"{info.reason} has {sorted(given)}, its rule is {rule}", method, sent)
    if CODES[info.reason].value[0] != status.code:
        report.fail(f"{info.reason} with code {status.code}", method, sent)
    if info.reason == "JOURNAL_UNAVAILABLE":
        report.texts[status.message] += 1
    if info.reason in NOT_OF_CLIENTS:
        report.fail(f"{info.reason}: {status.message}", method, sent)
    if not status.message.isprintable() or len(status.message.encode()) > 600:
        report.fail(f"message {status.message!r}", method, sent)
    if any(mark in status.SerializeToString() for mark in caller.foreign):
        report.fail(f"an error with another caller's data: {status.message!r}", method, sent)
    return info.reason
