"""A memory as tools of the Model Context Protocol: context, observe, recall, correct, forget and list; for an operator
also history, receipts, replay, restore and edits of blocks. The memory's blocks are resources.

They call a running server:

    async with memstream.connect("127.0.0.1:7700") as client:
        await serve_stdio(mcp_server(client, "demo/joy"))

A tool that fails returns an error with advice, and the connection stays open. This package needs the extra
`mcp`; the command `memstream mcp` serves the same tools.

Modules:
server: the MCP server: tools, resources and subscriptions.
tools, operator: the tools of agents and of operators.
schema: types and descriptions of their arguments.
results: their results, as structure and as compact text.
turns: what a host has of a context, for the call that continues it.
plain: explains errors to models, and reads the lines of a host.
access: the memory and the credentials of a request.
"""

from __future__ import annotations

import socket
from typing import Any, cast

import anyio
import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from memstream.arguments import check_arguments
from memstream.client import Client
from memstream.mcp.access import HTTP_PATH, HttpAuth, MemoryOfCaller, OneMemory, caller_token, depends_on_request
from memstream.mcp.plain import HostLines, WholeCharacters
from memstream.mcp.server import INSTRUCTIONS, build_server

__all__ = ["HTTP_PATH", "INSTRUCTIONS", "HttpAuth", "caller_token", "mcp_server", "serve_http", "serve_stdio"]


@check_arguments
def mcp_server(
    client: Client, path: str, *, any_memory: bool = False, operator: bool = False, target: str = "the server"
) -> Server[Any]:
    """An MCP server of the memory `path`.

    `{project}` in it is the project of the host (see memstream.projects). Over HTTP, `{sub}` or another name is that
    claim of the caller's token, and the path `{url}` is the memory of the URL; with OAuth the client should have the
    token `caller_token`. `any_memory`: its tools can name other memories. `operator`: it has the operator's tools, too.
    """
    access = MemoryOfCaller if depends_on_request(path) else OneMemory
    return build_server(access(client, path, target), any_memory=any_memory, operator=operator)


async def serve_stdio(server: Server[Any]) -> None:
    """Serves one host over standard input and output, until the input ends."""
    lines = HostLines()
    async with stdio_server(stdin=cast("anyio.AsyncFile[str]", lines)) as (received, sent):
        lines.send = sent.send
        await server.run(received, sent, server.create_initialization_options())


async def serve_http(server: Server[Any], bound: socket.socket, auth: HttpAuth | None = None) -> None:
    """Serves any number of hosts over streamable HTTP at HTTP_PATH of a bound socket, until SIGTERM or SIGINT.

    `auth`: which bearer tokens are accepted, and the path below which memories are; None accepts every request.
    """
    app = server.streamable_http_app(
        streamable_http_path=auth.path if auth else HTTP_PATH,
        host=str(bound.getsockname()[0]),
        auth=auth.settings if auth else None,
        token_verifier=auth.verifier if auth else None,
        transport_security=auth.security if auth else None,
    )
    await uvicorn.Server(uvicorn.Config(WholeCharacters(app), log_level="warning")).serve(sockets=[bound])
