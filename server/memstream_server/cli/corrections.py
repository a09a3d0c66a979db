"""Commands that correct what a memory says, and show what it said before.

`memstream conflicts` lists statements that may not be true together, and decides one. `memstream supersede` marks
fragments as corrected by a newer one, or undoes it. `memstream history` shows the earlier versions of a fragment; with
--restore, one of them becomes its content again.
"""

from __future__ import annotations

import click
from rich.text import Text

from memstream.client import Client
from memstream.conflict_values import ConflictDecision, ConflictRecord
from memstream.errors import FragmentNotFound
from memstream.memory import Memory
from memstream.resources import FragmentHistory
from memstream.values import Fragment
from memstream_server.cli.failures import Misuse
from memstream_server.cli.options import json_option
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

WORDS_SHOWN = 200
"""Characters of a fragment in the list."""
_DECISIONS = [each.value for each in ConflictDecision if each is not ConflictDecision.UNKNOWN]
_WORDS_SHOWN = 1_000


@click.command("conflicts", short_help="List statements that may not be true together, and decide one.")
@click.argument("memory")
@click.argument("newer_id", required=False)
@click.argument("older_id", required=False)
@click.option("--decide", type=click.Choice(_DECISIONS), help="Which of the two is true. Default: list.")
@click.option("--note", default="", help="Why, for later readers.")
@click.option("--decided", is_flag=True, help="List the decided ones instead of the open ones.")
@server_options
@json_option
def conflicts_command(
    memory: str,
    newer_id: str | None,
    older_id: str | None,
    decide: str | None,
    note: str,
    decided: bool,
    server: Server,
    as_json: bool,
) -> None:
    """List the suspicions of MEMORY (NAMESPACE/NAME), or decide the one of NEWER_ID and OLDER_ID.

    newer or older: that statement is true and supersedes the other. both: there is no conflict. neither: only the
    suspicion ends.

    \b
      memstream conflicts demo/joy
      memstream conflicts demo/joy 01KAB3Z1T4Q2W8E6R5Y7M3N9PQ 01KAB3XJ8Q6C0V7T2N4M5P9RSW --decide newer
    """
    if decide is None:
        if newer_id or note:
            raise Misuse("--decide says which of the two is true")
        _list_conflicts(server, memory, decided, as_json)
        return
    if not newer_id or not older_id or decided:
        raise Misuse("name the two fragments that --decide is about: NEWER_ID OLDER_ID")
    pair, decision = (newer_id, older_id), ConflictDecision(decide)

    async def resolve(client: Client) -> ConflictRecord:
        return await client.memory(memory).resolve_conflict(*pair, decision, note=note)

    done = server.run_with_client(resolve)
    if as_json:
        print_json(done)
    else:
        print_line(f"decided: {decide}")


def _list_conflicts(server: Server, memory: str, decided: bool, as_json: bool) -> None:
    async def read(client: Client) -> tuple[list[ConflictRecord], dict[str, str]]:
        named = client.memory(memory)
        found = [one async for one in named.list_conflicts(decided=decided)]
        ids = dict.fromkeys(id_ for one in found for id_ in (one.suspicion.newer_id, one.suspicion.older_id))
        return found, {} if as_json else {id_: await _describe_fragment(named, id_) for id_ in ids}

    found, texts = server.run_with_client(read)
    for one in found:
        if as_json:
            print_json(one)
            continue
        verdict = f", decided: {one.decision}" if one.decision else ""
        print_line(f"{one.suspicion.reason}{verdict}{f' ({one.note})' if one.note else ''}")
        for name, id_ in (("newer", one.suspicion.newer_id), ("older", one.suspicion.older_id)):
            print_line(f"  {name} {id_}  {texts[id_]}")
    if not found and not as_json:
        print_line(f"no {'decided' if decided else 'open'} conflict in {memory}")


async def _describe_fragment(memory: Memory, fragment_id: str) -> str:
    try:
        fragment = await memory.get_fragment(fragment_id)
    except FragmentNotFound:
        return "(no longer in the memory)"
    words = " ".join(fragment_text(fragment).split())
    return f"{format_time(fragment.observe_time)}  {words[:WORDS_SHOWN]}"


@click.command("supersede", short_help="Mark fragments as corrected by a newer one.")
@click.argument("memory")
@click.argument("ids", nargs=-1)
@click.option("--external-id", "external_ids", multiple=True, metavar="KEY", help="An older fragment by external_id.")
@click.option("--by", "newer_id", metavar="ID", default="", help="The newer fragment.")
@click.option("--by-external-id", "newer_external_id", metavar="KEY", default="", help="The newer one by external_id.")
@click.option("--undo", is_flag=True, help="Make the fragments IDS current again.")
@server_options
@json_option
def supersede_command(
    memory: str,
    ids: tuple[str, ...],
    external_ids: tuple[str, ...],
    newer_id: str,
    newer_external_id: str,
    undo: bool,
    server: Server,
    as_json: bool,
) -> None:
    """Mark fragments IDS of MEMORY (NAMESPACE/NAME) as corrected by a newer fragment: recall leaves them out.

    \b
      memstream supersede demo/joy 01KAB3XJ8Q6C0V7T2N4M5P9RSW --by 01KAB3Z1T4Q2W8E6R5Y7M3N9PQ
      memstream supersede demo/joy --external-id home-2024 --by-external-id home-2026
      memstream supersede demo/joy 01KAB3XJ8Q6C0V7T2N4M5P9RSW --undo
    """
    if not ids and not external_ids:
        raise Misuse("name the older fragments: IDS or --external-id")
    if undo and (external_ids or newer_id or newer_external_id):
        raise Misuse("--undo takes IDS only")
    if not undo and bool(newer_id) == bool(newer_external_id):
        raise Misuse("name the newer fragment: --by or --by-external-id")

    async def change(client: Client) -> int:
        named = client.memory(memory)
        if undo:
            return await named.restore_fragments(ids)
        return await named.supersede(
            ids, external_ids=external_ids, newer_id=newer_id, newer_external_id=newer_external_id
        )

    count = server.run_with_client(change)
    if as_json:
        print_json({"memory": memory, "restored" if undo else "superseded": count})
    else:
        print_line(f"{count:,} {'current again' if undo else 'superseded'} in {memory}")


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
