"""`memstream list`: namespaces, a namespace's memories, or a memory's fragments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import TypeVar

import click
from rich.table import Table

from memstream.client import Client
from memstream.resources import MemoryInfo, Namespace
from memstream.values import Filter, Fragment
from memstream_server.cli.options import LabelParam, as_of_option, filter_options, json_option, time_zone_option
from memstream_server.cli.output import (
    create_table,
    escape_line,
    format_time,
    fragment_text,
    open_console,
    print_json,
    print_line,
    print_parts,
)
from memstream_server.cli.server import Server, server_options

T = TypeVar("T")

ROWS = 50
"""Default --limit of a table; JSON has no limit by default."""
_WORDS_SHOWN = 200
_PAGE = 500


@click.command("list", short_help="List namespaces, a namespace's memories, or a memory's fragments.")
@click.argument("name", metavar="[NAMESPACE | MEMORY]", required=False)
@filter_options
@time_zone_option()
@click.option("--forgotten", is_flag=True, help="List forgotten fragments instead of the others.")
@as_of_option
@click.option(
    "--label", "labels", multiple=True, type=LabelParam(), metavar="KEY=VALUE", help="Only memories with this label."
)
@click.option(
    "--limit", type=click.IntRange(min=0), help=f"Maximum number, 0 for all. Default: {ROWS}; with --json all."
)
@server_options
@json_option
def list_command(
    name: str | None,
    chosen: Filter | None,
    forgotten: bool,
    as_of: int | datetime | None,
    labels: tuple[tuple[str, str], ...],
    limit: int | None,
    server: Server,
    as_json: bool,
) -> None:
    """List the namespaces, the memories of a NAMESPACE, or the fragments of a MEMORY (NAMESPACE/NAME).

    --label applies to memories, the other filter flags to fragments. With --json, each item is one line.

    \b
      memstream list
      memstream list demo --label team=core
      memstream list demo/joy --speaker Bob --since 7d
      memstream list demo/joy --tier long_term --json | wc -l
    """
    if (chosen is not None or forgotten or as_of is not None) and (name is None or "/" not in name):
        raise click.UsageError("Filters apply to fragments: name a memory, as NAMESPACE/NAME.")
    if labels and (name is None or "/" in name):
        raise click.UsageError("--label applies to memories: name a namespace.")
    if len(dict(labels)) < len(labels):
        raise click.UsageError("--label names a key twice: a memory has one value of a key.")
    most = (0 if as_json else ROWS) if limit is None else limit
    if name is None:
        _list_namespaces(server, most, as_json)
    elif "/" in name:
        _list_fragments(server, name, chosen, forgotten, as_of, most, as_json)
    else:
        _list_memories(server, name, dict(labels), most, as_json)


def _list_namespaces(server: Server, most: int, as_json: bool) -> None:
    numbers = ["memories", "stored bytes", "of quota", "receipts", "of their quota"]
    grid = create_table("namespace", *numbers, numbers=numbers)

    async def list_rows(client: Client) -> bool:
        def add_row(item: Namespace) -> None:
            stored = item.stored
            shares = _share(stored.total, item.bytes_max), _share(stored.receipts, item.receipts_bytes_max)
            sizes = f"{stored.total:,}", shares[0], f"{stored.receipts:,}", shares[1]
            grid.add_row(item.name, f"{item.memories:,}", *sizes)

        return await emit_items(client.list_namespaces(page_size=page_size(most)), most, as_json, add_row)

    print_table(grid, server.run_with_client(list_rows), most, as_json, "no namespace has a memory yet")


def _share(stored: int, most: int) -> str:
    """How much of a quota is used, for display."""
    return f"{stored / most:.0%}" if most else "no limit"


def _list_memories(server: Server, namespace: str, labels: Mapping[str, str], most: int, as_json: bool) -> None:
    heads = ("memory", "kind", "profile", "fragments", "revision", "changed", "created")
    grid = create_table(*heads, numbers=["fragments", "revision"])

    async def list_rows(client: Client) -> bool:
        def add_row(item: MemoryInfo) -> None:
            profile = item.policy.profile.value if item.policy.profile else ""
            changed, created = format_time(item.change_time), format_time(item.create_time)
            grid.add_row(
                item.path, item.kind.value, profile, f"{item.fragments:,}", f"{item.revision:,}", changed, created
            )

        items = client.list_memories(namespace, labels=labels, page_size=page_size(most))
        return await emit_items(items, most, as_json, add_row)

    none = f"namespace {namespace} has no memory{' with these labels' if labels else ''}"
    print_table(grid, server.run_with_client(list_rows), most, as_json, none)


def _list_fragments(
    server: Server,
    memory: str,
    chosen: Filter | None,
    forgotten: bool,
    as_of: int | datetime | None,
    most: int,
    as_json: bool,
) -> None:
    columns = ("id", "tier", "perceived", "speaker", "session", "importance", "content")
    grid = create_table(*columns, numbers=["importance"], wide="content")

    async def list_rows(client: Client) -> bool:
        def add_row(item: Fragment) -> None:
            tier = item.tier.value if item.tier else ""
            origin = (escape_line(each, 40) for each in (item.speaker, item.session))
            content = escape_line(fragment_text(item), _WORDS_SHOWN)
            grid.add_row(item.id, tier, format_time(item.observe_time), *origin, f"{item.importance:.2f}", content)

        listing = client.memory(memory).list_fragments(
            chosen, forgotten=forgotten, page_size=page_size(most), as_of=as_of
        )
        more = await emit_items(listing, most, as_json, add_row)
        for one in listing.unmatched:
            print_line(f"filter: {escape_line(str(one), _WORDS_SHOWN).plain}", err=True)
        return more

    print_table(grid, server.run_with_client(list_rows), most, as_json, "no fragment")


def page_size(most: int) -> int:
    """Rows of a page of a list that shows `most` (0: all)."""
    return min(most + 1, _PAGE) if most else _PAGE


async def emit_items(items: AsyncIterator[T], most: int, as_json: bool, row: Callable[[T], None]) -> bool:
    """Prints or collects the first `most` items (0: all) and returns whether there are more."""
    count = 0
    async for item in items:
        if most and count == most:
            return True
        count += 1
        if as_json:
            print_json(item)
        else:
            row(item)
    return False


def print_table(grid: Table, more: bool, most: int, as_json: bool, nothing: str) -> None:
    """Prints the table unless the rows were printed as JSON; `nothing` is the text for no rows."""
    if as_json:
        return
    if grid.row_count:
        print_parts(open_console(), grid)
    else:
        print_line(nothing, err=True)
    if more:
        print_line(f"the first {most:,}; there are more: --limit 0 shows all", err=True)
