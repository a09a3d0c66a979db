"""Identity, rights and TLS of the HTTP port."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
import pytest

from tests.access.conftest import guarded_files
from tests.http_port.test_edges import CREATE, INFO, RECALL, WATCH, call
from tests.server.conftest import QUICK, check_log
from tests.support.certificates import Authority
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until

WATCHES = 6
"""More than the largest bodies that fit into one caller's account."""


async def test_keys_and_rights_are_those_of_grpc(tmp_path: Path) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    address = free_address()
    settings = QUICK | {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    with ServerProcess(tmp_path / "data", http_listen=address, **settings) as server:
        body = '{"namespace": "a", "memory": "joy"}'
        unknown = call(address, CREATE, body)
        assert (unknown.status_code, unknown.headers["www-authenticate"]) == (401, "Bearer")
        assert unknown.json()["details"][0]["debug"]["reason"] == "UNAUTHENTICATED"
        assert call(address, CREATE, body, authorization="Bearer nonsense").status_code == 401
        assert call(address, CREATE, body, authorization=f"Bearer {keys['bob']}").status_code == 403
        assert call(address, CREATE, body, authorization=f"Bearer {keys['alice']}").status_code == 200
        refused = call(address, INFO)
        assert refused.json()["details"][0]["type"] == "google.rpc.ErrorInfo"
        assert httpx2.get(f"http://{address}/healthz", timeout=60).status_code in {200, 503}, "a probe has no key"
        assert server.stop() == 0
        check_log(server)
        assert not any(key in server.log() for key in keys.values())


async def test_refused_call_says_when_to_try_again(tmp_path: Path) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    address = free_address()
    settings = QUICK | {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    with ServerProcess(tmp_path / "data", http_listen=address, caller_requests_per_s=1.0, **settings):
        body, key = '{"namespace": "a", "memory": "joy", "existOk": true}', f"Bearer {keys['alice']}"
        calls = (asyncio.to_thread(call, address, CREATE, body, authorization=key) for _ in range(16))
        answers = await asyncio.gather(*calls)
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    details = {each["type"]: each["debug"] for each in refused.json()["details"]}
    assert details["google.rpc.ErrorInfo"]["reason"] == "QUOTA_EXCEEDED"
    assert details["google.rpc.ErrorInfo"]["metadata"]["quota"] == "caller_requests_per_s"
    assert details["google.rpc.RetryInfo"]["retryDelay"].endswith("s")


async def test_compressed_bodies_of_one_caller_take_turns(tmp_path: Path) -> None:
    """Each is charged as the largest body until it has arrived, so all of them must still be answered."""
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    address = free_address()
    settings = QUICK | {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    with ServerProcess(tmp_path / "data", http_listen=address, **settings):
        body = gzip.compress(b'{"namespace": "a", "memory": "joy", "existOk": true}')
        given = {"content_encoding": "gzip", "authorization": f"Bearer {keys['alice']}"}
        calls = [asyncio.to_thread(call, address, CREATE, body, **given) for _ in range(3 * WATCHES)]
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}


async def test_body_of_an_unknown_caller_is_not_read(tmp_path: Path) -> None:
    keys_file, policy_file, _ = guarded_files(tmp_path / "access")
    address = free_address()
    settings = QUICK | {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    with ServerProcess(tmp_path / "data", http_listen=address, **settings):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        head = [
            f"POST {RECALL} HTTP/1.1",
            f"host: {address}",
            "content-type: application/json",
            "content-length: 99999",
        ]
        writer.write("\r\n".join([*head, "", ""]).encode())
        async with asyncio.timeout(60):
            assert b" 401 " in await reader.readline(), "the answer came before the body"
        writer.close()


async def test_open_watches_keep_no_room_for_a_largest_body(tmp_path: Path) -> None:
    """A body without content-length is charged as the largest one, but only until it has arrived."""
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    address = free_address()
    settings = QUICK | {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    with ServerProcess(tmp_path / "data", http_listen=address, **settings):
        body = '{"namespace": "a", "memory": "joy"}'
        bearer = f"Bearer {keys['alice']}"
        assert call(address, CREATE, body, authorization=bearer).status_code == 200
        framed = struct.pack(">BI", 0, len(body)) + body.encode()

        async def chunks() -> AsyncIterator[bytes]:
            yield framed

        headers = {"content-type": "application/connect+json", "authorization": bearer}
        async with httpx2.AsyncClient(timeout=60) as http, AsyncExitStack() as open_watches:
            for _ in range(WATCHES):
                watch = http.stream("POST", f"http://{address}{WATCH}", content=chunks(), headers=headers)
                await open_watches.enter_async_context(watch)
            assert (await asyncio.to_thread(call, address, CREATE, body, authorization=bearer)).status_code == 409


def test_public_address_needs_tls_and_keys(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", http_listen="0.0.0.0:0")
    with pytest.raises(
        AssertionError, match=r"http_listen is 0\.0\.0\.0:0, beyond loopback, without TLS and authentication"
    ):
        server.start()


async def test_client_certificate_identifies_the_caller(tmp_path: Path) -> None:
    authority, agent = Authority(tmp_path / "tls"), "spiffe://mesh/ns/agents/joy"
    certificate, key = authority.issue("server")
    (policy_file := tmp_path / "policy.toml").write_text(
        f'[[grant]]\nwho = ["uri:{agent}"]\nnamespaces = ["a"]\nverbs = ["*"]\n'
    )
    address = free_address()
    settings = QUICK | {
        "tls_cert_file": str(certificate),
        "tls_key_file": str(key),
        "tls_client_ca_file": str(authority.ca),
        "access_policy_file": str(policy_file),
    }
    body, headers = '{"namespace": "a", "memory": "joy"}', {"content-type": "application/json"}
    with ServerProcess(tmp_path / "data", http_listen=address, **settings) as server:

        def create(name: str, *uris: str, issuer: Authority = authority) -> httpx2.Response:
            trusted = ssl.create_default_context(cafile=str(authority.ca))
            trusted.load_cert_chain(*issuer.issue(name, *uris))
            return httpx2.post(f"https://{address}{CREATE}", content=body, headers=headers, verify=trusted, timeout=60)

        assert create("joy", agent).status_code == 200
        assert create("other", "spiffe://mesh/ns/agents/other").status_code == 403
        assert create("nameless").status_code == 401
        assert create("double", agent, "spiffe://mesh/ns/agents/second").status_code == 401
        with pytest.raises(httpx2.TransportError):
            create("forged", agent, issuer=Authority(tmp_path / "stranger"))
        with pytest.raises(httpx2.TransportError):
            httpx2.post(
                f"https://{address}{CREATE}",
                content=body,
                headers=headers,
                verify=ssl.create_default_context(cafile=str(authority.ca)),
            )
        assert server.stop() == 0
        check_log(server)


async def test_tls_serves_a_renewed_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    certificate, key = authority.issue("server")
    address = free_address()
    tls = {"tls_cert_file": str(certificate), "tls_key_file": str(key)}
    with ServerProcess(tmp_path / "data", http_listen=address, **QUICK, **tls) as server:
        trusted = ssl.create_default_context(cafile=str(authority.ca))
        headers = {"content-type": "application/json"}
        answer = httpx2.post(f"https://{address}{INFO}", content="{}", headers=headers, verify=trusted, timeout=60)
        assert answer.status_code == 200
        with pytest.raises(httpx2.TransportError):
            call(address)
        before = await asyncio.to_thread(ssl.get_server_certificate, tuple(address.split(":")))
        authority.issue("server")

        async def renewed() -> bool:
            return await asyncio.to_thread(ssl.get_server_certificate, tuple(address.split(":"))) != before

        await until(renewed)
        assert server.is_running()
