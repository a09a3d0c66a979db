"""Who calls a page of the HTTP port, and what that caller may do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from connectrpc.code import Code
from starlette.responses import JSONResponse, Response

from memstream_server.rpc.http.call import HttpCall, metadata_of
from memstream_server.rpc.http.errors import connect_error

if TYPE_CHECKING:
    from memstream_server.rpc.access.caller import Verb
    from memstream_server.rpc.http.port import RightsOf

_STATUS = {Code.UNAUTHENTICATED: 401, Code.PERMISSION_DENIED: 403, Code.INVALID_ARGUMENT: 400}


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
