"""Clients of `memstream mcp`: the mcp package's own, and a host's process line by line."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.types import ContentBlock, Implementation, TextContent

import memstream
from memstream.mcp import mcp_server
from tests.cli.commands import COMMAND, environment

DEADLINE_S = 120
INITIALIZE = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


def parameters(memory: str, target: str, *options: str) -> StdioServerParameters:
    """The parameters with which a host starts the command."""
    return StdioServerParameters(
        command=COMMAND[0], args=[*COMMAND[1:], "mcp", "--memory", memory, *options], env=environment(target)
    )


@asynccontextmanager
async def in_process(
    memory: str, target: str, operator: bool = False, mode: Literal["auto", "legacy"] = "auto", host: str = "test"
) -> AsyncIterator[Client]:
    """A client of the tools without the command: an interpreter that imports `mcp` takes a second of CPU."""
    async with memstream.connect(target) as sdk:
        served = mcp_server(sdk, memory, target=target, operator=operator)
        info = Implementation(name=host, version="1")
        async with Client(served, read_timeout_seconds=DEADLINE_S, mode=mode, client_info=info) as client:
            yield client


@asynccontextmanager
async def over_http(memory: str, target: str, *options: str) -> AsyncIterator[str]:
    """The URL that the HTTP process announces."""
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "mcp", "--memory", memory, "--transport", "http", "--listen", "127.0.0.1:0", "--json", *options),
        env=environment(target) | {"PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = json.loads(await asyncio.wait_for(process.stdout.readline(), DEADLINE_S))
        assert line["memory"] == memory
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/mcp(/\{namespace\}/\{memory\})?", line["url"])
        yield line["url"]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) in (0, -signal.SIGTERM)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def done(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """The structured result of a successful call."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    assert result.structured_content is not None
    assert len(result.content) == 1
    return dict(result.structured_content)


async def shown(client: Client, tool: str, **arguments: Any) -> str:
    """The text of a successful call."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return content_text(result.content)


def content_text(content: Sequence[ContentBlock]) -> str:
    """The text of a result, which is its first block."""
    assert isinstance(content[0], TextContent)
    return content[0].text


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    """The text of a failed call."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.structured_content
    return content_text(result.content)


def observing(number: object, content: str = "Ann plays the cello") -> str:
    """A request as a host writes it; `content` may have JSON escapes."""
    arguments = f'{{"name": "observe", "arguments": {{"content": "{content}"}}}}'
    return f'{{"jsonrpc": "2.0", "id": {json.dumps(number)}, "method": "tools/call", "params": {arguments}}}'


@asynccontextmanager
async def host_process(memory: str, target: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, started as a host does and initialized."""
    given = parameters(memory, target)
    process = await asyncio.create_subprocess_exec(
        *(given.command, *given.args),
        env=given.env,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    try:
        first = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE}
        assert (await answered(process, json.dumps(first)))["id"] == 0
        await write_line(process, '{"jsonrpc": "2.0", "method": "notifications/initialized"}')
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def write_line(process: asyncio.subprocess.Process, line: str) -> None:
    """Write one line."""
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
    await process.stdin.drain()


async def answered(process: asyncio.subprocess.Process, line: str) -> dict[str, Any]:
    """The next message after `line` is written."""
    await write_line(process, line)
    assert process.stdout is not None
    answer: dict[str, Any] = json.loads(await asyncio.wait_for(process.stdout.readline(), DEADLINE_S))
    return answer
