"""The console: a static page that calls the contract as JSON, and what its caller may do.

Rule 1. The files are read once and found by their exact path, so no request reaches the file system.
Rule 2. The page may load and call this origin only, and the browser refuses to make markup of text (trusted types).
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from connectrpc.code import Code
from starlette.responses import JSONResponse, Response

from memstream_server.rpc.access.caller import Verb
from memstream_server.rpc.http.call import HttpCall, metadata_of
from memstream_server.rpc.http.errors import connect_error

FOLDER = Path(__file__).parents[2] / "console"
RIGHTS = "/console/rights"
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_STATUS = {Code.UNAUTHENTICATED: 401, Code.PERMISSION_DENIED: 403, Code.INVALID_ARGUMENT: 400}

RightsOf = Callable[[str, Any, str], Awaitable[tuple[str, list[Verb]]]]
"""Path, context and namespace to the principal (empty without authentication) and its rights. Raises
Unauthenticated."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page."""

    body: bytes
    media_type: str
    etag: str


def read_files(folder: Path = FOLDER) -> dict[str, File]:
    """The files by path: `/` is the page, the others are below /console/."""
    found: dict[str, File] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".html", ".js", ".css"):
            continue
        name = path.relative_to(folder).as_posix()
        body = path.read_bytes()
        media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        if path.suffix == ".js":
            media_type = "text/javascript"  # on some systems the table of types has another one
        file = File(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:24]}"')
        found["/" if name == "index.html" else f"/console/{name}"] = file
    return found


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
        namespace = query.get("namespace", [""])[0]
        client = scope.get("client") or ("", 0)
        try:
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
            call = HttpCall(metadata_of(headers), f"{client[0]}:{client[1]}", None)
            principal, verbs = await self._rights_of(RIGHTS, call, namespace)
        except ValueError as error:
            return JSONResponse({"code": "invalid_argument", "message": str(error)}, 400)
        except Exception as error:
            refused = connect_error(error)
            answer = {"code": refused.code.value, "message": refused.message}
            return JSONResponse(answer, _STATUS.get(refused.code, 503))
        return JSONResponse({"principal": principal, "rights": [verb.value for verb in verbs]})
