"""`memstream receipts` and `memstream replay`: the receipts of a memory's recalls, and a recall ranked again."""

from __future__ import annotations

import click
from rich.text import Text

from memstream.client import Client
from memstream.receipt_values import RecallReceipt, Replay, ReplayDifference
from memstream.values import Structured
from memstream_server.cli.listing import ROWS, emit_items, page_size, print_table
from memstream_server.cli.options import json_option
from memstream_server.cli.output import create_table, escape_line, format_time, open_console, print_json, print_parts
from memstream_server.cli.recall import print_answer
from memstream_server.cli.server import Server, server_options

_WORDS_SHOWN = 200


@click.command("receipts", short_help="List the receipts of a memory's recalls.")
@click.argument("memory")
@click.option(
    "--limit", type=click.IntRange(min=0), help=f"Maximum number, 0 for all. Default: {ROWS}; with --json all."
)
@server_options
@json_option
def receipts_command(memory: str, limit: int | None, server: Server, as_json: bool) -> None:
    """List the receipts of MEMORY (NAMESPACE/NAME), the latest first. `memstream recall --receipt` makes one.

    \b
      memstream receipts demo/joy
      memstream receipts demo/joy --json | jq -r .id
    """
    most = (0 if as_json else ROWS) if limit is None else limit
    grid = create_table("receipt", "recalled", "by", "revision", "results", "query", wide="query")

    async def list_rows(client: Client) -> bool:
        listing = client.memory(memory).list_receipts(page_size=page_size(most))
        return await emit_items(listing, most, as_json, lambda receipt: grid.add_row(*_format_receipt(receipt)))

    print_table(grid, server.run_with_client(list_rows), most, as_json, "no receipt")


def _format_receipt(receipt: RecallReceipt) -> tuple[str | Text, ...]:
    query = escape_line(_query_text(receipt), _WORDS_SHOWN)
    who = escape_line(receipt.principal, 40)
    results = str(len(receipt.ranking))
    return receipt.id, format_time(receipt.create_time), who, f"{receipt.revision:,}", results, query


def _query_text(receipt: RecallReceipt) -> str:
    what = receipt.what
    if receipt.query_erased:
        return "(erased)"
    if isinstance(what, Structured):
        return " ".join(filter(None, (what.question, what.thought, what.action, what.observation)))
    return what or ""


@click.command("replay", short_help="Rank a recall again, as of its receipt.")
@click.argument("memory")
@click.argument("receipt")
@server_options
@json_option
def replay_command(memory: str, receipt: str, server: Server, as_json: bool) -> None:
    """Rank MEMORY (NAMESPACE/NAME) as of the revision of RECEIPT, by its query and policy, and compare.

    Exits with 1 if the ranking is not the same.

    \b
      memstream replay demo/joy 01K9ZQ4J3V6Y8M2N5P7R0S1T2W
    """

    async def replay(client: Client) -> Replay:
        return await client.memory(memory).replay(receipt)

    found = server.run_with_client(replay)
    if as_json:
        print_json(found)
    else:
        _print_replay(found)
    if not found.same:
        raise SystemExit(1)


def _print_replay(replay: Replay) -> None:
    out = open_console()
    print_parts(out, Text("query: ", style="dim") + escape_line(_query_text(replay.receipt), _WORDS_SHOWN))
    if replay.answer is not None:
        print_answer(replay.answer, explain=False, working=False)
    for one in replay.differences:
        print_parts(out, Text(_format_difference(one), style="yellow"))
    print_parts(out, "the same ranking, to the last bit" if replay.same else "not the same ranking")


def _format_difference(one: ReplayDifference) -> str:
    name = one.type.value.replace("_", " ")
    if one.fragment_id:
        return f"{name}: {one.fragment_id}"
    if one.recorded or one.present:
        return f"{name}: {one.recorded or 'nothing'}, now {one.present or 'nothing'}"
    return name
