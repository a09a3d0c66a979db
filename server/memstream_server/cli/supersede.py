"""`memstream supersede`: mark fragments as corrected by a newer one, or undo it."""

from __future__ import annotations

import click

from memstream.client import Client
from memstream_server.cli.failures import Misuse
from memstream_server.cli.options import json_option
from memstream_server.cli.output import print_json, print_line
from memstream_server.cli.server import Server, server_options


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
