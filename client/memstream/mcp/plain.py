"""Checks arguments that a model passes to a tool, and explains invalid ones in one sentence.

null and "" mean that an argument is absent, as models write them. The error for an unknown argument lists the known
ones, the error for an invalid value the allowed ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from anyio import AsyncFile
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, InputRequiredResult
from pydantic import ValidationError

from memstream.argument_types import show_value
from memstream.arguments import unknown_argument
from memstream.mcp.stdio import HostLines

_PLAINER = {
    "missing": "is required",
    "string_pattern_mismatch": "is not an id as recall and list give them",
}
_SAY_WHAT_CAME = ("missing", "too_short", "too_long")
"""Errors whose message needs no input value, or cannot show it."""


class PlainServer(MCPServer[Any]):
    """An MCP server that rejects unknown arguments of its tools."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.arguments: dict[str, tuple[str, ...]] = {}
        """Argument names by tool."""

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Calls a tool; explains an error in one sentence."""
        if name not in self.arguments:
            raise ToolError(f"there is no tool {name!r}; there are {', '.join(self.arguments)}")
        given = {key: value for key, value in arguments.items() if value is not None and value != ""}
        for key in given:
            if key not in self.arguments[name]:
                raise ToolError(str(unknown_argument(key, key, name, self.arguments[name])))
        try:
            return await super().call_tool(name, given, context)
        except UnexpectedToolError:
            raise
        except ToolError as error:
            cause = error.__cause__
            if isinstance(cause, ValidationError):
                raise ToolError(explain_errors(cause.errors(include_url=False))) from cause
            raise ToolError(str(cause or error)) from cause

    async def run_stdio_async(self) -> None:
        """Serves one host over standard input and output, until the input ends."""
        lines = HostLines()
        async with stdio_server(stdin=cast("AsyncFile[str]", lines)) as (received, sent):
            lines.send = sent.send
            await self._lowlevel_server.run(received, sent, self._lowlevel_server.create_initialization_options())


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
