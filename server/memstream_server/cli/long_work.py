"""`memstream operations`, `reindex`, `purge` and `erase`: start, list, await and cancel operations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from memstream.client import Client
from memstream.resources import Operation
from memstream.values import Filter, OperationState
from memstream_server.cli.failures import Failure
from memstream_server.cli.options import filter_options, json_option, time_zone_option
from memstream_server.cli.output import (
    create_table,
    escape_line,
    facts_table,
    format_time,
    open_console,
    print_json,
    print_line,
    print_parts,
)
from memstream_server.cli.server import Server, server_options

F = TypeVar("F", bound=Callable[..., Any])
ROWS = 50
WORDS_SHOWN = 200


def wait_option(command: F) -> F:
    """Adds --wait to a command, as `wait`."""
    return click.option("--wait", is_flag=True, help="Wait until the operation ends, with a progress bar.")(command)


@click.group("operations", short_help="List, show, await and cancel operations.")
def operations_command() -> None:
    """List, show, await and cancel operations.

    An operation runs independently of the command that started it, and resumes after a restart of the server. The
    server keeps it for 7 days after its end.

    \b
      memstream operations list demo
      memstream operations wait 01KAB3...
    """


@operations_command.command("list")
@click.argument("name", metavar="[NAMESPACE | MEMORY]", default="")
@click.option("--limit", type=click.IntRange(min=0), default=ROWS, show_default=True, help="Maximum number, 0 for all.")
@server_options
@json_option
def list_operations(name: str, limit: int, server: Server, as_json: bool) -> None:
    """List operations, newest first; with --json, each is one line."""
    namespace, _, memory = name.partition("/")
    grid = create_table("id", "type", "on", "state", "done", "started", "ended")

    async def print_operations(client: Client) -> None:
        count = 0
        async for each in client.operations(namespace, memory):
            if limit and count == limit:
                print_line(f"the first {limit:,}; there are more: --limit 0 shows all", err=True)
                return
            count += 1
            if as_json:
                print_json(each)
            else:
                started, ended = format_time(each.create_time), format_time(each.end_time)
                grid.add_row(
                    each.id, each.type, _format_subject(each), each.state.value, _format_progress(each), started, ended
                )

    server.run_with_client(print_operations)
    if grid.row_count:
        print_parts(open_console(), grid)
    elif not as_json:
        print_line("no operation", err=True)


@operations_command.command("get")
@click.argument("id")
@server_options
@json_option
def get_operation(id: str, server: Server, as_json: bool) -> None:
    """Show the state and progress of the operation ID."""
    _print_operation(server.run_with_client(lambda client: client.operation(id)), as_json)


@operations_command.command("cancel")
@click.argument("id")
@server_options
@json_option
def cancel_operation(id: str, server: Server, as_json: bool) -> None:
    """Cancel the operation ID. Completed work is kept."""
    _print_operation(server.run_with_client(lambda client: client.cancel_operation(id)), as_json)


@operations_command.command("wait")
@click.argument("id")
@server_options
@json_option
def wait_operation(id: str, server: Server, as_json: bool) -> None:
    """Wait until the operation ID ends; exit code 1 if it failed or was cancelled."""
    _start_and_show(server, lambda client: client.operation(id), True, as_json)


@click.command("reindex", short_help="Rebuild the vector index, or re-embed all content.")
@click.option("--embed", is_flag=True, help="Recompute all vectors with the server's embedding model.")
@click.option("--missing", is_flag=True, help="Compute the vectors of the fragments that have none.")
@wait_option
@server_options
@json_option
def reindex_command(embed: bool, missing: bool, wait: bool, server: Server, as_json: bool) -> None:
    """Rebuild the vector index of a running server from the journal's vectors; recalls keep working.

    \b
      memstream reindex --wait
      memstream reindex --missing --wait
    """
    if embed and missing:
        raise click.UsageError("--embed computes all vectors, so --missing has no use with it.")
    _start_and_show(server, lambda client: client.start_reindex(embed=embed, missing=missing), wait, as_json)


@click.command("purge", short_help="Erase forgotten fragments past their grace period now.")
@click.argument("name", metavar="[NAMESPACE | MEMORY]", default="")
@wait_option
@server_options
@json_option
def purge_command(name: str, wait: bool, server: Server, as_json: bool) -> None:
    """Erase the forgotten fragments past their grace period now: of a memory, a namespace, or all.

    \b
      memstream purge demo --wait
    """
    namespace, _, memory = name.partition("/")
    _start_and_show(server, lambda client: client.start_purge(namespace, memory), wait, as_json)


@click.command("erase", short_help="Erase fragments permanently, with everything derived from them.")
@click.argument("memory", metavar="MEMORY")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@filter_options
@time_zone_option()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@wait_option
@server_options
@json_option
def erase_command(
    memory: str, ids: tuple[str, ...], chosen: Filter | None, yes: bool, wait: bool, server: Server, as_json: bool
) -> None:
    """Erase fragments of a MEMORY by id or by filter flags, including forgotten and pinned ones.

    This removes their content and vectors, and everything derived from them, from every file of the server's data
    directory. It cannot be undone; earlier backups still contain them.

    \b
      memstream erase demo/joy 01KAB3XJ8Q6C0V7T2N4M5P9RSW --wait
      memstream erase demo/joy --speaker Bob --yes
    """
    if not ids and chosen is None:
        raise click.UsageError("Name fragments by id, or pass a filter flag.")
    if not yes:
        _confirm(len(ids))
    _start_and_show(server, lambda client: client.memory(memory).erase_fragments(ids, filter=chosen), wait, as_json)


def _confirm(count: int) -> None:
    """Asks whether to erase so many fragments, or with 0 those of the filter. Raises Failure without a yes."""
    which = f"{count:,} fragment{'' if count == 1 else 's'}" if count else "all fragments that match the filter"
    try:
        wanted = click.confirm(f"Permanently erase {which}?", err=True)
    except click.Abort:  # the end of standard input, or Ctrl-C
        raise Failure("nothing was erased: answer y, or pass --yes") from None
    if not wanted:
        raise Failure("nothing was erased")


def _start_and_show(server: Server, begin: Callable[[Client], Awaitable[Operation]], wait: bool, as_json: bool) -> None:
    """Starts an operation and shows it, or with `wait` shows it after its end."""

    async def start_and_follow(client: Client) -> Operation:
        begun = await begin(client)
        for one in begun.unmatched:
            print_line(f"filter: {escape_line(str(one), WORDS_SHOWN).plain}", err=True)
        if not wait:
            return begun
        with continuing_operation(begun):
            async with _progress_bar(begun, as_json) as told:
                return await client.finished(begun, told)

    operation = server.run_with_client(start_and_follow)
    _print_operation(operation, as_json)
    if operation.state is OperationState.CANCELLED:
        raise Failure("the operation was cancelled; completed work is kept")
    if not wait and not as_json:
        _print_continuing(operation)


@contextmanager
def continuing_operation(operation: Operation) -> Iterator[None]:
    """Says how to wait again if Ctrl-C ends the block, which waits for the operation."""
    try:
        yield
    except asyncio.CancelledError:
        _print_continuing(operation)
        raise


def _print_continuing(operation: Operation) -> None:
    print_line(f"the operation continues on the server: memstream operations wait {operation.id}", err=True)


@asynccontextmanager
async def _progress_bar(operation: Operation, quiet: bool) -> AsyncIterator[Callable[[Operation], None]]:
    """Shows a progress bar on standard error, if that is a terminal."""
    columns = (TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    out = open_console(stderr=True)
    with Progress(*columns, console=out, disable=quiet or not out.is_terminal) as bars:
        task = bars.add_task(operation.type, total=operation.total or None)
        yield lambda now: bars.update(task, completed=now.done, total=now.total or None)


def _print_operation(operation: Operation, as_json: bool) -> None:
    if as_json:
        print_json(operation)
        return
    pairs: list[tuple[str, object]] = [
        ("id", operation.id),
        ("type", operation.type),
        ("on", _format_subject(operation)),
        ("state", operation.state.value),
        ("done", _format_progress(operation)),
        ("started", operation.create_time),
        ("ended", operation.end_time),
        ("error", None if operation.error is None else operation.error.message),
    ]
    print_parts(open_console(), facts_table(pairs))


def _format_subject(operation: Operation) -> str:
    return f"{operation.namespace}/{operation.memory}" if operation.memory else operation.namespace or "everything"


def _format_progress(operation: Operation) -> str:
    return f"{operation.done:,} of {operation.total:,} {operation.unit}" if operation.total else f"{operation.done:,}"
