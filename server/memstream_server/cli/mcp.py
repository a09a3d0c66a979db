"""`memstream mcp`: serves a memory of a running server as tools of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memstream.client import Client
from memstream_server.cli.failures import Exit, Failure, Misuse, describe_os_error
from memstream_server.cli.options import json_option
from memstream_server.cli.server import Server, local_option, run_with_local, server_options

if TYPE_CHECKING:  # an extra
    from memstream.mcp import HttpAuth

URL = "{url}"
"""As in memstream.mcp.access."""
TOKEN_CHARS_MIN = 16


@dataclass(frozen=True, slots=True)
class OAuth:
    """The authorization server whose tokens HTTP accepts."""

    issuer: str
    jwks: str
    audience: str
    resource: str
    scopes: list[str]


@click.command("mcp", short_help="Serve a memory's tools over the Model Context Protocol.")
@click.option(
    "--memory",
    required=True,
    metavar="NAMESPACE/NAME",
    help="The agent's memory; created on first use. {project}: the host's project; over HTTP {sub}, {url}.",
)
@local_option
@click.option("--any-memory", is_flag=True, help="Let the tools use other memories of the server too.")
@click.option("--operator", is_flag=True, help="Offer the operator's tools too: history, receipts, block edits.")
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
@click.option("--oauth-issuer", default="", metavar="URL", help="Accept access tokens of this OAuth server over HTTP.")
@click.option("--oauth-jwks", default="", metavar="URL", help="Its keys, as an https URL or a file.")
@click.option("--oauth-audience", default="", metavar="TEXT", help="`aud` of its tokens. Default: --resource-url.")
@click.option("--oauth-scope", "scopes", multiple=True, metavar="SCOPE", help="A scope that a token must have.")
@click.option("--resource-url", default="", metavar="URL", help="The public URL of this HTTP endpoint, for OAuth.")
@server_options
@json_option
def mcp_command(
    memory: str,
    local: Path | None,
    any_memory: bool,
    operator: bool,
    transport: str,
    listen: str,
    http_token_file: Path | None,
    oauth_issuer: str,
    oauth_jwks: str,
    oauth_audience: str,
    scopes: tuple[str, ...],
    resource_url: str,
    server: Server,
    as_json: bool,
) -> None:
    """Serve the tools context, observe, recall, correct, forget and list of a memory to agent hosts that speak MCP.

    The command is a client of the server at --target, or with --local of one that it starts. HTTP listens on loopback
    by default, and requires a token if --http-token-file or --oauth-issuer is set.

    \b
      memstream mcp --local --memory 'code/{project}'                # started by a host
      memstream mcp --memory demo/joy --transport http --listen 127.0.0.1:7710
    """
    try:
        from memstream import mcp
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "memstream":
            raise
        raise Failure(f"{error.name} is not installed: pip install '.[mcp]'") from error
    oauth = None
    if oauth_issuer:
        oauth = OAuth(oauth_issuer, oauth_jwks, oauth_audience or resource_url, resource_url, [*scopes])
    _check_choice(memory, transport, http_token_file, oauth)
    auth = _http_auth(memory, http_token_file, oauth)
    bound = _bind_socket(listen) if transport == "http" else None

    async def serve(client: Client) -> None:
        target = "the local server" if local else server.target
        served = mcp.mcp_server(client, memory, any_memory=any_memory, operator=operator, target=target)
        if bound is None:
            # The reader of standard input blocks in a thread, which asyncio.run would wait for.
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, os._exit, Exit.INTERRUPTED)
            await mcp.serve_stdio(served)
        else:
            _announce_url(memory, bound, auth.path, auth.verifier is not None, as_json)
            await mcp.serve_http(served, bound, auth)

    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
        if local is not None:
            run_with_local(local, serve)
        else:
            replace(server, token=mcp.caller_token if oauth else server.token).run_with_client(serve)


def _check_choice(memory: str, transport: str, token_file: Path | None, oauth: OAuth | None) -> None:
    """Raises Misuse for options that exclude each other or lack another."""
    from memstream.mcp.access import depends_on_request
    from memstream.projects import PLACEHOLDER

    if transport == "http" and PLACEHOLDER in memory:
        raise Misuse("--memory with {project} needs --transport stdio: over HTTP name it by {url} or a claim")
    if transport == "stdio" and (depends_on_request(memory) or oauth):
        raise Misuse("a memory by URL or claim, and --oauth-issuer, need --transport http")
    if oauth is None:
        if memory != URL and depends_on_request(memory):
            raise Misuse("a claim in --memory needs --oauth-issuer")
        return
    if token_file is not None:
        raise Misuse("--http-token-file and --oauth-issuer exclude each other")
    if not oauth.jwks or not oauth.resource:
        raise Misuse("--oauth-issuer needs --oauth-jwks and --resource-url")


def _http_auth(memory: str, token_file: Path | None, oauth: OAuth | None) -> HttpAuth:
    from memstream.mcp import HTTP_PATH, HttpAuth

    path = HTTP_PATH + ("/{namespace}/{memory}" if memory == URL else "")
    if oauth is None:
        return HttpAuth.of_token(path, _read_token(token_file)) if token_file is not None else HttpAuth(path)
    from memstream_server.rpc.access.files import AccessError
    from memstream_server.rpc.access.tokens import JwtIdentities
    from memstream_server.rpc.errors import Unauthenticated

    try:
        tokens = JwtIdentities(oauth.jwks, oauth.issuer, oauth.audience)
    except AccessError as error:
        raise Misuse(f"--oauth-jwks: {error}") from error

    async def verify(token: str) -> dict[str, Any] | None:
        try:
            return await tokens.verify_claims(token)
        except Unauthenticated:
            return None

    try:
        return HttpAuth.of_issuer(path, verify, oauth.issuer, oauth.resource, oauth.scopes)
    except ValueError as error:
        raise Misuse(f"--oauth-issuer and --resource-url must be URLs: {error}") from error


def _announce_url(memory: str, bound: socket.socket, path: str, asks: bool, as_json: bool) -> None:
    host, port = bound.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"
    click.echo(json.dumps({"memory": memory, "url": url}) if as_json else f"{memory} is served at {url}")
    if not ipaddress.ip_address(host).is_loopback:
        warning = (
            "traffic is not encrypted, including the token: put a TLS proxy in front"
            if asks
            else "anyone who can reach this address can read and change the memory: pass --http-token-file or "
            "--oauth-issuer"
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
