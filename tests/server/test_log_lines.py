"""The log of a running server: one form for every line, and no line per refused call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import grpc.aio
import pytest

import memstream
from memstream.v1.memory_service_pb2 import ListMemoriesRequest
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from tests.access.conftest import guarded_files
from tests.server.conftest import MakeServer, started, stopped
from tests.support.certificates import Authority
from tests.support.server import ServerProcess
from tests.support.waiting import until

CALLS = 200
ANNOUNCED = ("memstream listens", "memstream drains", "  ")


def json_lines(server: ServerProcess) -> list[dict[str, object]]:
    """The lines of the log. Fails at one that is no JSON and that the start did not announce."""
    lines = [line for line in server.log().splitlines() if line and not line.startswith(ANNOUNCED)]
    return [json.loads(line) for line in lines]


async def test_lines_of_grpc_core_are_json_too(make_server: MakeServer, tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / "tls").issue("server")
    server = await started(make_server(log_format="json", tls_cert_file=str(certificate), tls_key_file=str(key)))
    host, _, port = server.address.rpartition(":")

    async def said() -> list[dict[str, object]]:
        with socket.create_connection((host, int(port)), 60) as plain:  # gRPC core logs the failed handshake
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while await asyncio.to_thread(plain.recv, 4096):  # until the server has closed it
                    pass
        return [line for line in json_lines(server) if str(line.get("source")).partition(":")[0].endswith(".cc")]

    line = (await until(said))[0]
    assert {"event", "level", "timestamp", "source"} <= line.keys()
    for _ in range(CALLS):
        await said()
    assert len(await said()) < CALLS / 4
    assert await stopped(server) == 0
    assert sum(int(str(each.get("repeated", 0))) for each in json_lines(server)) > 0


async def test_failed_start_is_still_explained(make_server: MakeServer, shared: ServerProcess) -> None:
    second = make_server(log_format="json", listen=shared.address)
    with pytest.raises(AssertionError, match="cannot listen"):
        await started(second)


async def test_refused_calls_of_a_caller_are_counted(make_server: MakeServer, tmp_path: Path) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    access = {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    server = await started(make_server(log_format="json", **access))
    before = len(server.log())
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = MemoryServiceStub(channel)
        for name in ("alice", "bob"):
            headers = (("authorization", f"Bearer {keys[name]}"),)

            async def refused(number: int, headers: tuple[tuple[str, str], ...] = headers) -> None:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stub.ListMemories(ListMemoriesRequest(namespace=f"other-{number}"), metadata=headers)
                assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED

            await asyncio.gather(*(refused(number) for number in range(CALLS)))
    async with memstream.connect(server.address, token=keys["alice"]) as client:
        await client.create_memory("a/joy")
    assert await stopped(server) == 0
    said = [line for line in json_lines(server) if line["event"] == "permission_denied"]
    for name in ("alice", "bob"):
        of_caller = [line for line in said if line["principal"] == f"key:{name}"]
        assert sum(int(str(line.get("repeated", 1))) for line in of_caller) == CALLS
    assert len(server.log()) - before < 20 * CALLS
