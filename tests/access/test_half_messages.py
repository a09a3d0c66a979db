"""One caller's unfinished messages of streams stay within caller_request_bytes_max; other streams are not affected."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import memstream
from memstream.v1 import stream_service_pb2 as pb
from tests.access.conftest import guarded_files
from tests.server.conftest import MakeServer, started
from tests.support.attack_connections import FlowingConnection, grpc_message
from tests.support.raw_http2 import END_HEADERS, HEADERS, frame, request
from tests.support.server import ServerProcess
from tests.support.waiting import until

OBSERVE = "/memstream.v1.StreamService/Observe"
MB = 1 << 20
STREAMS = 40
"""Of 4 MB less a byte on each of two connections: 320 MB."""
BUDGET = 16 * MB
HALF = b"\0" + (4 * MB - 64).to_bytes(4) + bytes(4 * MB - 65)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what arrives on a connection")


def resident_bytes(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text("utf-8")
    return 1_024 * int(status.partition("VmRSS:")[2].split()[0])


@pytest.mark.parametrize("opened", [False, True], ids=["first message", "after the opening"])
async def test_half_messages_of_a_caller_end_its_streams(make_server: MakeServer, tmp_path: Path, opened: bool) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    access = {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    server = await started(make_server(**access, caller_request_bytes_max=BUDGET))
    credential = [("authorization", f"Bearer {keys['alice']}")]
    async with memstream.connect(server.address, token=keys["alice"]) as alice:
        await alice.create_memory("a/m")
    async with memstream.connect(server.address, token=keys["bob"]) as bob:
        memory = await bob.create_memory("b/m")
        async with memory.observe("p") as stream:
            await (await stream.send("before"))
            before = resident_bytes(server)

            async def attack(connection: FlowingConnection) -> None:
                sends = []
                for number in range(1, 2 * STREAMS, 2):
                    await connection.send(frame(HEADERS, END_HEADERS, number, request(OBSERVE, credential)))
                    opening = pb.ObserveOpen(namespace="a", memory="m", producer=f"p{id(connection)}-{number}")
                    first = grpc_message(pb.ObserveRequest(open=opening).SerializeToString()) if opened else b""
                    sends.append(connection.send_body(number, first + HALF))
                await asyncio.gather(*sends)

            async with AsyncExitStack() as stack:
                two = [await stack.enter_async_context(FlowingConnection.open(server.address)) for _ in range(2)]
                for error in await asyncio.gather(*map(attack, two), return_exceptions=True):
                    assert error is None or isinstance(error, ConnectionError)  # the server may close a connection, too

                async def bytes_are_few() -> bool:
                    """The server counts once unfinished messages could exceed the budget, so twice that may be left."""
                    return sum(connection.unfinished_bytes() for connection in two) < 3 * BUDGET

                await until(bytes_are_few)
            assert any(connection.ended for connection in two)
            assert resident_bytes(server) - before < 200 * MB
            await (await stream.send("after"))
            assert stream.connections == 1


async def test_many_busy_streams_of_a_caller_stay_open(make_server: MakeServer, tmp_path: Path) -> None:
    """Whole messages, answers, and calls on the same connection are not taken for unfinished messages."""
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    access = {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    server = await started(make_server(**access, caller_request_bytes_max=MB, message_max_bytes=MB, batch_max=64))
    text = "the code is 4711 " * 1_000
    async with memstream.connect(server.address, token=keys["alice"]) as alice, AsyncExitStack() as stack:
        memory = await alice.create_memory("a/m", kind=memstream.MemoryKind.SHORT_TERM)
        recalls = [await stack.enter_async_context(memory.recall()) for _ in range(20)]
        observing = [await stack.enter_async_context(memory.observe(f"p{number}")) for number in range(4)]

        async def keep_busy(number: int) -> None:
            for turn in range(60):
                await (await observing[number].send(f"{number} {turn} {text}"))
                await recalls[number].query("code", limit=20)
                await memory.recall_once("code")

        await asyncio.gather(*map(keep_busy, range(4)))
        for recall in recalls:
            await recall.query("code")
            assert recall.connections == 1
        assert [stream.connections for stream in observing] == [1] * 4
