"""The pages of the HTTP port: the console, and Prometheus metrics at `/metrics`.

Rule 1. The console's files are read once and found by their exact path, so no request reaches the file system.
Rule 2. The console may load and call this origin only, and the browser refuses to make markup of text (trusted types).
Rule 3. The metrics sum up all tenants, so they take the right `admin` in the namespace "*". Without authentication
every caller has every right, and the port is reachable from this machine alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from connectrpc.code import Code
from prometheus_client.exposition import choose_encoder
from starlette.responses import JSONResponse, Response

from memstream_server.rpc.access.caller import Verb
from memstream_server.rpc.http.call import HttpCall, metadata_of
from memstream_server.rpc.http.codecs import connect_error

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from memstream_server.rpc.http.port import RightsOf


FOLDER = Path(__file__).parents[2] / "console"
RIGHTS = "/console/rights"
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
METRICS = "/metrics"
_PRELOAD = b"<!-- modulepreload -->"
"""Where the page gets a link to every module."""
_FIRST_MODULE = "boot.js"
"""The page loads it itself."""
_STATUS = {Code.UNAUTHENTICATED: 401, Code.PERMISSION_DENIED: 403, Code.INVALID_ARGUMENT: 400}


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page."""

    body: bytes
    media_type: str
    etag: str


def read_files(folder: Path = FOLDER) -> dict[str, File]:
    """The files by path: `/` is the page, the others are below /console/."""
    found: dict[str, File] = {}
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    for name, path in paths.items():
        if path.suffix not in (".html", ".js", ".css"):
            continue
        body = path.read_bytes()
        if path.suffix == ".html":
            body = body.replace(_PRELOAD, _preload_modules(paths).encode())
        media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        if path.suffix == ".js":
            media_type = "text/javascript"  # on some systems the table of types has another one
        file = File(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:24]}"')
        found["/" if name == "index.html" else f"/console/{name}"] = file
    return found


def _preload_modules(names: Iterable[str]) -> str:
    """Links that load all modules at once: an import is otherwise found only after the file with it has come."""
    modules = (name for name in names if name.endswith(".js") and name != _FIRST_MODULE)
    return "\n".join(f'<link rel="modulepreload" href="console/{name}">' for name in modules)


class Console:
    """An ASGI application for `/` and `/console/`."""

    def __init__(self, rights_of: RightsOf, files: dict[str, File] | None = None) -> None:
        self._rights_of = rights_of
        self._files = read_files() if files is None else files

    def serves(self, path: str) -> bool:
        """Whether the path is the console's."""
        return path == "/" or path.startswith("/console/")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            respond: Response = JSONResponse({"code": "unimplemented", "message": "the console takes GET"}, 405)
        elif scope["path"] == RIGHTS:
            respond = await self._describe_caller(scope)
        else:
            respond = self._find_file(scope)
        await respond(scope, receive, send)

    def _find_file(self, scope: Any) -> Response:
        file = self._files.get(scope["path"])
        if file is None:
            return JSONResponse({"code": "not_found", "message": "the console has no such file"}, 404)
        headers = SECURITY_HEADERS | {"etag": file.etag, "cache-control": "no-cache"}
        if dict(scope["headers"]).get(b"if-none-match", b"").decode("latin-1") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)

    async def _describe_caller(self, scope: Any) -> Response:
        """The caller's principal and its rights in `?namespace=`, or for the whole server without one."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        asked = await ask_rights(self._rights_of, RIGHTS, scope, query.get("namespace", [""])[0])
        if isinstance(asked, Response):
            return asked
        principal, verbs = asked
        return JSONResponse({"principal": principal, "rights": [verb.value for verb in verbs]})


class MetricsPage:
    """An ASGI application for `/metrics`."""

    def __init__(self, registry: CollectorRegistry, rights_of: RightsOf) -> None:
        self._registry = registry
        self._rights_of = rights_of

    def serves(self, path: str) -> bool:
        """Whether the path is this page's."""
        return path == METRICS

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        respond = await self._answer(scope)
        await respond(scope, receive, send)

    async def _answer(self, scope: Any) -> Response:
        if scope["method"] not in ("GET", "HEAD"):
            return JSONResponse({"code": "unimplemented", "message": "the metrics take GET"}, 405)
        asked = await ask_rights(self._rights_of, METRICS, scope, "")
        if isinstance(asked, Response):
            return asked
        principal, verbs = asked
        if Verb.ADMIN not in verbs:
            message = f'{principal} needs the right admin in the namespace "*": metrics sum up all tenants'
            return JSONResponse({"code": "permission_denied", "message": message}, 403)
        accepted = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
        encode, media_type = choose_encoder(accepted)
        body = await asyncio.to_thread(encode, self._registry)  # takes milliseconds, which the event loop does not have
        return Response(body, headers={"content-type": media_type})


async def ask_rights(rights_of: RightsOf, path: str, scope: Any, namespace: str) -> tuple[str, list[Verb]] | Response:
    """The caller's principal and rights in the namespace (empty: the whole server), or the answer that refuses it."""
    client = scope.get("client") or ("", 0)
    try:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        return await rights_of(path, HttpCall(metadata_of(headers), f"{client[0]}:{client[1]}", None), namespace)
    except ValueError as error:
        return JSONResponse({"code": "invalid_argument", "message": str(error)}, 400)
    except Exception as error:
        refused = connect_error(error)
        answer = {"code": refused.code.value, "message": refused.message}
        return JSONResponse(answer, _STATUS.get(refused.code, 503))
