"""The console: a static page that calls the contract as JSON, and what its caller may do.

Rule 1. The files are read once and found by their exact path, so no request reaches the file system.
Rule 2. The page may load and call this origin only, and the browser refuses to make markup of text (trusted types).
"""

from __future__ import annotations

import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.responses import JSONResponse, Response

from memstream_server.rpc.http.callers import ask_rights

if TYPE_CHECKING:
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
        asked = await ask_rights(self._rights_of, RIGHTS, scope, query.get("namespace", [""])[0])
        if isinstance(asked, Response):
            return asked
        principal, verbs = asked
        return JSONResponse({"principal": principal, "rights": [verb.value for verb in verbs]})
