"""`memstream export` and `memstream import`: write memories to a file, and read them back."""

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
from memstream.resources import Operation
from memstream.transfer import ExportPart
from memstream.values import Filter
from memstream_server.cli.failures import Failure, Missing, Misuse
from memstream_server.cli.long_work import continuing_operation
from memstream_server.cli.options import filter_options, json_option
from memstream_server.cli.output import open_console, print_json, print_line
from memstream_server.cli.server import Server, server_options


class _LastLine(msgspec.Struct):
    type: str = ""
    memories: int = 0
    conversations: int = 0


@contextmanager
def progress_bar(what: str) -> Iterator[tuple[Progress, TaskID]]:
    """Shows a progress bar on standard error, if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("fragments"))
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


@click.command("import", short_help="Import an export into a server.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("namespace")
@click.option("--memory", default="", metavar="NAME", help="New name of the memory, for a file with only one.")
@click.option("--validate-only", is_flag=True, help="Check the whole file, write nothing.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when the import has ended.")
@click.option("--request-id", default="", metavar="TEXT", help="Lets a repeat resume where the first run stopped.")
@server_options
@json_option
def import_command(
    file: Path,
    namespace: str,
    memory: str,
    validate_only: bool,
    wait: bool,
    request_id: str,
    server: Server,
    as_json: bool,
) -> None:
    """Import the memories and conversations of FILE into NAMESPACE.

    The whole file is checked before anything is written; existing memories are not changed. A memory becomes visible
    when it is complete.

    \b
      memstream import joy.jsonl demo
      memstream import joy.jsonl demo --memory joy-2
      memstream import joy.jsonl demo --validate-only
    """
    if not file.is_file():
        raise Missing(f"there is no file {file}")
    if not os.access(file, os.R_OK):
        raise Misuse(f"{file} cannot be read")

    repeated = False

    async def work(client: Client) -> Operation:
        nonlocal repeated
        started = await client.import_(
            namespace, file, memory=memory, request_id=request_id, validate_only=validate_only
        )
        repeated = started.end_time is not None
        if validate_only or not wait:
            return started
        with continuing_operation(started), progress_bar("importing") as (progress, task):
            return await client.finished(
                started, lambda now: progress.update(task, completed=now.done, total=now.total or None)
            )

    operation = server.run_with_client(work)
    if as_json:
        print_json(operation)
    elif validate_only:
        print_line(f"{file} is valid and can be imported: {operation.total:,} fragments")
    elif operation.end_time is None:
        print_line(f"started the import as operation {operation.id}")
    elif repeated and operation.state.value == "succeeded":
        print_line(
            f"nothing was imported: operation {operation.id} with this --request-id has imported "
            f"{operation.done:,} fragments before"
        )
    elif operation.state.value == "succeeded":
        where = f"{operation.namespace}/{operation.memory}" if operation.memory else operation.namespace
        print_line(f"imported {operation.done:,} fragments of {file} into {where}")
    else:
        raise Failure(f"the import was {operation.state.value} after {operation.done:,} fragments")
