"""The ASGI application of the HTTP port: hosts, origins, security headers and health around the rpcs.

Rule 1. A request must name a host of ours (`http_hosts`, the loopback names, the address that the port listens at):
a page that rebinds its DNS name to this address names its own host.
Rule 2. A request from a page (it has an Origin) must come from the same host and port, or from `http_cors_origins`.
Rule 3. The body of a request must arrive within `opening_max_s`.
Rule 4. Headers are UTF-8, which ConnectRPC decodes without a check, and gRPC itself needs HTTP/2 and its own port.
Rule 5. An error without a body, as ConnectRPC answers an unknown path, method or content type, says what a call is.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from memstream_server.engine.errors import EngineError, QueryTimeout
from memstream_server.rpc.http.event_stream import EventStream, asks_for_events
from memstream_server.rpc.http.port import PEER_URIS, Asgi, Receive, Scope, Send
from memstream_server.rpc.validation import invalid_field, quote_text

_refusal: ContextVar[EngineError | None] = ContextVar("refusal", default=None)
_peer_uris: ContextVar[tuple[bytes, ...]] = ContextVar("peer_uris", default=())
OPENAPI_PATH = "/openapi.json"
_OPENAPI = Path(__file__).with_name("openapi.json")
"""Written by scripts/document.py from the contract."""
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_CHECKED = {
    b"connect-timeout-ms": (re.compile(rb"\d{1,10}"), "milliseconds, at most ten digits"),
    b"grpc-timeout": (re.compile(rb"\d{1,8}[HMSmun]"), "at most eight digits and one of H, M, S, m, u, n"),
    b"connect-protocol-version": (re.compile(b"1"), "1"),
}
"""Headers that ConnectRPC refuses without a reason if they do not have this form."""
_GRPC = re.compile(rb"application/grpc(?!-web)", re.IGNORECASE)
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]
_REASONS = {
    404: "there is no such rpc: a call is a POST to /memstream.v1.SERVICE/METHOD",
    405: "a call is a POST",
    415: "set the header content-type to application/json, for Watch, WatchMessages and ExportMemories to "
    "application/connect+json; Observe, Recall and ImportMemories need the gRPC port",
}
"""By status."""
_HEALTH = {
    "/healthz": ("", "not serving\n"),
    "/healthz/write": ("memstream.journal.write", "writes are refused; reads may work\n"),
}
"""By path: the service of grpc.health.v1 that must serve, and what an answer of 503 says."""
_EXPOSED = (
    *("x-request-id", "retry-after", "www-authenticate", "grpc-status", "grpc-message", "grpc-status-details-bin"),
    "connect-content-encoding",
)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What the application lets in."""

    hosts: frozenset[str]
    """Names in lower case, without port."""
    cors_origins: tuple[str, ...]
    body_max_s: float


