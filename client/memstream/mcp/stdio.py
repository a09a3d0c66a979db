"""Reads a host's messages from standard input. A message that the MCP library would drop gets an answer.

JavaScript hosts cut texts inside an emoji, which leaves half a surrogate pair: it is read as U+FFFD.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp.types import INVALID_REQUEST, PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter
from pydantic import ValidationError

Send = Callable[[SessionMessage], Awaitable[None]]
_SENTENCES = {
    PARSE_ERROR: "the line is not JSON: send each message as one JSON object on one line",
    INVALID_REQUEST: 'the message is not JSON-RPC: it needs "jsonrpc": "2.0", a "method" and "params" as an object',
}


class HostLines:
    """The lines of standard input that are messages. `send` is set to what sends an error for any other line."""

    def __init__(self) -> None:
        # Another file object: the library's would close standard input.
        lines = open(sys.stdin.fileno(), encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        self._lines = anyio.wrap_file(lines)
        self.send: Send | None = None

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
