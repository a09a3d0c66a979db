"""`memstream sessions` and `memstream queries`: a memory's sessions, and the standing queries that are open on it."""

from __future__ import annotations

from datetime import datetime

import click

from memstream.client import Client
from memstream.listed_values import OpenStandingQuery, SessionSummary
from memstream.values import Filter, RecallOptions, Structured
from memstream_server.cli.listing import ROWS, emit_items, page_size, print_table
from memstream_server.cli.options import TimeParam, json_option, time_zone_option
from memstream_server.cli.output import create_table, escape_line, format_time
from memstream_server.cli.server import Server, server_options

_WORDS_SHOWN = 200
_NAME_SHOWN = 40
_limit_option = click.option(
    "--limit", type=click.IntRange(min=0), help=f"Maximum number, 0 for all. Default: {ROWS}; with --json all."
)


@click.command("sessions", short_help="List a memory's sessions.")
@click.argument("memory")
@click.option("--prefix", default="", metavar="TEXT", help="Only sessions whose name has this prefix.")
@click.option(
    "--since",
    type=TimeParam(),
    metavar="TIME",
    help="Only with observations at or after, e.g. 7d for a week.",
)
@click.option(
    "--until",
    type=TimeParam(until=True),
    metavar="TIME",
    help="Only with observations before; a date includes it.",
)
@time_zone_option()
@_limit_option
@server_options
@json_option
def sessions_command(
    memory: str,
    prefix: str,
    since: datetime | None,
    until: datetime | None,
    limit: int | None,
    server: Server,
    as_json: bool,
) -> None:
    """List the sessions of MEMORY (NAMESPACE/NAME), the one with the latest observation first.

    \b
      memstream sessions demo/joy --since 7d
      memstream sessions demo/joy --json | jq -r .session
    """
    most = (0 if as_json else ROWS) if limit is None else limit
    grid = create_table("session", "first", "last", "fragments", "speakers", numbers=["fragments"], wide="speakers")

    def add_row(one: SessionSummary) -> None:
        more = one.speaker_count - len(one.speakers)
        speakers = ", ".join(one.speakers) + (f" and {more} more" if more else "")
        first, last = format_time(one.first_observe_time), format_time(one.last_observe_time)
        name = escape_line(one.session, _NAME_SHOWN)
        grid.add_row(name, first, last, f"{one.fragments:,}", escape_line(speakers, _WORDS_SHOWN))

    async def list_rows(client: Client) -> bool:
        listing = client.memory(memory).list_sessions(
            prefix, observe_time_min=since, observe_time_max=until, page_size=page_size(most)
        )
        return await emit_items(listing, most, as_json, add_row)

    print_table(grid, server.run_with_client(list_rows), most, as_json, "no session")


@click.command("queries", short_help="List the standing queries that are open on a memory.")
@click.argument("memory")
@_limit_option
@server_options
@json_option
def queries_command(memory: str, limit: int | None, server: Server, as_json: bool) -> None:
    """List the standing queries that clients have open on MEMORY (NAMESPACE/NAME), the oldest first.

    `memstream recall --follow` opens one. The principal is shown to callers with the right `admin`.

    \b
      memstream queries demo/joy
    """
    most = (0 if as_json else ROWS) if limit is None else limit
    grid = create_table(
        "opened", "last change", "messages", "results", "by", "session", "filter", "query",
        numbers=["messages", "results"], wide="query",
    )  # fmt: skip

    def add_row(one: OpenStandingQuery) -> None:
        grid.add_row(
            format_time(one.open_time),
            format_time(one.change_time),
            f"{one.messages_sent:,}",
            f"{one.recollections:,}",
            escape_line(one.principal, _NAME_SHOWN),
            escape_line(one.session, _NAME_SHOWN),
            escape_line(describe_filter(one.options), _NAME_SHOWN),
            escape_line(_query_text(one.what), _WORDS_SHOWN),
        )

    async def list_rows(client: Client) -> bool:
        listing = client.memory(memory).list_standing_queries(page_size=page_size(most))
        return await emit_items(listing, most, as_json, add_row)

    print_table(grid, server.run_with_client(list_rows), most, as_json, "no standing query is open")


def _query_text(what: str | Structured) -> str:
    if isinstance(what, Structured):
        return " ".join(filter(None, (what.question, what.thought, what.action, what.observation)))
    return what


def describe_filter(options: RecallOptions) -> str:
    """The conditions of a query's filter that are set, for instance "speakers=Joy"."""
    chosen = options.get("filter")
    if chosen is None:
        return ""
    nothing = Filter()
    given = {name: getattr(chosen, name) for name in Filter.__dataclass_fields__}
    return " ".join(
        f"{name}={_condition_text(value)}" for name, value in given.items() if value != getattr(nothing, name)
    )


def _condition_text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
