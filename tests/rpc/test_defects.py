"""A handler of any rpc raises: the client gets an incident id, the log gets the place, and neither gets the text."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from google.rpc import error_details_pb2, status_pb2

from memstream_server.observability import configure_logging
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.server import build_server
from memstream_server.settings import LogFormat, LogLevel
from tests.access.calls import path_of
from tests.rpc.conftest import GRACE_S, LIMITS
from tests.support.contract import METHODS
from tests.support.fake_engine import FakeStandingBlocks
from tests.support.fuzzing import Fuzzer

CANARY = "zebrafish"
ROUNDS = 12


class BrokenEngine:
    """Every method raises, with the caller's text in the message and in a local variable."""

    dimension = 384
    clock = None
    standing_blocks = FakeStandingBlocks()

    def __getattr__(self, name: str) -> Any:
        said = f"{CANARY} in {name}"
        raise LookupError(said)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    out, root = io.StringIO(), logging.getLogger()
    before = (root.handlers, root.level)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    root.handlers = []
    configure_logging(LogLevel.DEBUG, LogFormat.JSON, out)
    yield out
    root.handlers, level = before
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    broken: Any = BrokenEngine()
    server = build_server(broken, LIMITS, Drain(GRACE_S), conversations=broken)
    address = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as opened:
        yield opened
    await server.stop(0.1)


async def outcome(channel: grpc.aio.Channel, method: Any, sent: list[bytes]) -> tuple[grpc.StatusCode, str, str]:
    """(code, message, incident) of a call that sends its first message."""
    make = channel.stream_stream if method.client_streaming else channel.unary_stream
    requests = iter(sent[:1]) if method.client_streaming else sent[0]
    call = make(path_of(method))(requests, timeout=60)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        info = error_details_pb2.ErrorInfo()
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin" and isinstance(value, bytes):
                status_pb2.Status.FromString(value).details[0].Unpack(info)
        return error.code(), error.details() or "", info.metadata.get("incident", "")
    return grpc.StatusCode.OK, "", ""


async def test_defects_show_neither_text_nor_locals(lines: io.StringIO, channel: grpc.aio.Channel) -> None:
    fuzzer = Fuzzer(5, ("ns",), CANARY)
    incidents: list[str] = []
    for method in METHODS:
        for _ in range(ROUNDS):
            code, message, incident = await outcome(channel, method, fuzzer.requests(method))
            if code is grpc.StatusCode.INTERNAL and incident:
                assert incident in message
                assert CANARY not in message
                incidents.append(incident)
    text = lines.getvalue()
    assert len(set(incidents)) > 20
    assert CANARY not in text
    assert "LookupError" in text
    assert "tests/rpc/test_defects.py" in text
    logged = [json.loads(line) for line in text.splitlines()]
    defects = [line for line in logged if line["event"] == "defect" and "exception" in line]
    assert {line["incident"] for line in defects} == set(incidents)
    assert len(defects) < len(incidents), "equal defects were not counted"
    assert max(len(line) for line in text.splitlines()) < 3_000
