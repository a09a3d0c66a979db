"""TLS between servers of one database: their certificates hold the name of a Service, not the address of a pod."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import memstream
from tests.server.listing import contents
from tests.support.certificates import Authority
from tests.support.server import ServerProcess
from tests.toolchains.fleet import Fleet

pytestmark = pytest.mark.toolchain

SERVICE = "memory.agents.svc"


class Peers:
    """Servers whose certificates are valid for SERVICE alone."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.authority = Authority(folder / "tls")
        self._fleet = fleet

    def start(self, **settings: str | float) -> ServerProcess:
        """One more server; `settings` replace those that let it trust the others."""
        number = len(self._fleet.made)
        certificate, key = self.authority.issue(f"server{number}", dns=(SERVICE,), loopback=False)
        chosen: dict[str, str | float] = {"tls_peer_ca_file": str(self.authority.ca), "tls_peer_name": SERVICE}
        return self._fleet.make(
            tls_cert_file=str(certificate), tls_key_file=str(key), insecure_listen="true", **(chosen | settings)
        ).start()

    @asynccontextmanager
    async def connected(self, server: ServerProcess, timeout_s: float = 60.0) -> AsyncIterator[memstream.Client]:
        """A client that verifies the name of the Service."""
        tls = memstream.Tls(root_certificates=self.authority.ca.read_bytes())
        named = [("grpc.ssl_target_name_override", SERVICE)]
        async with memstream.connect(server.address, tls=tls, timeout_s=timeout_s, options=named) as client:
            yield client


@pytest.fixture
def peers(fleet: Fleet, tmp_path: Path) -> Peers:
    return Peers(fleet, tmp_path)


async def test_servers_verify_each_other_by_the_service_name(peers: Peers) -> None:
    """Calls and streams reach the owner through the other server."""
    owner, other = peers.start(), peers.start()
    async with peers.connected(owner) as client:
        await (await client.create_memory("comedy/joy")).observe_batch(["bees on the roof"])
    async with peers.connected(other) as client:
        joy = client.memory("comedy/joy")
        async with joy.observe(producer="p") as stream:
            await stream.send("a train to Ulm")
        found = await joy.recall_once("bees", limit=1)
        assert [each.fragment.content for each in found.recollections] == ["bees on the roof"]
        assert sorted(await contents(joy)) == ["a train to Ulm", "bees on the roof"]
    assert peers._fleet.epoch("joy") == 1  # the owner has answered all of it


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tls_peer_name": "memory.other.svc"}, "not valid for memory.other.svc: see tls_peer_name"),
        ({"tls_peer_name": ""}, "not valid for 127.0.0.1: see tls_peer_name"),
        ({"tls_peer_ca_file": "other"}, "not signed by a CA of tls_peer_ca_file"),
    ],
    ids=["another name", "no name", "another CA"],
)
async def test_an_untrusted_owner_is_reported_with_the_setting(
    peers: Peers, tmp_path: Path, settings: dict[str, str | float], problem: str
) -> None:
    if "tls_peer_ca_file" in settings:
        settings = {"tls_peer_ca_file": str(Authority(tmp_path / "other", "other").ca)}
    owner, other = peers.start(), peers.start(**settings)
    async with peers.connected(owner) as client:
        await (await client.create_memory("comedy/joy")).observe_batch(["bees on the roof"])
    async with peers.connected(other, timeout_s=20.0) as client:
        with pytest.raises(memstream.Unavailable, match=problem) as refused:
            await client.memory("comedy/joy").recall_once("bees")
    assert refused.value.reason == "OWNER_UNAVAILABLE"
    assert other.log().count(problem) == 1  # however often the call was tried