class Page(Protocol):
    """An ASGI application for some paths."""

    def serves(self, path: str) -> bool: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class HttpApplication:
    """Wraps the rpcs, with pages of other paths."""

    def __init__(
        self, rpcs: Asgi, settings: HttpSettings, serves: Callable[[str], bool], pages: Sequence[Page] = ()
    ) -> None:
        self._serves = serves
        self._pages = pages
        self._settings = settings
        self._rpcs: Asgi = rpcs
        self._events: Asgi = EventStream(rpcs)
        if settings.cors_origins:
            self._rpcs, self._events = (
                CORSMiddleware(
                    each,
                    allow_origins=settings.cors_origins,
                    allow_methods=("GET", "POST"),
                    allow_headers=("*",),
                    expose_headers=_EXPOSED,
                    max_age=7_200,
                )
                for each in (self._rpcs, self._events)
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        _peer_uris.set(scope.get("state", {}).get(PEER_URIS, ()))
        headers = dict(scope["headers"])
        refusal = check_headers(headers)
        _refusal.set(refusal)
        if refusal is not None:  # endpoints.py raises it in the form of the request's protocol
            kept = [each for each in scope["headers"] if each[0] not in _CHECKED]
            scope = {**scope, "headers": kept}
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        respond: Asgi = self._rpcs
        if not all(map(_is_text, headers.values())):
            respond = _error(400, "invalid_argument", "a header is not UTF-8")
        elif _GRPC.match(headers.get(b"content-type", b"")):
            respond = _error(415, "unimplemented", "gRPC needs the gRPC port; this one takes Connect and gRPC-Web")
        elif host_name(host) not in self._settings.hosts:
            respond = _error(403, "permission_denied", "the request names a host that is not in http_hosts")
        elif service := _HEALTH.get(scope["path"]):
            respond = self._health(*service)
        elif origin and not self._allows_origin(origin, host, scope.get("scheme", "http")):
            respond = _error(403, "permission_denied", "pages of this origin may not call: see http_cors_origins")
        elif scope["path"] == OPENAPI_PATH and scope["method"] in ("GET", "HEAD"):
            respond = Response(_OPENAPI.read_bytes(), media_type="application/json")
        elif page := next((each for each in self._pages if each.serves(scope["path"])), None):
            respond = page
        elif asks_for_events(scope):
            respond = self._events
        if not headers.get(b"content-type", b"").startswith(b"application/grpc-web"):
            send = _with_reason(send)
        await respond(scope, _bounded(receive, self._settings.body_max_s), _with_headers(send))

    def _allows_origin(self, origin: str, host: str, scheme: str) -> bool:
        # https: a proxy with TLS before a plain port. Without one no page is there: a port speaks one of the two.
        own = {f"{scheme}://{host}", f"https://{host}"}
        return origin in own or bool({origin, "*"} & set(self._settings.cors_origins))

    def _health(self, service: str, failing: str) -> Asgi:
        serves = self._serves(service)
        return PlainTextResponse("ok\n" if serves else failing, 200 if serves else 503)


def current_refusal() -> EngineError | None:
    """Why the headers of the current request cannot be used."""
    return _refusal.get()


def check_headers(headers: Mapping[bytes, bytes]) -> EngineError | None:
    """Why a call cannot have these headers. A timeout of 0 has passed, as in gRPC."""
    for name, (form, expected) in _CHECKED.items():
        value = headers.get(name)
        if value is None:
            continue
        if not form.fullmatch(value):
            given = quote_text(value.decode("latin-1"))
            return invalid_field(name.decode(), f"is {given}, expected are {expected}")
        if b"timeout" in name and not value.rstrip(b"HMSmun").strip(b"0"):
            return QueryTimeout("the call's timeout is 0: its deadline has passed")
    return None


def peer_uris() -> tuple[bytes, ...]:
    """URIs of the client certificate of the current request; empty without one."""
    return _peer_uris.get()


def host_name(host: str) -> str:
    """The name of a Host header, in lower case, without port and brackets; empty if malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def allowed_hosts(listen_host: str, given: Sequence[str]) -> frozenset[str]:
    """The hosts that requests may name."""
    return frozenset({*LOOPBACK_HOSTS, listen_host.lower(), *(each.lower() for each in given)})


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _error(status: int, code: str, message: str) -> Asgi:
    return JSONResponse({"code": code, "message": message}, status)


def _bounded(receive: Receive, limit_s: float) -> Receive:
    """`receive`, which reports a disconnect if the body takes longer than `limit_s`."""
    loop = asyncio.get_running_loop()
    deadline_s: float | None = loop.time() + limit_s

    async def receive_in_time() -> MutableMapping[str, Any]:
        nonlocal deadline_s
        if deadline_s is None:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline_s):
                message = await receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        if not message.get("more_body", False):
            deadline_s = None
        return message

    return receive_in_time


def _with_reason(send: Send) -> Send:
    """`send`, which gives the errors in _REASONS a body if they have none."""
    start: MutableMapping[str, Any] | None = None

    async def send_with_reason(message: MutableMapping[str, Any]) -> None:
        nonlocal start
        if message["type"] == "http.response.start" and message["status"] in _REASONS:
            start = message  # its headers depend on the body
            return
        if start is not None:
            if not message.get("body") and not message.get("more_body"):
                error = {"code": "unimplemented", "message": _REASONS[start["status"]]}
                message["body"] = json.dumps(error).encode()
                kept = [each for each in start.get("headers", ()) if each[0].lower() != b"content-length"]
                start["headers"] = [*kept, (b"content-type", b"application/json")]
            await send(start)
            start = None
        await send(message)

    return send_with_reason


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            names = {name.lower() for name, _ in given}
            message["headers"] = given + [each for each in _HEADERS if each[0] not in names]
        await send(message)

    return send_with_headers
