"""Servers of one database with access control: a forwarded call keeps its caller, and the owner checks it again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

import memstream
from memstream.v1 import memory_service_pb2 as pb
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream_server.rpc.access import keys
from memstream_server.rpc.access.peers import CALLER_HEADER
from tests.server.conftest import check_log
from tests.server.listing import contents
from tests.server.test_standing_blocks import AT_ONCE, block_with, observe, versions
from tests.support.certificates import Authority
from tests.support.server import ServerProcess
from tests.toolchains.fleet import Fleet
from tests.toolchains.milvus import MilvusServer
from tests.toolchains.postgres import Cluster

pytestmark = pytest.mark.toolchain

AGENT = "spiffe://mesh/ns/agents/joy"
SECRET = "thirty-two characters or a few more"
POLICY = f'[[grant]]\nwho = ["uri:{AGENT}", "key:joy"]\nnamespaces = ["comedy"]\nverbs = ["*"]\n'


class Guarded:
    """Servers with mutual TLS, a file of API keys and a policy."""

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        self.authority = Authority(folder)
        self.agent = memstream.Tls.of_files(self.authority.ca, *self.authority.issue("agent", AGENT))
        self.keys_file = folder / "keys.json"
        self.key = keys.create_key(self.keys_file, "joy")[1]
        self._folder, self._fleet = folder, fleet

    def start(self, name: str, policy: str = POLICY, secret: str = SECRET) -> ServerProcess:
        certificate, key = self.authority.issue(name)
        policy_file = self._folder / f"{name}.toml"
        policy_file.write_text(policy)
        return self._fleet.make(
            tls_cert_file=str(certificate),
            tls_key_file=str(key),
            tls_client_ca_file=str(self.authority.ca),
            tls_peer_ca_file=str(self.authority.ca),
            api_keys_file=str(self.keys_file),
            access_policy_file=str(policy_file),
            peer_secret=secret,
        ).start()

    @asynccontextmanager
    async def connected(self, server: ServerProcess, token: str | None = None) -> AsyncIterator[memstream.Client]:
        async with memstream.connect(server.address, tls=self.agent, token=token, timeout_s=60.0) as client:
            yield client


@pytest.fixture
def guarded(tmp_path: Path, postgres: Cluster, milvus: MilvusServer) -> Iterator[Guarded]:
    fleet = Fleet(tmp_path, postgres, milvus)
    made = Guarded(tmp_path / "access", fleet)
    yield made
    for server in fleet.made:
        server.kill()
    for server in fleet.made:
        check_log(server)
        assert made.key not in server.log()
        assert SECRET not in server.log()


async def test_a_forwarded_call_keeps_its_caller(guarded: Guarded) -> None:
    owner, other = guarded.start("owner"), guarded.start("other")
    async with guarded.connected(owner) as client:
        await (await client.create_memory("comedy/joy")).observe_batch(["from the owner"])
    for token, text in ((None, "I keep bees on the roof"), (guarded.key, "the train to Ulm leaves at noon")):
        async with guarded.connected(other, token) as client:
            joy = client.memory("comedy/joy")
            async with joy.observe(producer=text[:1]) as stream:
                await stream.send(text)
            assert await joy.recall_once(text)
            with pytest.raises(memstream.PermissionDenied):
                await client.memory("tragedy/joy").observe_batch(["not mine"])
    async with guarded.connected(owner) as client:
        assert sorted(await contents(client.memory("comedy/joy"))) == [
            "I keep bees on the roof",
            "from the owner",
            "the train to Ulm leaves at noon",
        ]


async def test_the_owner_applies_its_own_policy(guarded: Guarded) -> None:
    owner = guarded.start("owner", POLICY.replace(f'"uri:{AGENT}", ', ""))
    other = guarded.start("other")
    async with guarded.connected(owner, guarded.key) as client:
        await (await client.create_memory("comedy/joy")).observe_batch(["from the owner"])
    async with guarded.connected(other) as client:
        with pytest.raises(memstream.PermissionDenied, match="spiffe"):
            await client.memory("comedy/joy").observe_batch(["by the certificate"])
    async with guarded.connected(other, guarded.key) as client:
        await client.memory("comedy/joy").observe_batch(["by the key"])


async def test_a_block_asks_memories_of_another_server_as_who_asked(guarded: Guarded) -> None:
    one, two = guarded.start("one"), guarded.start("two")
    async with guarded.connected(one) as here, guarded.connected(two) as there:
        user = await here.create_memory("comedy/user", kind="long_term")
        (tea,) = await observe(user, "Bob likes to drink tea")
        agent = await there.create_memory("comedy/agent", kind="long_term")
        await observe(agent, "Bob likes to drink coffee")
        await agent.blocks.keep("drinks", "What does Bob drink?", scopes=[user.path, agent.path], min_interval=AT_ONCE)
        block = await block_with(agent, lambda one: "tea" in one.text and "coffee" in one.text)
        assert block.standing is not None
        assert (block.principal, block.standing.problem) == (f"uri:{AGENT}", "")
        assert set(block.standing.revisions) == {user.path, agent.path}
        await here.finished(await user.erase_fragments([tea]))
        assert not [text for text in await versions(agent) if "tea" in text]
        assert "coffee" in (await block_with(agent, lambda one: one.text)).text
        await observe(user, "Bob likes to drink water")
        await block_with(agent, lambda one: "water" in one.text)


async def test_only_peers_with_the_secret_may_name_the_caller(guarded: Guarded) -> None:
    owner, stranger = guarded.start("owner"), guarded.start("stranger", secret=SECRET[::-1])
    async with guarded.connected(owner) as client:
        await (await client.create_memory("comedy/joy")).observe_batch(["from the owner"])
    async with guarded.connected(stranger) as client:
        with pytest.raises(memstream.Unauthenticated, match="peer_secret"):
            await client.memory("comedy/joy").observe_batch(["by a stranger"])
    tls = guarded.agent
    credentials = grpc.ssl_channel_credentials(tls.root_certificates, tls.private_key, tls.certificate_chain)
    async with grpc.aio.secure_channel(owner.address, credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await MemoryServiceStub(channel).GetMemory(
                pb.GetMemoryRequest(namespace="comedy", memory="joy"),
                metadata=((CALLER_HEADER, "WyJrZXk6am95Il0=.AAAA"),),
            )
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
