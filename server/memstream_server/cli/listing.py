"""Commands that list: what a server has, and what is known of one memory.

`memstream list`: namespaces, a namespace's memories, or a memory's fragments. `memstream sessions` and `memstream
queries`: a memory's sessions, and the standing queries that are open on it. `memstream receipts` and `memstream
replay`: the receipts of a memory's recalls, and a recall ranked again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import TypeVar

import click
from rich.table import Table
from rich.text import Text

from memstream.client import Client
from memstream.listed_values import OpenStandingQuery, SessionSummary
from memstream.receipt_values import RecallReceipt, Replay, ReplayDifference
from memstream.resources import MemoryInfo, Namespace
from memstream.values import Filter, Fragment, RecallOptions, Structured
from memstream_server.cli.options import (
    LabelParam,
    TimeParam,
    as_of_option,
    filter_options,
    json_option,
    time_zone_option,
)
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
from memstream_server.cli.recall import print_answer
from memstream_server.cli.server import Server, server_options

T = TypeVar("T")
Row = Sequence[str | Text]
"""The cells of an item."""

ROWS = 50
"""Default --limit of a table; JSON has no limit by default."""
_WORDS_SHOWN = 200
_PAGE = 500
_NAME_SHOWN = 40
limit_option = click.option(
    "--limit", type=click.IntRange(min=0), help=f"Maximum number, 0 for all. Default: {ROWS}; with --json all."
)


@click.command("list", short_help="List namespaces, a namespace's memories, or a memory's fragments.")
@click.argument("name", metavar="[NAMESPACE | MEMORY]", required=False)
@filter_options
@time_zone_option()
@click.option("--forgotten", is_flag=True, help="List forgotten fragments instead of the others.")
@as_of_option
@click.option(
    "--label", "labels", multiple=True, type=LabelParam(), metavar="KEY=VALUE", help="Only memories with this label."
)
@limit_option
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
    if name is None:
        _list_namespaces(server, limit, as_json)
    elif "/" in name:
        _list_fragments(server, name, chosen, forgotten, as_of, limit, as_json)
    else:
        _list_memories(server, name, dict(labels), limit, as_json)


def _list_namespaces(server: Server, limit: int | None, as_json: bool) -> None:
    numbers = ["memories", "stored bytes", "of quota", "receipts", "of their quota"]
    grid = create_table("namespace", *numbers, numbers=numbers)

    def format_row(item: Namespace) -> Row:
        stored = item.stored
        shares = _share(stored.total, item.bytes_max), _share(stored.receipts, item.receipts_bytes_max)
        return item.name, f"{item.memories:,}", f"{stored.total:,}", shares[0], f"{stored.receipts:,}", shares[1]

    nothing = "no namespace has a memory yet"
    show_list(
        server, lambda client, size: client.list_namespaces(page_size=size), grid, format_row, limit, as_json, nothing
    )


def _share(stored: int, most: int) -> str:
    """How much of a quota is used, for display."""
    return f"{stored / most:.0%}" if most else "no limit"


def _list_memories(server: Server, namespace: str, labels: Mapping[str, str], limit: int | None, as_json: bool) -> None:
    heads = ("memory", "kind", "profile", "fragments", "revision", "changed", "created")
    grid = create_table(*heads, numbers=["fragments", "revision"])

    def format_row(item: MemoryInfo) -> Row:
        profile = item.policy.profile.value if item.policy.profile else ""
        changed, created = format_time(item.change_time), format_time(item.create_time)
        return item.path, item.kind.value, profile, f"{item.fragments:,}", f"{item.revision:,}", changed, created

    def ask(client: Client, size: int) -> AsyncIterator[MemoryInfo]:
        return client.list_memories(namespace, labels=labels, page_size=size)

    nothing = f"namespace {namespace} has no memory{' with these labels' if labels else ''}"
    show_list(server, ask, grid, format_row, limit, as_json, nothing)


def _list_fragments(
    server: Server,
    memory: str,
    chosen: Filter | None,
    forgotten: bool,
    as_of: int | datetime | None,
    limit: int | None,
    as_json: bool,
) -> None:
    columns = ("id", "tier", "perceived", "speaker", "session", "importance", "content")
    grid = create_table(*columns, numbers=["importance"], wide="content")

    def format_row(item: Fragment) -> Row:
        tier = item.tier.value if item.tier else ""
        origin = (escape_line(each, 40) for each in (item.speaker, item.session))
        content = escape_line(fragment_text(item), _WORDS_SHOWN)
        return item.id, tier, format_time(item.observe_time), *origin, f"{item.importance:.2f}", content

    def ask(client: Client, size: int) -> AsyncIterator[Fragment]:
        return client.memory(memory).list_fragments(chosen, forgotten=forgotten, page_size=size, as_of=as_of)

    show_list(server, ask, grid, format_row, limit, as_json, "no fragment")


def shown_max(limit: int | None, as_json: bool) -> int:
    """The items that are shown, 0 for all: the given `limit`, or ROWS of a table and all as JSON."""
    return (0 if as_json else ROWS) if limit is None else limit


def show_list(
    server: Server,
    ask: Callable[[Client, int], AsyncIterator[T]],
    grid: Table,
    format_row: Callable[[T], Row],
    limit: int | None,
    as_json: bool,
    nothing: str,
) -> None:
    """Print the items that `ask` lists in pages of the given size, as rows of `grid` or as JSON: see `shown_max`.

    `nothing` is the text for no rows.
    """
    most = shown_max(limit, as_json)

    async def list_rows(client: Client) -> bool:
        """Whether there are more."""
        count, more = 0, False
        listing = ask(client, min(most + 1, _PAGE) if most else _PAGE)
        async for item in listing:
            if more := bool(most) and count == most:
                break
            count += 1
            if as_json:
                print_json(item)
            else:
                grid.add_row(*format_row(item))
        for one in getattr(listing, "unmatched", ()):
            print_line(f"filter: {escape_line(str(one), _WORDS_SHOWN).plain}", err=True)
        return more

    more = server.run_with_client(list_rows)
    if as_json:
        return
    if grid.row_count:
        print_parts(open_console(), grid)
    else:
        print_line(nothing, err=True)
    if more:
        print_line(f"the first {most:,}; there are more: --limit 0 shows all", err=True)


@click.command("sessions", short_help="List a memory's sessions.")
@click.argument("memory")
@click.option("--prefix", default="", metavar="TEXT", help="Only sessions whose name has this prefix.")
@click.option(
    "--since", type=TimeParam(), metavar="TIME", help="Only with observations at or after, e.g. 7d for a week."
)
@click.option(
    "--until", type=TimeParam(until=True), metavar="TIME", help="Only with observations before; a date includes it."
)
@time_zone_option()
@limit_option
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
    grid = create_table("session", "first", "last", "fragments", "speakers", numbers=["fragments"], wide="speakers")

    def format_row(one: SessionSummary) -> Row:
        more = one.speaker_count - len(one.speakers)
        speakers = ", ".join(one.speakers) + (f" and {more} more" if more else "")
        first, last = format_time(one.first_observe_time), format_time(one.last_observe_time)
        name = escape_line(one.session, _NAME_SHOWN)
        return name, first, last, f"{one.fragments:,}", escape_line(speakers, _WORDS_SHOWN)

    def ask(client: Client, size: int) -> AsyncIterator[SessionSummary]:
        return client.memory(memory).list_sessions(
            prefix, observe_time_min=since, observe_time_max=until, page_size=size
        )

    show_list(server, ask, grid, format_row, limit, as_json, "no session")


@click.command("queries", short_help="List the standing queries that are open on a memory.")
@click.argument("memory")
@limit_option
@server_options
@json_option
def queries_command(memory: str, limit: int | None, server: Server, as_json: bool) -> None:
    """List the standing queries that clients have open on MEMORY (NAMESPACE/NAME), the oldest first.

    `memstream recall --follow` opens one. The principal is shown to callers with the right `admin`.

    \b
      memstream queries demo/joy
    """
    grid = create_table(
        "opened", "last change", "messages", "results", "by", "session", "filter", "query",
        numbers=["messages", "results"], wide="query",
    )  # fmt: skip

    def format_row(one: OpenStandingQuery) -> Row:
        times = format_time(one.open_time), format_time(one.change_time)
        names = (escape_line(text, _NAME_SHOWN) for text in (one.principal, one.session, describe_filter(one.options)))
        words = escape_line(_query_text(one.what), _WORDS_SHOWN)
        return *times, f"{one.messages_sent:,}", f"{one.recollections:,}", *names, words

    def ask(client: Client, size: int) -> AsyncIterator[OpenStandingQuery]:
        return client.memory(memory).list_standing_queries(page_size=size)

    show_list(server, ask, grid, format_row, limit, as_json, "no standing query is open")


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


@click.command("receipts", short_help="List the receipts of a memory's recalls.")
@click.argument("memory")
@limit_option
@server_options
@json_option
def receipts_command(memory: str, limit: int | None, server: Server, as_json: bool) -> None:
    """List the receipts of MEMORY (NAMESPACE/NAME), the latest first. `memstream recall --receipt` makes one.

    \b
      memstream receipts demo/joy
      memstream receipts demo/joy --json | jq -r .id
    """
    grid = create_table("receipt", "recalled", "by", "revision", "results", "query", wide="query")

    def ask(client: Client, size: int) -> AsyncIterator[RecallReceipt]:
        return client.memory(memory).list_receipts(page_size=size)

    show_list(server, ask, grid, _format_receipt, limit, as_json, "no receipt")


def _format_receipt(receipt: RecallReceipt) -> Row:
    query = escape_line(_receipt_text(receipt), _WORDS_SHOWN)
    who = escape_line(receipt.principal, 40)
    results = str(len(receipt.ranking))
    return receipt.id, format_time(receipt.create_time), who, f"{receipt.revision:,}", results, query


def _receipt_text(receipt: RecallReceipt) -> str:
    return "(erased)" if receipt.query_erased else _query_text(receipt.what or "")


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
    print_parts(out, Text("query: ", style="dim") + escape_line(_receipt_text(replay.receipt), _WORDS_SHOWN))
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
