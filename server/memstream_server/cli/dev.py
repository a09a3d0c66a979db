"""`memstream dev`: a server with a sample memory, and what to try with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

import memstream_server
from memstream import errors
from memstream.client import Client
from memstream.local_client import local
from memstream_server.cli.failures import Failure
from memstream_server.cli.options import json_option
from memstream_server.cli.output import print_json, print_line
from memstream_server.cli.records import Format, Malformed, RecordReader
from memstream_server.cli.server import DEFAULT_TARGET, to_failure

MEMORY = "demo/letters"
QUESTION = "Did the Great Fire delay the time signals of Chicago?"


@click.command("dev", short_help="Run a server with a sample memory, to try memstream.")
@click.option("--listen", default=DEFAULT_TARGET, show_default=True, metavar="HOST:PORT", help="Address of the server.")
@click.option(
    "--data", type=click.Path(path_type=Path), help="Keep the data in this directory. Default: a temporary one."
)
@json_option
def dev_command(listen: str, data: Path | None, as_json: bool) -> None:
    """Run a server whose memory demo/letters holds 1,342 real letters about clocks, until Ctrl-C.

    Prints the address, a query to try, and the entry for a host of the Model Context Protocol. For a server of your own
    data use `memstream serve`.

    \b
      memstream dev
      memstream dev --listen 127.0.0.1:0 --data ./letters
    """
    with _data_directory(data) as directory:
        try:
            asyncio.run(_run_dev(directory, listen, as_json))
        except errors.MemstreamError as error:
            raise to_failure(error, listen) from error


@contextlib.contextmanager
def _data_directory(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="memstream-dev-") as folder:
        yield Path(folder) / "data"


async def _run_dev(directory: Path, listen: str, as_json: bool) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    if not as_json:
        print_line("starting a server ...")
    opening = local(directory, listen=listen)
    async with opening as client:
        count = await _store_letters(client)
        if as_json:
            print_json(
                {"address": opening.address, "data": str(directory), "memory": MEMORY, "letters": count}
                | host_entry(opening.address)
            )
        else:
            for line in describe_server(opening.address, directory, count):
                print_line(line)
        await stop.wait()


async def _store_letters(client: Client) -> int:
    """Stores the letters that the memory does not hold yet. Returns their number."""
    reader = RecordReader(Format.JSONL)
    memory = await client.create_memory(MEMORY, exist_ok=True)
    async with memory.observe(producer="letters") as stream:
        lines = letters_path().read_bytes().splitlines()
        for line in lines[stream.expected_sequence - 1 :]:
            letter = reader.read_line(line)
            if letter is None or isinstance(letter, Malformed):
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


def describe_server(address: str, directory: Path, count: int) -> list[str]:
    """What to try with the server, line by line."""
    target = "" if address == DEFAULT_TARGET else f" --target {shlex.quote(address)}"
    return [
        f"memstream serves at {address}, with {count:,} letters about clocks in the memory {MEMORY}",
        f"  data  {directory}",
        "",
        "Try in another terminal:",
        f'  memstream recall {MEMORY} "{QUESTION}" -n 3 --explain{target}',
        "",
        "Give an MCP host these tools (pip install 'memstream[mcp]'):",
        *json.dumps(host_entry(address), indent=2).splitlines(),
        "",
        "Ctrl-C ends the server.",
    ]
