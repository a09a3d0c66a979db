"""Three servers on PostgreSQL and Milvus behind a real Envoy: streams resume and the ledger stays exact in faults."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import memstream
from memstream.v1.memory_service_pb2 import GetMemoryRequest
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from tests.server.conftest import restarted, started, stopped
from tests.server.listing import contents
from tests.server.producing import PATIENT
from tests.support.certificates import Authority
from tests.support.metrics import scrape_metrics
from tests.support.processes import paused
from tests.support.seeds import seed_of
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until
from tests.toolchains import deploying
from tests.toolchains.envoy import Envoy, tolerate_pauses
from tests.toolchains.fleet import DEADLINE_S, SHORT, Fleet, Load
from tests.toolchains.programs import Absent

pytestmark = pytest.mark.toolchain

SEED = seed_of("MEMSTREAM_CRASH_SEED")

GRACE: dict[str, str | float] = {"drain_grace_s": DEADLINE_S + 15}
"""A call that waits for the end of the drain exceeds its deadline."""


@pytest.fixture(scope="session")
def envoy_program() -> Path:
    try:
        return deploying.find_envoy()
    except Absent as absent:
        pytest.skip(str(absent))


@contextmanager
def run_envoy(
    program: Path, folder: Path, servers: Sequence[ServerProcess], certificates: Path | None = None
) -> Iterator[Envoy]:
    with Envoy(program, folder, [server.address for server in servers], certificates) as envoy:
        yield envoy


async def wait_for_endpoints(envoy: Envoy, servers: Sequence[ServerProcess]) -> None:
    """Waits until Envoy sends calls to exactly these servers."""

    async def seen() -> bool:
        return await asyncio.to_thread(envoy.healthy_servers) == {server.address for server in servers}

    await until(seen)


async def wait_until_serving(server: ServerProcess) -> None:
    """Waits until the server reports SERVING."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # typed for threads
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service="memstream.v1.StreamService")):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


async def restart_in_turn(servers: Sequence[ServerProcess], load: Load, envoy: Envoy | None = None) -> None:
    """Stops and starts one server after the other, as a rolling update does."""
    for server in servers:
        assert await stopped(server) == 0
        await load.wait_for_progress()
        await started(server)
        await wait_until_serving(server)
        if envoy is not None:
            await wait_for_endpoints(envoy, servers)
        await load.wait_for_progress()


async def test_a_rolling_restart_loses_nothing_and_fails_no_call(fleet: Fleet) -> None:
    """Without a mesh: the client uses round robin."""
    servers = await fleet.start(3, **GRACE)
    target = "ipv4:" + ",".join(server.address for server in servers)
    options = [("grpc.lb_policy_name", "round_robin")]
    async with memstream.connect(target, retry=PATIENT, options=options) as client:
        load = Load(client, SEED)
        await load.start()
        await asyncio.to_thread(fleet.analyze)
        await restart_in_turn(servers, load)
        print(f"rolling restart, round robin: {await load.finish()}, seed {SEED}")
        assert not load.failed


async def test_calls_for_a_memory_go_to_one_server(fleet: Fleet, envoy_program: Path, tmp_path: Path) -> None:
    """No server forwards a call: the servers together have answered as many calls as were made."""
    metrics = [free_address() for _ in range(3)]
    servers = list(await asyncio.gather(*(started(fleet.make(metrics_listen=one)) for one in metrics)))
    addresses = [server.address for server in servers]
    with Envoy(envoy_program, tmp_path, addresses, change=tolerate_pauses) as envoy:
        await wait_for_endpoints(envoy, servers)
        async with memstream.connect(envoy.address, retry=PATIENT) as client:
            memories = [await client.create_memory(f"hash/m{number}") for number in range(12)]
            for _ in range(4):
                for memory in memories:
                    await memory.observe_batch(["hello"])
                    await memory.recall_once("hello", reinforce=False)
    counts = [await asyncio.to_thread(_answered, one, "RecallOnce") for one in metrics]
    assert sum(counts) == 48
    assert len([count for count in counts if count]) > 1
    assert [fleet.epoch(memory.name) for memory in memories] == [1] * 12


def _answered(metrics: str, rpc: str) -> int:
    series = scrape_metrics(metrics).items()
    return round(sum(value for name, value in series if name.startswith("memstream_calls_total") and rpc in name))


