"""`memstream dev`: a server with a sample memory, and what to try with it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import shlex
import signal
import socket
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import click

import memstream_server
from memstream import errors
from memstream.client import Client
from memstream.local_client import Opening, local
from memstream_server.cli.failures import Failure, Misuse
from memstream_server.cli.options import json_option
from memstream_server.cli.output import print_json, print_line
from memstream_server.cli.records import Format, MalformedLine, RecordReader
from memstream_server.cli.server import DEFAULT_TARGET, to_failure
from memstream_server.settings import parse_listen

MEMORY = "demo/letters"
DEFAULT_HTTP = "127.0.0.1:7701"
QUESTION = "Did the Great Fire delay the time signals of Chicago?"


@click.command("dev", short_help="Run a server with a sample memory, to try memstream.")
@click.option("--listen", default=DEFAULT_TARGET, show_default=True, metavar="HOST:PORT", help="Address of the server.")
@click.option(
    "--data", type=click.Path(path_type=Path), help="Keep the data in this directory. Default: a temporary one."
)
@click.option("--open", "opens", is_flag=True, help="Open the console in the web browser.")
@json_option
def dev_command(listen: str, data: Path | None, opens: bool, as_json: bool) -> None:
    """Run a server whose memory demo/letters holds 1,342 real letters about clocks, until Ctrl-C.

    Prints the address, the address of the console, a query to try, and the entry for a host of the Model Context
    Protocol. For a server of your own data use `memstream serve`.

    \b
      memstream dev --open
      memstream dev --listen 127.0.0.1:0 --data ./letters
    """
    with _data_directory(data) as directory:
        try:
            asyncio.run(_run_dev(directory, listen, opens, as_json))
        except errors.MemstreamError as error:
            raise to_failure(error, listen) from error


@contextlib.contextmanager
def _data_directory(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="memstream-dev-") as folder:
        yield Path(folder) / "data"


async def _run_dev(directory: Path, listen: str, opens: bool, as_json: bool) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    if not as_json:
        print_line("starting a server ...")
    async with contextlib.AsyncExitStack() as stack:
        opening, client, http = await _open_server(stack, directory, listen)
        count = await _store_letters(client)
        console = f"http://{http}/" if http else ""
        if as_json:
            print_json(
                {
                    "address": opening.address,
                    "console": console,
                    "data": str(directory),
                    "memory": MEMORY,
                    "letters": count,
                }
                | host_entry(opening.address)
            )
        else:
            for line in describe_server(opening.address, console, directory, count):
                print_line(line)
        if opens and console:
            await asyncio.to_thread(webbrowser.open, console)
        await stop.wait()


async def _open_server(stack: contextlib.AsyncExitStack, directory: Path, listen: str) -> tuple[Opening, Client, str]:
    """The server that has the directory, or a new one, with its HTTP address; the running one may have none.

    A new one takes free ports where others are in use.
    """
    from memstream.local_files import Directory  # it needs Unix

    files = Directory(directory)
    if files.is_served():
        running = files.started_settings(files.server_pid()) or {}
        http = str(json.loads(running.get("http_listen", '""')))
        opening = local(directory, listen=listen, http_listen=http) if http else local(directory, listen=listen)
        return opening, await stack.enter_async_context(opening), http
    while True:
        free, http = _find_free(listen), _find_free(DEFAULT_HTTP)
        opening = local(directory, listen=free, http_listen=http)
        try:
            client = await stack.enter_async_context(opening)
        except errors.LocalServerFailed:
            if (_find_free(free), _find_free(http)) == (free, http):  # no other process took an address meanwhile
                raise
            continue
        if free != listen and not listen.endswith(":0"):
            print_line(f"{listen} is in use, perhaps by another server: this one is at {opening.address}", err=True)
        return opening, client, http


def _find_free(address: str) -> str:
    """The address, or another free port of its host if it is in use. Raises Misuse for what is no address, and Failure
    if the process may not listen there."""
    if address.startswith("unix:"):
        return address
    try:
        host, port = parse_listen(address)
    except ValueError as error:
        raise Misuse(f"--listen: {error}") from error
    for number in (port, 0):
        try:
            with socket.create_server(
                (host, number), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            ) as probe:
                free = probe.getsockname()[1]
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise Failure(f"cannot listen at {address}: {error.strerror}") from error
        else:
            return f"[{host}]:{free}" if ":" in host else f"{host}:{free}"
    raise Failure(f"no port of {host} is free")


async def _store_letters(client: Client) -> int:
    """Stores the letters that the memory does not hold yet. Returns their number."""
    reader = RecordReader(Format.JSONL)
    memory = await client.create_memory(MEMORY, exist_ok=True)
    async with memory.observe(producer="letters") as stream:
        lines = letters_path().read_bytes().splitlines()
        for line in lines[stream.expected_sequence - 1 :]:
            letter = reader.read_line(line)
            if letter is None or isinstance(letter, MalformedLine):
                raise Failure(f"a letter cannot be read: {letter}")
            await stream.send(letter)
        await stream.flush()
    return len(lines)


def letters_path() -> Path:
    """The letters: in an installed package, else in the source tree."""
    package = Path(memstream_server.__path__[0])
    packed = package / "letters.jsonl"
    return packed if packed.exists() else package.parents[1] / "examples" / "data" / "tz.jsonl"


def host_entry(address: str) -> dict[str, object]:
    """The entry for the configuration of an MCP host."""
    entry = {"command": "memstream", "args": ["mcp", "--target", address, "--memory", MEMORY]}
    return {"mcpServers": {"memory": entry}}


def describe_server(address: str, console: str, directory: Path, count: int) -> list[str]:
    """What to try with the server, line by line."""
    target = "" if address == DEFAULT_TARGET else f" --target {shlex.quote(address)}"
    return [
        f"memstream serves at {address}, with {count:,} letters about clocks in the memory {MEMORY}",
        f"  data     {directory}",
        f"  console  {console or 'none: the server of this directory has no HTTP port'}",
        "",
        "Try in another terminal:",
        f'  memstream recall {MEMORY} "{QUESTION}" -n 3 --explain{target}',
        "",
        "Give an MCP host these tools (pip install '.[mcp]'):",
        *json.dumps(host_entry(address), indent=2).splitlines(),
        "",
        "Ctrl-C ends the server.",
    ]
