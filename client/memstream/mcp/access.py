"""The memory and the credentials of a request.

Over standard input there is one host: its memory is named on the command line, and `{project}` in the name is the
project of the host's first root, or of the working directory. Over HTTP the name may depend on who asks, `{sub}` or
another claim of the token, or on the URL: `{url}`. With OAuth every call to the memstream server has the caller's own
token, so the server's rights apply; nothing that one caller learned is given to another.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.auth.settings import AuthSettings
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp.types import ListRootsRequest, ListRootsResult
from pydantic import AnyHttpUrl

from memstream.client import Client
from memstream.errors import InvalidArgument
from memstream.mcp.operator import OperatorTools
from memstream.mcp.server import Context
from memstream.mcp.turns import Turns
from memstream.names import memory_name
from memstream.projects import PLACEHOLDER, directory_of, fill_project

HTTP_PATH = "/mcp"
URL = "{url}"
ROOTS_TIMEOUT_S = 5.0
_CLAIM = re.compile(r"\{([A-Za-z0-9_:./-]+)\}")
_CALLER_TOKEN: ContextVar[str] = ContextVar("memstream_mcp_token", default="")
_LOOPBACK = ("127.0.0.1:*", "localhost:*", "[::1]:*")

Claims = Mapping[str, Any]
VerifyClaims = Callable[[str], Awaitable[Claims | None]]
"""The claims of a token that was issued for this server, or None."""


def caller_token() -> str:
    """The token of the request that is being answered, for `memstream.connect(target, token=caller_token)`."""
    return _CALLER_TOKEN.get()


class OneMemory:
    """One memory for every request, of the host's project if its name has `{project}`."""

    def __init__(self, client: Client, path: str, target: str) -> None:
        self._client, self._path, self._target = client, path, target
        self._turns = Turns()
        self._tools: dict[str, OperatorTools] = {}
        client.memory(path.replace(PLACEHOLDER, "project"))  # raises InvalidArgument

    async def __call__(self, context: Context) -> OperatorTools:
        path = self._path
        if PLACEHOLDER in path:
            state = context.session._connection.state  # lives as long as the host's connection
            async with state.setdefault("memstream.asks", anyio.Lock()):  # the first calls may come together
                if "memstream.path" not in state:
                    state["memstream.path"] = fill_project(path, await _host_directory(context))
            path = state["memstream.path"]
        if path not in self._tools:
            self._tools[path] = OperatorTools(self._client, path, self._target, self._turns)
        return self._tools[path]


class MemoryOfCaller:
    """A memory by the claims of the caller's token, or by the URL; new tools for each request."""

    def __init__(self, client: Client, path: str, target: str) -> None:
        self._client, self._path, self._target = client, path, target
        self._turns = Turns()

    async def __call__(self, context: Context) -> OperatorTools:
        request = context.request
        assert request is not None, "served over HTTP"
        path, user, caller = self._path, request.scope.get("user"), ""
        if isinstance(user, AuthenticatedUser):
            caller = json.dumps([user.access_token.client_id, user.access_token.subject])
            if user.access_token.claims is not None:  # of OAuth; the one token of --http-token-file is ours alone
                _CALLER_TOKEN.set(user.access_token.token)
            path = _CLAIM.sub(lambda found: _claim_name(found[1], user.access_token), path) if path != URL else path
        if path == URL:
            path = "{namespace}/{memory}".format(**request.path_params)
        return OperatorTools(self._client, path, self._target, self._turns, caller)


def depends_on_request(path: str) -> bool:
    """Whether the name of the memory has a claim or the URL in it."""
    return bool(_CLAIM.search(path.replace(PLACEHOLDER, "")))


@dataclass(frozen=True, slots=True)
class HttpAuth:
    """The tokens that HTTP accepts, and the path that it serves."""

    path: str
    settings: AuthSettings | None = None
    verifier: TokenVerifier | None = None
    security: TransportSecuritySettings | None = None

    @classmethod
    def of_token(cls, path: str, token: str) -> HttpAuth:
        """One bearer token, which grants everything."""
        # The package requires an issuer URL; without a resource URL it never publishes it.
        settings = AuthSettings(issuer_url=AnyHttpUrl("http://localhost"), resource_server_url=None)
        return cls(path, settings, _OneToken(token))

    @classmethod
    def of_issuer(cls, path: str, verify: VerifyClaims, issuer: str, resource: str, scopes: list[str]) -> HttpAuth:
        """The access tokens of an OAuth 2.1 authorization server for the resource at the URL `resource`, which `verify`
        checks. Publishes RFC 9728 metadata and names it in `WWW-Authenticate`."""
        # Validated from text: an AnyHttpUrl made here would add a "/" to an issuer without a path.
        settings = AuthSettings.model_validate(
            {
                "issuer_url": issuer,
                "resource_server_url": resource,
                "required_scopes": scopes or None,
                "validate_token_resource": False,  # `verify` checks the audience
            }
        )
        public = urlsplit(resource)
        security = TransportSecuritySettings(
            enable_dns_rebinding_protection=True,
            allowed_hosts=[*_LOOPBACK, public.netloc],
            allowed_origins=[*(f"http://{host}" for host in _LOOPBACK), f"{public.scheme}://{public.netloc}"],
        )
        return cls(path, settings, _IssuedTokens(verify), security)


class _OneToken:
    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def verify_token(self, token: str) -> AccessToken | None:
        known = secrets.compare_digest(token.encode(), self._token)
        return AccessToken(token=token, client_id="holder", scopes=[]) if known else None


class _IssuedTokens:
    def __init__(self, verify: VerifyClaims) -> None:
        self._verify = verify

    async def verify_token(self, token: str) -> AccessToken | None:
        claims = await self._verify(token)
        if claims is None:
            return None
        scope = claims.get("scope", "")
        return AccessToken(
            token=token,
            client_id=str(claims.get("client_id") or claims.get("azp") or claims["sub"]),
            scopes=scope.split() if isinstance(scope, str) else [],
            subject=claims["sub"],
            claims=dict(claims),
        )


def _claim_name(name: str, token: AccessToken) -> str:
    """The claim as a name: any text has one of its own, without "/"."""
    value = (token.claims or {}).get(name)
    if not isinstance(value, str) or not value:
        raise InvalidArgument("memory", f"the token has no claim {name} with text")
    return memory_name(value)


async def _host_directory(context: Context) -> Path:
    """The first root of a host that has roots and can be asked, or the working directory."""
    capabilities = context.session.client_capabilities
    if capabilities is not None and capabilities.roots is not None and context.session.can_send_request:
        try:
            answer = await context.session.send_request(
                ListRootsRequest(), ListRootsResult, request_read_timeout_seconds=ROOTS_TIMEOUT_S
            )
        except MCPError:
            return Path.cwd()
        for root in answer.roots:
            if (directory := directory_of(str(root.uri))) is not None:
                return directory
    return Path.cwd()