@pytest.mark.parametrize("what", ["killed", "paused", "rolling", "added"])
async def test_streams_resume_and_the_ledger_stays_exact(
    fleet: Fleet, envoy_program: Path, tmp_path: Path, what: str
) -> None:
    servers = await fleet.start(3, **GRACE, **(SHORT if what == "paused" else {}))
    with run_envoy(envoy_program, tmp_path, servers) as envoy:
        await wait_for_endpoints(envoy, servers)
        async with memstream.connect(envoy.address, retry=PATIENT) as client:
            load = Load(client, SEED)
            await load.start(memories=4)
            await asyncio.to_thread(fleet.analyze)
            if what == "killed":
                for victim in servers[:2]:
                    await asyncio.to_thread(victim.kill)
                    await load.wait_for_progress()
                    await restarted(victim)
                    await wait_for_endpoints(envoy, servers)
                    await load.wait_for_progress()
            elif what == "paused":
                with paused(servers[0].pid):
                    await wait_for_endpoints(envoy, servers[1:])
                    await load.wait_for_progress()
                await wait_for_endpoints(envoy, servers)
            elif what == "rolling":
                await restart_in_turn(servers, load, envoy)
            else:
                servers.append(await started(fleet.make(**GRACE)))
                envoy.set_servers([server.address for server in servers])
                await wait_for_endpoints(envoy, servers)
            await load.wait_for_progress()
            print(f"behind Envoy, {what}: {await load.finish()}, seed {SEED}")
            if what in ("rolling", "added"):
                assert not load.failed


MESH = "spiffe://mesh/ns"
POLICY = f"""
[[grant]]
who = ["uri:{MESH}/agents/joy"]
namespaces = ["comedy"]
verbs = ["*"]

[[grant]]
who = ["uri:{MESH}/agents/ann"]
namespaces = ["tragedy"]
verbs = ["*"]
"""


async def test_mutual_tls_through_envoy_identifies_the_caller(
    fleet: Fleet, envoy_program: Path, tmp_path: Path
) -> None:
    """Envoy's own certificate opens nothing, and nobody's word counts who calls: what Envoy has verified does."""
    authority = Authority(tmp_path / "tls")
    certificate, key = authority.issue("memstream", dns=("memstream",))
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    servers = await fleet.start(
        3,
        tls_cert_file=str(certificate),
        tls_key_file=str(key),
        tls_client_ca_file=str(authority.ca),
        tls_peer_ca_file=str(authority.ca),
        trusted_proxies="127.0.0.0/8",
        access_policy_file=str(policy),
        peer_secret="thirty-two characters or a few more",
        **GRACE,
    )
    folder = tmp_path / "envoy-tls"
    folder.mkdir()
    for own, name in zip(authority.issue("envoy", f"{MESH}/envoy"), ("tls.crt", "tls.key"), strict=True):
        shutil.copy(own, folder / name)
    shutil.copy(authority.ca, folder / "ca.crt")
    agents = {
        name: memstream.Tls.of_files(authority.ca, *authority.issue(name, f"{MESH}/agents/{name}"))
        for name in ("joy", "ann")
    }
    with run_envoy(envoy_program, tmp_path, servers, folder) as envoy:
        await wait_for_endpoints(envoy, servers)
        async with memstream.connect(envoy.address, retry=PATIENT, tls=agents["joy"]) as client:
            joy = await client.create_memory("comedy/joy")
            async with joy.observe(producer="p") as stream:
                await stream.send("bees on the roof")
                await stream.flush()
                owner = fleet.owner("joy")
                await restarted(next(server for server in servers if server.address == owner))
                await stream.send("a train to Ulm")
            assert sorted(await contents(joy)) == ["a train to Ulm", "bees on the roof"]
            with pytest.raises(memstream.PermissionDenied):
                await client.memory("tragedy/ann").observe_batch(["not mine"])
        async with memstream.connect(envoy.address, retry=PATIENT, tls=agents["ann"]) as client:
            with pytest.raises(memstream.PermissionDenied, match="ann"):
                await client.memory("comedy/joy").recall_once("bees")
        tls = agents["ann"]
        credentials = grpc.ssl_channel_credentials(tls.root_certificates, tls.private_key, tls.certificate_chain)
        async with grpc.aio.secure_channel(envoy.address, credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await MemoryServiceStub(channel).GetMemory(
                    GetMemoryRequest(namespace="comedy", memory="joy"),
                    metadata=(("x-forwarded-client-cert", f"URI={MESH}/agents/joy"),),
                )
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        stranger = memstream.Tls(root_certificates=authority.ca.read_bytes())
        async with memstream.connect(envoy.address, tls=stranger, timeout_s=5.0) as client:
            with pytest.raises((memstream.Unavailable, memstream.DeadlineExceeded)):
                await client.server_info()
