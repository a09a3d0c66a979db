"""Explains what is invalid in a tool's arguments in one sentence, and reads the lines of a host.

A line of standard input that is no message, which the MCP library would drop, gets an answer. JavaScript hosts cut
texts inside an emoji, which leaves half a surrogate pair: it is read as U+FFFD.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import anyio
from mcp.server.transport_security import DEFAULT_MAX_REQUEST_BODY_SIZE
from mcp.shared.message import SessionMessage
from mcp.types import (
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memstream.argument_types import show_value

SendMessage = Callable[[SessionMessage], Awaitable[None]]
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape of a half; most are in pairs, which stay the same."""
_SENTENCES = {
    PARSE_ERROR: "the line is not JSON: send each message as one JSON object on one line",
    INVALID_REQUEST: 'the message is not JSON-RPC: it needs "jsonrpc": "2.0", a "method" and "params" as an object',
}
_PLAINER = {
    "missing": "is required",
    "string_pattern_mismatch": "is not in the form that its description shows",
}
_SAY_WHAT_CAME = ("missing", "too_short", "too_long")
"""Errors whose message needs no input value, or cannot show it."""


def explain_errors(errors: Iterable[Mapping[str, Any]]) -> str:
    """The invalid arguments and why, each once, whatever alternatives pydantic tried."""
    found: dict[str, list[str]] = {}
    came: dict[str, str] = {}
    for error in errors:
        place = ".".join(map(str, error["loc"][:2]))  # deeper levels name pydantic's alternatives
        found.setdefault(place, []).append(_explain_error(error))
        if error["type"] not in _SAY_WHAT_CAME:
            came[place] = f", not {show_value(error['input'])}"
    return "; ".join(f"{place} {_join_alternatives(whats)}{came.get(place, '')}" for place, whats in found.items())


def _explain_error(error: Mapping[str, Any]) -> str:
    what = _PLAINER.get(error["type"]) or str(error["msg"]).removeprefix("Value error, ").replace(
        " after validation", ""
    )
    subject, should, rest = what.partition(" should ")
    return f"must {rest}" if should and " " not in subject else what


def _join_alternatives(whats: list[str]) -> str:
    alternatives = list(dict.fromkeys(what.removeprefix("must be ") for what in whats))
    return f"must be {' or '.join(alternatives)}" if all(what.startswith("must be ") for what in whats) else whats[0]


class HostLines:
    """The lines of standard input that are messages. `send` is set to what sends an error for any other line."""

    def __init__(self) -> None:
        # Another file object: the library's would close standard input.
        lines = open(sys.stdin.fileno(), encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        self._lines = anyio.wrap_file(lines)
        self.send: SendMessage | None = None

    async def __aiter__(self) -> AsyncIterator[str]:
        async for line in self._lines:
            message, code = _read_message(line)
            if code:
                await self._reject(message, code)
            elif message is not None:
                yield json.dumps(message)

    async def _reject(self, message: Any, code: int) -> None:
        called = message.get("id") if isinstance(message, dict) else None
        known = called if _is_id(called) else None
        error = JSONRPCError(jsonrpc="2.0", id=known, error=ErrorData(code=code, message=_SENTENCES[code]))
        assert self.send is not None
        await self.send(SessionMessage(error))


class WholeCharacters:
    """An ASGI application whose JSON bodies have no half surrogate pair, which the library would refuse as no JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        parts: list[Message] = []
        size = 0
        while not parts or (parts[-1].get("more_body") and size <= DEFAULT_MAX_REQUEST_BODY_SIZE):
            parts.append(await receive())
            size += len(parts[-1].get("body", b""))
        body = b"".join(part.get("body", b"") for part in parts)
        if size <= DEFAULT_MAX_REQUEST_BODY_SIZE and _HALF.search(body):
            with contextlib.suppress(ValueError, RecursionError):  # the library says what is wrong
                whole = _whole_characters(json.dumps(json.loads(body), ensure_ascii=False)).encode()
                parts = [{"type": "http.request", "body": whole, "more_body": False}]
                headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
                scope = {**scope, "headers": [*headers, (b"content-length", str(len(whole)).encode())]}

        async def replay() -> Message:
            return parts.pop(0) if parts else await receive()

        await self._app(scope, replay, send)


def _read_message(line: str) -> tuple[Any, int]:
    """(the message, 0), (what was read instead, the code of the error), or (None, 0) for an empty line."""
    if not line.strip():
        return None, 0
    try:
        message = json.loads(_whole_characters(json.dumps(json.loads(line), ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None, PARSE_ERROR
    try:
        jsonrpc_message_adapter.validate_python(message, by_name=False)
    except ValidationError:
        return message, INVALID_REQUEST
    # The library takes a request with another id for a notification, and never answers it.
    return message, 0 if "id" not in message or _is_id(message["id"]) else INVALID_REQUEST


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _whole_characters(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
