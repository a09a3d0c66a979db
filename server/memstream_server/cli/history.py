"""`memstream history`: the earlier versions of a fragment; with --restore, one of them becomes its content again."""

from __future__ import annotations

import click
from rich.text import Text

from memstream.client import Client
from memstream.resources import FragmentHistory
from memstream.values import Fragment
from memstream_server.cli.options import json_option
from memstream_server.cli.output import (
    create_table,
    escape_line,
    format_time,
    fragment_text,
    open_console,
    print_json,
    print_parts,
)
from memstream_server.cli.server import Server, server_options

_WORDS_SHOWN = 1_000


@click.command("history", short_help="Show what a fragment said before it was changed.")
@click.argument("memory")
@click.argument("fragment", required=False)
@click.option("--external-id", metavar="KEY", help="The fragment with this external_id, instead of FRAGMENT.")
@click.option("--restore", type=click.IntRange(min=1), metavar="VERSION", help="Make this version the content again.")
@server_options
@json_option
def history_command(
    memory: str, fragment: str | None, external_id: str | None, restore: int | None, server: Server, as_json: bool
) -> None:
    """Show the versions of one FRAGMENT of MEMORY (NAMESPACE/NAME), the latest first.

    A version is named by the revision that replaced it. The memory's policy says how many are kept.

    \b
      memstream history demo/joy 01K9ZQ4J3V6Y8M2N5P7R0S1T2W
      memstream history demo/joy --external-id home --restore 17
    """
    if (fragment is None) == (external_id is None):
        raise click.UsageError("Give FRAGMENT or --external-id.")

    async def read_history(client: Client) -> FragmentHistory:
        return await client.memory(memory).fragment_history(fragment or "", external_id=external_id or "")

    async def restore_version(client: Client) -> Fragment:
        found = await read_history(client)
        return await client.memory(memory).restore_version(found.fragment.id, restore or 0, etag=found.fragment.etag)

    if restore is not None:
        restored = server.run_with_client(restore_version)
        if as_json:
            print_json(restored)
        else:
            print_parts(open_console(), escape_line(fragment_text(restored), _WORDS_SHOWN))
        return
    history = server.run_with_client(read_history)
    if as_json:
        print_json(history)
    else:
        _print_history(history)


def _print_history(history: FragmentHistory) -> None:
    grid = create_table("version", "replaced", "by", "who", "content", numbers=["version"], wide="content")
    grid.add_row("", "", "", "", escape_line(fragment_text(history.fragment), _WORDS_SHOWN))
    for one in history.versions:
        content = escape_line(fragment_text(one.fragment), _WORDS_SHOWN)
        who = escape_line(one.principal, 40)
        grid.add_row(str(one.version), format_time(one.replace_time), one.replaced_by.value, who, content)
    print_parts(open_console(), grid, Text(f"revision {history.revision:,}", style="dim"))
