"""`memstream mcp`: serves a memory of a running server as tools of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import socket
from pathlib import Path

import click

from memstream.client import Client
from memstream_server.cli.failures import Exit, Failure, Misuse, describe_os_error
from memstream_server.cli.options import json_option
from memstream_server.cli.server import Server, server_options

TOKEN_CHARS_MIN = 16


@click.command("mcp", short_help="Serve a memory's tools over the Model Context Protocol.")
@click.option("--memory", required=True, metavar="NAMESPACE/NAME", help="The agent's memory; created on first use.")
@click.option("--any-memory", is_flag=True, help="Let the tools use other memories of the server too.")
@click.option(
    "--transport",
    type=click.Choice(["stdio", "http"]),
    default="stdio",
    show_default=True,
    help="stdio: one host, which starts this command. http: streamable HTTP, any number of hosts.",
)
@click.option(
    "--listen",
    default="127.0.0.1:7710",
    show_default=True,
    metavar="HOST:PORT",
    help="Address for HTTP; port 0 chooses a free port.",
)
@click.option(
    "--http-token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="MEMSTREAM_MCP_HTTP_TOKEN_FILE",
    show_envvar=True,
    metavar="FILE",
    help="File with the bearer token that every HTTP request must carry. Default: no authentication.",
)
@server_options
@json_option
def mcp_command(
    memory: str,
    any_memory: bool,
    transport: str,
    listen: str,
    http_token_file: Path | None,
    server: Server,
    as_json: bool,
) -> None:
    """Serve the tools observe, correct, recall, history, forget and list of a memory to agent hosts that speak MCP.

    The command is a client of the server at --target. HTTP listens on loopback by default, and requires a token if
    --http-token-file is set.

    \b
      memstream mcp --memory demo/joy                                # started by a host
      memstream mcp --memory demo/joy --transport http --listen 127.0.0.1:7710
    """
    try:
        from memstream import mcp
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "memstream":
            raise
        raise Failure(f"{error.name} is not installed: pip install '.[mcp]'") from error
    token = _read_token(http_token_file) if http_token_file is not None else ""
    bound = _bind_socket(listen) if transport == "http" else None

    async def serve(client: Client) -> None:
        served = mcp.mcp_server(client, memory, any_memory=any_memory, target=server.target, token=token)
        if bound is None:
            # The reader of standard input blocks in a thread, which asyncio.run would wait for.
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, os._exit, Exit.INTERRUPTED)
            await mcp.serve_stdio(served)
        else:
            _announce_url(memory, bound, mcp.HTTP_PATH, bool(token), as_json)
            await mcp.serve_http(served, bound)

    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
        server.run_with_client(serve)


def _announce_url(memory: str, bound: socket.socket, path: str, asks: bool, as_json: bool) -> None:
    host, port = bound.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"
    click.echo(json.dumps({"memory": memory, "url": url}) if as_json else f"{memory} is served at {url}")
    if not ipaddress.ip_address(host).is_loopback:
        warning = (
            "traffic is not encrypted, including the token: put a TLS proxy in front"
            if asks
            else "anyone who can reach this address can read and change the memory: pass --http-token-file"
        )
        click.echo(f"memstream: warning: {warning}", err=True)


def _read_token(file: Path) -> str:
    try:
        token = file.read_text("ascii").strip()
    except UnicodeDecodeError as error:
        raise Misuse(f"{file} has no token: it is not ASCII") from error
    except OSError as error:
        raise Misuse(f"cannot read a token: {describe_os_error(error)}") from error
    if len(token) < TOKEN_CHARS_MIN or not token.isprintable() or " " in token:
        raise Misuse(f"{file} has no token of at least {TOKEN_CHARS_MIN} characters on one line: openssl rand -hex 32")
    return token


def _bind_socket(listen: str) -> socket.socket:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise Misuse(f"--listen is {listen!r}: give HOST:PORT, for instance 127.0.0.1:7710")
    host = host.strip("[]") or "127.0.0.1"
    try:
        return socket.create_server(
            (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
    except OSError as error:
        raise Failure(f"cannot listen on {listen}: {error.strerror or error}; name another with --listen") from error
