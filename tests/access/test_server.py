"""A server with TLS, certificates, keys and tokens: files are replaced while it runs, and no secret is shown."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import grpc.aio
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

import memstream
from memstream.v1 import memory_service_pb2 as pb
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream_server.rpc.access import keys
from memstream_server.rpc.access.admission import CLIENTS_OF_OWNER_MAX
from tests.access.conftest import Guarded
from tests.server.conftest import QUICK, check_log
from tests.support.certificates import Authority
from tests.support.server import ServerProcess
from tests.support.waiting import until

ISSUER, AUDIENCE = "https://issuer.example", "memstream"
AGENT = "spiffe://mesh/ns/agents/joy"


class Issuer:
    """Signs tokens, and serves its keys as JWKS over loopback."""

    def __init__(self) -> None:
        self.keys: dict[str, ec.EllipticCurvePrivateKey] = {}
        self.asked = 0
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                self.send_response(200)
                self.end_headers()
                self.wfile.write(issuer.jwks().encode())

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/jwks"
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.new_key("first")

    def new_key(self, kid: str) -> None:
        self.keys[kid] = ec.generate_private_key(ec.SECP256R1())

    def jwks(self) -> str:
        shown = [
            json.loads(ECAlgorithm.to_jwk(key.public_key())) | {"kid": kid, "alg": "ES256"}
            for kid, key in self.keys.items()
        ]
        return json.dumps({"keys": shown})

    def token(self, subject: str = "joy", kid: str = "first", key: Any = None, **claims: Any) -> str:
        said = {"sub": subject, "iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 600} | claims
        said = {name: value for name, value in said.items() if value is not None}
        return jwt.encode(said, key or self.keys[kid], algorithm="ES256", headers={"kid": kid})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    made = Issuer()
    yield made
    made.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory, authority: Authority, issuer: Issuer) -> Iterator[Guarded]:
    """Mutual TLS on every interface, keys, tokens, and a trusted proxy."""
    directory = tmp_path_factory.mktemp("tls")
    keys_file, policy_file = directory / "keys.json", directory / "policy.toml"
    policy_file.write_text(
        """
        [[grant]]
        who = ["key:joy", "jwt:joy", "uri:spiffe://mesh/ns/agents/*"]
        namespaces = ["comedy"]
        verbs = ["*"]
        """
    )
    made = {"joy": keys.create_key(keys_file, "joy")[1]}
    certificate, key = authority.issue("server")
    settings = {
        **QUICK,
        "tls_cert_file": str(certificate),
        "tls_key_file": str(key),
        "tls_client_ca_file": str(authority.ca),
        "api_keys_file": str(keys_file),
        "access_policy_file": str(policy_file),
        "jwt_jwks": issuer.url,
        "jwt_issuer": ISSUER,
        "jwt_audience": AUDIENCE,
        "trusted_proxies": "127.0.0.0/8, ::1",
    }
    with ServerProcess(directory / "data", "0.0.0.0:0").configure(**settings) as server:
        server.address = server.address.replace("0.0.0.0", "localhost")
        yield Guarded(server, keys_file, policy_file, made)
        assert server.stop() == 0
    check_log(server)
    assert "insecure" not in server.log()
    assert "BEGIN" not in server.log()
    assert not any(said in server.log() for said in made.values())


def _as(authority: Authority, *uris: str, name: str = "client") -> memstream.Tls:
    return memstream.Tls.of_files(authority.ca, *authority.issue(name, *uris))


@asynccontextmanager
async def _memories(
    server: ServerProcess, tls: memstream.Tls, *headers: tuple[str, str]
) -> AsyncIterator[Callable[[], Any]]:
    """Lists the memories of `comedy` with given headers, each time on a new connection."""

    async def ask() -> Any:
        credentials = grpc.ssl_channel_credentials(tls.root_certificates, tls.private_key, tls.certificate_chain)
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(server.address, credentials, options=options) as channel:
            stub = MemoryServiceStub(channel)
            try:
                return await stub.ListMemories(pb.ListMemoriesRequest(namespace="comedy"), metadata=headers, timeout=60)
            except grpc.aio.AioRpcError as error:
                return error.code()

    yield ask


async def _answer(server: ServerProcess, tls: memstream.Tls, *headers: tuple[str, str]) -> Any:
    async with _memories(server, tls, *headers) as ask:
        return await ask()


def _bearer(token: str) -> tuple[str, str]:
    return "authorization", f"Bearer {token}"


UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


async def test_the_sdk_observes_and_recalls_over_mutual_tls(tls: Guarded, authority: Authority) -> None:
    given = _as(authority, AGENT)
    async with memstream.connect(tls.server.address, tls=given) as client:
        joy = await client.create_memory("comedy/joy", exist_ok=True)
        async with joy.observe(producer="p") as stream:
            await stream.send("user: My name is Bob")
        assert (await joy.recall_once("What is my name?"))[0].fragment.content == "user: My name is Bob"
        with pytest.raises(memstream.PermissionDenied):
            await client.create_memory("tragedy/sad")


async def test_client_needs_a_certificate_of_the_ca(tls: Guarded, authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    forged = memstream.Tls.of_files(authority.ca, *stranger.issue("client", AGENT))
    for refused in (memstream.Tls.of_files(authority.ca), forged):
        assert await _answer(tls.server, refused, _bearer(tls.keys["joy"])) is grpc.StatusCode.UNAVAILABLE


async def test_the_uri_of_a_certificate_is_who_calls(tls: Guarded, authority: Authority) -> None:
    assert isinstance(await _answer(tls.server, _as(authority, AGENT)), pb.ListMemoriesResponse)
    assert await _answer(tls.server, _as(authority, "spiffe://mesh/ns/other/joy")) is DENIED
    assert await _answer(tls.server, _as(authority)) is UNAUTHENTICATED
    assert await _answer(tls.server, _as(authority, AGENT, "spiffe://mesh/ns/other/x")) is UNAUTHENTICATED


async def test_certificate_does_not_replace_a_wrong_token(tls: Guarded, authority: Authority) -> None:
    agent = _as(authority, AGENT)
    for value in ("Bearer ", "Bearer nonsense", "Basic am95", f"Bearer {tls.keys['joy']}x"):
        assert await _answer(tls.server, agent, ("authorization", value)) is UNAUTHENTICATED
    twice = [_bearer(tls.keys["joy"])] * 2
    assert await _answer(tls.server, agent, *twice) is UNAUTHENTICATED


async def test_trusted_proxy_header_sets_the_identity(tls: Guarded, authority: Authority) -> None:
    proxy = _as(authority, name="proxy")
    of_joy = f'By=spiffe://mesh/proxy;Hash=00;Subject="CN=a\\",URI=x;b";URI={AGENT}'
    for header, expected in (
        (of_joy, pb.ListMemoriesResponse),
        (f"URI=spiffe://mesh/ns/other/x,{of_joy}", pb.ListMemoriesResponse),
        (f"{of_joy},URI=spiffe://mesh/ns/other/x", DENIED),
        (f"{of_joy},By=spiffe://mesh/proxy", UNAUTHENTICATED),
        (f"URI={AGENT};URI={AGENT}", UNAUTHENTICATED),
        ('Subject="', UNAUTHENTICATED),
        ("", UNAUTHENTICATED),
    ):
        told = await _answer(tls.server, proxy, ("x-forwarded-client-cert", header))
        assert (type(told) if isinstance(told, pb.ListMemoriesResponse) else told) is expected, header


async def test_tokens_are_verified_by_the_issuers_keys(tls: Guarded, authority: Authority, issuer: Issuer) -> None:
    anybody = _as(authority, name="anybody")
    assert isinstance(await _answer(tls.server, anybody, _bearer(issuer.token())), pb.ListMemoriesResponse)
    assert await _answer(tls.server, anybody, _bearer(issuer.token("sad"))) is DENIED
    public = issuer.jwks().encode()
    stranger = ec.generate_private_key(ec.SECP256R1())
    bad = {
        "expired": issuer.token(exp=int(time.time()) - 60),
        "never expires": issuer.token(exp=None),
        "for another": issuer.token(aud="another"),
        "for nobody": issuer.token(aud=None),
        "by another": issuer.token(iss="https://another.example"),
        "not yet": issuer.token(nbf=int(time.time()) + 600),
        "of nobody": issuer.token(subject=""),
        "forged": issuer.token(key=stranger),
        "shared secret": jwt.encode({"sub": "joy"}, public * 2, algorithm="HS256", headers={"kid": "first"}),
        "an algorithm of no kind": f"{_encoded({'alg': ['ES256'], 'kid': 'first'})}.{_encoded({'sub': 'joy'})}.AAAA",
        "unsigned": jwt.encode({"sub": "joy"}, None, algorithm="none", headers={"kid": "first"}),
    }
    for what, token in bad.items():
        assert await _answer(tls.server, anybody, _bearer(token)) is UNAUTHENTICATED, what


def _encoded(part: Mapping[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")


async def test_a_new_key_of_the_issuer_is_asked_for(tls: Guarded, authority: Authority, issuer: Issuer) -> None:
    issuer.new_key("second")
    async with _memories(tls.server, _as(authority, name="later"), _bearer(issuer.token(kid="second"))) as ask:
        await until(lambda: _is_answered(ask))


async def _is_answered(ask: Callable[[], Any]) -> bool:
    return isinstance(await ask(), pb.ListMemoriesResponse)


async def test_new_connections_get_replaced_certificate(tls: Guarded, authority: Authority) -> None:
    agent = _as(authority, AGENT)
    named = grpc.ssl_channel_credentials(agent.root_certificates, agent.private_key, agent.certificate_chain)

    async def reached_as(name: str) -> bool:
        options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(tls.server.address, named, options=options) as channel:
            try:
                await MemoryServiceStub(channel).ListMemories(pb.ListMemoriesRequest(namespace="comedy"), timeout=60)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return False
        return True

    assert not await reached_as("renewed.example")
    certificate, key = authority.issue("server", dns=("renewed.example",))
    assert await reached_as("renewed.example")
    kept = key.read_bytes()
    key.write_text("half a k")  # an invalid replacement: the last pair stays in force
    assert await reached_as("renewed.example")
    assert "tls_files_not_in_order" in tls.server.log()
    key.write_bytes(kept)
    assert certificate.exists()


async def test_a_revoked_key_is_refused_and_ends_its_streams(guarded: Guarded) -> None:
    made, given = keys.create_key(guarded.keys_file, "alice")
    async with memstream.connect(guarded.server.address, token=given) as client:
        await until(lambda: _reads(client))
        joy = await client.create_memory("a/revoked", exist_ok=True)

        async def observe_after(revoked: str) -> None:
            async with joy.observe(producer="p") as stream:
                await stream.send("one")
                keys.revoke_key(guarded.keys_file, revoked)
                await asyncio.wait_for(_sending_on(stream), 60)

        with pytest.raises(memstream.Unauthenticated):
            await observe_after(made.id)


async def test_revoked_key_ends_standing_query(guarded: Guarded) -> None:
    """Although its client sends no message that would trigger a check."""
    (made, given), (_, other) = keys.create_key(guarded.keys_file, "alice"), keys.create_key(guarded.keys_file, "alice")
    async with (
        memstream.connect(guarded.server.address, token=given) as client,
        memstream.connect(guarded.server.address, token=other) as teller,
    ):
        await until(lambda: _reads(client))
        joy = await client.create_memory("a/overheard", exist_ok=True)

        async def follow() -> None:
            async with joy.recall() as recalls, recalls.subscribe("secret", limit=100) as standing:
                keys.revoke_key(guarded.keys_file, made.id)
                async for _ in standing:
                    pass

        following, said = asyncio.create_task(follow()), 0

        async def ended() -> bool:
            nonlocal said
            said += 1
            await teller.memory("a/overheard").observe_batch([f"the secret number {said}"])
            return following.done()

        await until(ended)
        with pytest.raises(memstream.Unauthenticated):
            await following


async def test_stream_reconnects_with_a_fresh_token(guarded: Guarded) -> None:
    (former, first), (_, second) = (
        keys.create_key(guarded.keys_file, "alice"),
        keys.create_key(guarded.keys_file, "alice"),
    )
    current, asked = [first], []

    def token() -> str:
        asked.append(current[0])
        return current[0]

    async with memstream.connect(guarded.server.address, token=token) as client:
        await until(lambda: _reads(client))
        joy = await client.create_memory("a/renewed", exist_ok=True)
        async with joy.observe(producer="p") as stream:
            await stream.send("one")
            current[0] = second
            keys.revoke_key(guarded.keys_file, former.id)

            async def sends_on() -> bool:
                await stream.send("more")
                return second in asked

            await until(sends_on)
            await (await stream.send("by the second"))


async def _reads(client: memstream.Client) -> bool:
    try:
        _ = [each async for each in client.list_memories("a")]
    except memstream.Unauthenticated:
        return False
    return True


async def _sending_on(stream: Any) -> None:
    while True:
        await stream.send("more")
        await asyncio.sleep(0.05)


async def test_changed_policy_applies_to_open_streams(guarded: Guarded) -> None:
    former = guarded.policy_file.read_text()
    grant = '[[grant]]\nwho = ["key:nobody"]\nnamespaces = ["n"]\nverbs = ["*"]\n'
    async with memstream.connect(guarded.server.address, token=guarded.keys["nobody"]) as client:
        guarded.policy_file.write_text(former + grant)
        await until(lambda: _may(client.create_memory("n/joy", exist_ok=True)))

        async def observe_meanwhile() -> None:
            async with client.memory("n/joy").observe(producer="p") as stream:
                await stream.send("one")
                guarded.policy_file.write_text("[[grant]]\nwho = 3\n")  # invalid: the last contents stay in force
                await until(lambda: _complained(client, guarded))
                assert await _may(client.get_memory("n/joy"))
                guarded.policy_file.write_text(former)
                await asyncio.wait_for(_sending_on(stream), 60)

        with pytest.raises(memstream.PermissionDenied):
            await observe_meanwhile()


async def _may(call: Awaitable[object]) -> bool:
    try:
        await call
    except memstream.PermissionDenied:
        return False
    return True


async def _complained(client: memstream.Client, guarded: Guarded) -> bool:
    await client.get_memory("n/joy")  # a call checks the files
    return "file_reload_failed" in guarded.server.log()


async def test_status_names_the_latest_clients_of_each_caller(guarded: Guarded) -> None:
    """A caller with many names replaces its own entries alone, and only an operator sees any."""
    address, keys = guarded.server.address, guarded.keys
    async with (
        memstream.connect(address, token=keys["root"], client_name="desk") as root,
        memstream.connect(address, token=keys["alice"], client_name="joy") as alice,
    ):
        memory = await alice.create_memory("a/clients")
        async with memory.watch("now"):
            for number in range(CLIENTS_OF_OWNER_MAX + 5):
                async with memstream.connect(address, token=keys["bob"], client_name=f"bot-{number}") as bob:
                    assert [one async for one in bob.list_memories("b")] == []
            status = await root.server_status()
        with pytest.raises(memstream.PermissionDenied):
            await alice.server_status()
    found = {name: [one for one in status.clients if one.principal == f"key:{name}"] for name in ("alice", "bob")}
    joy = next(one for one in found["alice"] if one.name.startswith("joy grpc-python"))
    assert (joy.streams, joy.calls >= 2, joy.address) == (1, True, "ipv4:127.0.0.1")
    assert joy.first_call_time <= joy.last_call_time
    names = [one.name.split()[0] for one in found["bob"]]
    assert names == [f"bot-{number}" for number in reversed(range(5, CLIENTS_OF_OWNER_MAX + 5))]
    desk = next(one for one in status.clients if one.name.startswith("desk"))
    assert (desk.principal, desk.streams) == ("key:root", 0)


@pytest.mark.parametrize("name", ["", "two words", "a\nb", "x" * 65, "é"])
def test_a_client_name_that_no_header_carries_is_refused(name: str) -> None:
    with pytest.raises(memstream.InvalidArgument, match="client_name"):
        memstream.connect("127.0.0.1:7700", client_name=name)
