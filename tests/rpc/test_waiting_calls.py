"""A call that the server has not begun waits until its own deadline: gRPC core must not end it."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest

from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.server import _channel_options

OPTION = "grpc.server_max_unrequested_time_in_server"
CALLS = 6
TIMEOUT_S = 60
WAITING_S = 4.0


class Blocking(grpc.GenericRpcHandler):
    """Its first call keeps the event loop busy: until the others are sent, and then for `waiting_s`."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.sent = threading.Event()

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def answer(_request: bytes, _context: object) -> bytes:
            if not self.begun.is_set():
                self.begun.set()
                assert self.sent.wait(TIMEOUT_S)
                time.sleep(WAITING_S)  # noqa: ASYNC251 - this is the fault
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


def call_all(address: str, blocking: Blocking) -> list[grpc.StatusCode]:
    """In a thread: the statuses of calls that are sent while the first one is answered."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/any/Method")
        first = call.future(b"", timeout=TIMEOUT_S)
        assert blocking.begun.wait(TIMEOUT_S)
        others = [call.future(b"", timeout=TIMEOUT_S) for _ in range(CALLS)]
        blocking.sent.set()
        return [one.code() for one in (first, *others)]


@pytest.mark.parametrize(("seconds", "ended"), [(1, True), (None, False)])
async def test_waiting_calls_end_only_at_their_deadline(seconds: int | None, ended: bool) -> None:
    options = dict(_channel_options(RequestLimits()))
    assert options[OPTION] >= 3_600
    if seconds is not None:
        options[OPTION] = seconds
    blocking = Blocking()
    async with AsyncExitStack() as stack:
        server = grpc.aio.server(options=list(options.items()))
        stack.push_async_callback(server.stop, 0)
        server.add_generic_rpc_handlers((blocking,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        found = await asyncio.to_thread(call_all, f"127.0.0.1:{port}", blocking)
    assert (grpc.StatusCode.CANCELLED in found) is ended
