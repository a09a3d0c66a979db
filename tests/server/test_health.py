"""Health by service, as probes and load balancers see it: serving, degraded, and the end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from memstream_server import observability
from memstream_server.engine.status import Serving
from memstream_server.observability import Metrics, MetricsEndpoint
from memstream_server.rpc import info
from memstream_server.rpc.info import Health
from tests.server.conftest import MakeServer, started, stopped
from tests.support.certificates import Authority
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("Memory", "Stream", "Block", "Context", "Conversation", "Operation", "Server")
CONTRACT = [f"memstream.v1.{name}Service" for name in NAMES]


async def checked(channel: grpc.aio.Channel, *services: str) -> list[int]:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return [(await stub.Check(health_pb2.HealthCheckRequest(service=one))).status for one in services]


class Parts:
    """The parts that the server polls, set by a test."""

    def __init__(self) -> None:
        self.journal = self.index = self.writing = True

    async def look(self) -> Serving:
        return Serving(self.journal, self.index, self.writing)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "POLL_INTERVAL_S", 0.01)


@pytest.mark.usefixtures("quick")
async def test_services_serve_while_their_parts_serve() -> None:
    parts, names = Parts(), ["memstream.v1.StreamService", "memstream.v1.ServerService"]
    servicer = Health(names, parts.look)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)  # type: ignore[arg-type]  # typed for threads
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        asked = [*names, "memstream.journal", "memstream.journal.write", "memstream.index", ""]
        assert await checked(channel, *asked) == [NOT_SERVING] * 6  # before the first poll
        await servicer.start()
        assert await checked(channel, *asked) == [SERVING] * 6

        async def seen(*expected: int) -> bool:
            return await checked(channel, *asked) == [*expected]

        parts.index = False  # answers are correct without it
        await until(lambda: seen(SERVING, SERVING, SERVING, SERVING, NOT_SERVING, NOT_SERVING))
        parts.index, parts.journal = True, False
        await until(lambda: seen(NOT_SERVING, SERVING, NOT_SERVING, NOT_SERVING, SERVING, NOT_SERVING))
        parts.journal, parts.writing = True, False  # reads work without
        await until(lambda: seen(SERVING, SERVING, SERVING, NOT_SERVING, SERVING, SERVING))
        parts.writing = True
        await until(lambda: seen(*[SERVING] * 6))
        servicer.end()
        assert await checked(channel, *asked) == [NOT_SERVING] * 6
    await servicer.close()
    await server.stop(0)


@pytest.mark.usefixtures("quick")
async def test_watchers_are_told_whoever_leaves() -> None:
    parts = Parts()
    servicer = Health(["memstream.v1.StreamService"], parts.look)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)  # type: ignore[arg-type]  # typed for threads
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await servicer.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="memstream.v1.StreamService")
        stays, leaves = stub.Watch(request), stub.Watch(request)
        assert [(await call.read()).status for call in (stays, leaves)] == [SERVING, SERVING]
        leaves.cancel()
        parts.journal = False
        assert (await asyncio.wait_for(stays.read(), 30)).status == NOT_SERVING
        parts.journal = True
        assert (await asyncio.wait_for(stays.read(), 30)).status == SERVING
        nobody = stub.Watch(health_pb2.HealthCheckRequest(service="no.such"))
        assert (await nobody.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await checked(channel, "no.such")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    await servicer.close()
    await server.stop(0)


@pytest.mark.skipif(not hasattr(health_pb2, "HealthListResponse"), reason="this grpcio-health-checking has no List")
async def test_list_has_every_service() -> None:
    servicer = Health(["memstream.v1.StreamService"])
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)  # type: ignore[arg-type]  # typed for threads
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        messages: Any = health_pb2
        stub: Any = health_pb2_grpc.HealthStub(channel)
        before = (await stub.List(messages.HealthListRequest())).statuses
        assert {name: one.status for name, one in before.items()} == dict.fromkeys(
            ["memstream.v1.StreamService", "memstream.journal", "memstream.journal.write", "memstream.index", ""],
            NOT_SERVING,
        )
        await servicer.start()
        after = (await stub.List(messages.HealthListRequest())).statuses
        assert {name for name, one in after.items() if one.status == SERVING} >= before.keys()
    await servicer.close()
    await server.stop(0)


@pytest.mark.with_index
async def test_whole_server_needs_index_and_draining_serves_nothing(
    make_server: MakeServer,
) -> None:
    server = await started(make_server())
    async with grpc.aio.insecure_channel(server.address) as channel:
        asked = [*CONTRACT, "memstream.journal"]  # the index takes a moment
        assert await checked(channel, *asked) == [SERVING] * len(asked)
        await until(lambda: _all_serve(channel))
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watched = stub.Watch(health_pb2.HealthCheckRequest(service="memstream.v1.StreamService"))
        assert (await watched.read()).status == SERVING
        ending = asyncio.create_task(stopped(server))
        assert (await watched.read()).status == NOT_SERVING
        assert await ending == 0


async def _all_serve(channel: grpc.aio.Channel) -> bool:
    return await checked(channel, "memstream.index", "") == [SERVING] * 2


async def test_grpc_reflection_lists_services_and_messages(shared: ServerProcess) -> None:
    async with grpc.aio.insecure_channel(shared.address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {one.name for one in (await call.read()).list_services_response.service}
        assert listed == {
            *CONTRACT,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        for name in (*CONTRACT, "grpc.health.v1.Health", "memstream.v1.ObserveRequest"):
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
            assert (await call.read()).file_descriptor_response.file_descriptor_proto, name
        await call.done_writing()


def probed(metrics: str) -> dict[str, int]:
    """Statuses of both HTTP probes."""
    found = {}
    for path in ("livez", "readyz"):
        try:
            with urlopen(f"http://{metrics}/{path}", timeout=30) as answer:
                found[path] = answer.status
        except HTTPError as error:
            found[path] = error.code
            error.close()
    return found


def test_http_probes_need_no_tls_and_no_identity(make_server: MakeServer, tmp_path: Path) -> None:
    authority, metrics = Authority(tmp_path / "tls"), free_address()
    certificate, key = authority.issue("server")
    policy = tmp_path / "policy.toml"
    policy.write_text("")
    server = make_server(
        metrics_listen=metrics,
        tls_cert_file=str(certificate),
        tls_key_file=str(key),
        tls_client_ca_file=str(authority.ca),
        access_policy_file=str(policy),
    ).start()
    assert probed(metrics) == {"livez": 200, "readyz": 200}
    assert server.stop() == 0


async def test_http_probes_follow_the_health_service() -> None:
    endpoint = MetricsEndpoint(Metrics(), "[::1]:0")
    serving = {"memstream.v1.ServerService": True, "memstream.v1.StreamService": False}
    address = f"[::1]:{endpoint.port}"
    try:
        assert await asyncio.to_thread(probed, address) == {"livez": 503, "readyz": 503}
        endpoint.answer_probes(lambda service: serving[service])
        assert await asyncio.to_thread(probed, address) == {"livez": 200, "readyz": 503}
    finally:
        endpoint.close()


async def test_a_hanging_event_loop_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observability, "PROBE_S", 0.05)
    endpoint = MetricsEndpoint(Metrics(), "127.0.0.1:0")
    endpoint.answer_probes(lambda _service: True)
    try:
        # This call blocks the event loop until it returns.
        assert probed(f"127.0.0.1:{endpoint.port}") == {"livez": 503, "readyz": 503}
    finally:
        endpoint.close()
