"""`memstream export`: writes memories to a file."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from memstream.client import Client
from memstream.transfer import ExportPart
from memstream.values import Filter
from memstream_server.cli.failures import Failure
from memstream_server.cli.options import filter_options, json_option
from memstream_server.cli.output import open_console, print_json, print_line
from memstream_server.cli.server import Server, server_options


class _LastLine(msgspec.Struct):
    type: str = ""
    memories: int = 0
    conversations: int = 0


@contextmanager
def progress_bar(what: str, unit: str = "fragments") -> Iterator[tuple[Progress, TaskID]]:
    """Shows a progress bar on standard error, if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(
        *columns, console=open_console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        yield progress, progress.add_task(what, total=None)


@click.command("export", short_help="Export a memory or a namespace to a file.")
@click.argument("what", metavar="NAMESPACE[/MEMORY]")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Output file. Default: standard output."
)
@click.option(
    "--vectors", is_flag=True, help="Include vectors: larger, but an import need not embed the content again."
)
@filter_options
@server_options
@json_option
def export_command(
    what: str, output: Path | None, vectors: bool, chosen: Filter | None, server: Server, as_json: bool
) -> None:
    """Export a memory, or all memories and conversations of a namespace, as JSON Lines.

    Each memory is a snapshot at one revision, with the fragments of all tiers. The file gets its name when it is
    complete. With filter flags: only matching fragments, without conversations.

    \b
      memstream export demo/joy -o joy.jsonl
      memstream export demo --vectors -o demo.jsonl
      memstream export demo/joy | gzip > joy.jsonl.gz
      memstream export demo --where 'metadata.project = "apollo"' -o apollo.jsonl
    """
    namespace, _, memory = what.partition("/")

    def export(client: Client) -> AsyncIterator[ExportPart]:
        return client.export(namespace, memory, include_vectors=vectors, filter=chosen)

    if output is None:
        server.run_with_client(lambda client: _export_to_file(export(client), namespace, sys.stdout.buffer))
        return
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with part.open("xb") as file:
            count = server.run_with_client(lambda client: _export_to_file(export(client), namespace, file))
            file.flush()
            os.fsync(file.fileno())
        part.replace(output)
    except OSError as error:
        raise Failure(f"{output} could not be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    size = output.stat().st_size
    if as_json:
        print_json({"file": str(output), "fragments": count, "bytes": size})
    else:
        print_line(f"exported {count:,} fragments of {what} to {output} ({size:,} bytes)", err=True)


async def _export_to_file(parts: AsyncIterator[ExportPart], namespace: str, file: IO[bytes]) -> int:
    done, last = 0, b""
    with progress_bar("exporting") as (progress, task):
        async for part in parts:
            file.write(part.lines)
            done, last = part.done, part.lines
            progress.update(task, completed=part.done, total=part.total)
    file.flush()
    end = msgspec.json.decode(last.splitlines()[-1] if last else b"{}", type=_LastLine)
    if end.type != "end":
        raise Failure("the export is truncated: its last line is missing")
    if not end.memories and not end.conversations:
        warning = f"memstream: warning: the export is empty: {namespace} has no memory and no conversation"
        print_line(warning, err=True)
    return done
