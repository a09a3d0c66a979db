"""`memstream mcp` as an OAuth 2.1 resource server, before a server with rights."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from mcp.client import Client
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

from tests.cli.mcp_clients import DEADLINE_S, done, over_http, refused
from tests.support.server import ServerProcess

ISSUER, RESOURCE = "https://login.example.org", "https://memory.example.org/mcp"
POLICY = """
[[grant]]
who = ["jwt:ann"]
namespaces = ["ann", "user"]
verbs = ["*"]

[[grant]]
who = ["jwt:bob@example.org"]
namespaces = ["bob", "user"]
verbs = ["*"]
"""


@dataclass(frozen=True)
class Guarded:
    """A server that knows the issuer, and the issuer's signature."""

    server: ServerProcess
    jwks: Path
    token: Callable[..., str]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("oauth")
    key = ec.generate_private_key(ec.SECP256R1())
    public = json.loads(ECAlgorithm.to_jwk(key.public_key())) | {"kid": "k", "alg": "ES256", "use": "sig"}
    (directory / "jwks.json").write_text(json.dumps({"keys": [public]}))
    (directory / "policy.toml").write_text(POLICY)

    def token(sub: str, **other: Any) -> str:
        said = {"iss": ISSUER, "aud": RESOURCE, "exp": time.time() + 600, "sub": sub, "scope": "memory"} | other
        return jwt.encode(said, key, algorithm="ES256", headers={"kid": "k"})

    settings = {
        "jwt_jwks": str(directory / "jwks.json"),
        "jwt_issuer": ISSUER,
        "jwt_audience": RESOURCE,
        "access_policy_file": str(directory / "policy.toml"),
    }
    with ServerProcess(directory / "data", **settings) as server:
        yield Guarded(server, directory / "jwks.json", token)


def served(guarded: Guarded, memory: str) -> Any:
    """The URL of the command with OAuth."""
    options = ("--oauth-issuer", ISSUER, "--oauth-jwks", str(guarded.jwks), "--resource-url", RESOURCE)
    return over_http(memory, guarded.server.address, *options, "--oauth-scope", "memory")


@asynccontextmanager
async def calling(url: str, token: str) -> AsyncIterator[Client]:
    """A client with a token."""
    async with (
        create_mcp_http_client(headers={"Authorization": f"Bearer {token}"}) as http,
        Client(streamable_http_client(url, http_client=http), read_timeout_seconds=DEADLINE_S) as client,
    ):
        yield client


async def test_a_host_without_a_token_is_led_to_the_issuer(guarded: Guarded) -> None:
    async with served(guarded, "user/{sub}") as url, httpx2.AsyncClient(timeout=60) as http:
        metadata = "https://memory.example.org/.well-known/oauth-protected-resource/mcp"
        stranger = ec.generate_private_key(ec.SECP256R1())
        said = {"iss": ISSUER, "aud": RESOURCE, "exp": time.time() + 600, "sub": "ann", "scope": "memory"}
        for token, status in (
            ("", 401),
            (guarded.token("ann", aud="https://other.example.org"), 401),
            (guarded.token("ann", iss="https://evil.example.org"), 401),
            (guarded.token("ann", exp=time.time() - 600), 401),
            (jwt.encode(said, stranger, algorithm="ES256", headers={"kid": "k"}), 401),
            (guarded.token("ann", scope="other"), 403),
        ):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            answer = await http.post(url, json={"jsonrpc": "2.0", "id": 1, "method": "ping"}, headers=headers)
            assert answer.status_code == status
            assert f'resource_metadata="{metadata}"' in answer.headers["www-authenticate"]
        found = (await http.get(url.replace("/mcp", "/.well-known/oauth-protected-resource/mcp"))).json()
        assert (found["resource"], found["authorization_servers"]) == (RESOURCE, [ISSUER])
        assert found["scopes_supported"] == ["memory"]


async def test_each_caller_has_the_memory_of_its_claim(guarded: Guarded) -> None:
    async with (
        served(guarded, "user/{sub}") as url,
        calling(url, guarded.token("ann")) as ann,
        calling(url, guarded.token("bob@example.org")) as bob,
    ):
        await done(ann, "observe", content="Ann plays the cello")
        assert (await done(ann, "list"))["memory"] == "user/ann"
        assert await done(bob, "list") == {"memory": "user/u~bob~40example.org", "fragments": []}


async def test_rights_of_the_caller_hold_for_the_urls_memory(guarded: Guarded) -> None:
    async with served(guarded, "{url}") as template:
        url = template.replace("{namespace}", "ann").replace("{memory}", "work")
        async with calling(url, guarded.token("ann")) as ann, calling(url, guarded.token("bob@example.org")) as bob:
            await done(ann, "observe", content="Ann plays the cello")
            assert [one["content"] for one in (await done(ann, "list"))["fragments"]] == ["Ann plays the cello"]
            for tool, arguments in (("list", {}), ("recall", {"query": "cello"}), ("observe", {"content": "mine"})):
                assert "does not have the right" in await refused(bob, tool, **arguments)


async def test_no_caller_continues_the_context_of_another(guarded: Guarded) -> None:
    asked = {"question": "Who plays the cello?"}
    async with served(guarded, "{url}") as template:
        url = template.replace("{namespace}", "user").replace("{memory}", "team")
        async with calling(url, guarded.token("ann")) as ann:
            await done(ann, "observe", content="Ann plays the cello")
            after = (await done(ann, "context", **asked))["after"]
        async with calling(url, guarded.token("ann")) as ann, calling(url, guarded.token("bob@example.org")) as bob:
            assert "unknown_after" not in await done(ann, "context", **asked, after=after)
            assert (await done(bob, "context", **asked, after=after))["unknown_after"] == after
