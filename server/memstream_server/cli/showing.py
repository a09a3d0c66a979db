"""`memstream show`, `stats`, `info` and `server`: show a memory, a fragment, a memory's counts, or the server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta

import click
from rich.console import RenderableType

from memstream.client import Client
from memstream.resources import MemoryInfo, MemoryStats, ModelStatus, ModelUsage, ServerInfo, ServerStatus
from memstream.values import Fragment, ModelState
from memstream_server.cli.options import as_of_option, json_option
from memstream_server.cli.output import (
    create_table,
    escape_text,
    facts_table,
    fragment_text,
    open_console,
    print_json,
    print_parts,
)
from memstream_server.cli.server import Server, server_options


@click.command("show", short_help="Show a memory and its policy, or one of its fragments.")
@click.argument("memory")
@click.argument("fragment", required=False)
@click.option("--external-id", metavar="KEY", help="The fragment with this external_id, instead of FRAGMENT.")
@as_of_option
@server_options
@json_option
def show_command(
    memory: str,
    fragment: str | None,
    external_id: str | None,
    as_of: int | datetime | None,
    server: Server,
    as_json: bool,
) -> None:
    """Show MEMORY (NAMESPACE/NAME) with its complete policy, or one FRAGMENT of it by id.

    \b
      memstream show demo/joy
      memstream show demo/joy 01K9ZQ4J3V6Y8M2N5P7R0S1T2W
      memstream show demo/joy --external-id mail-4711 --as-of 7d
    """
    if fragment is not None and external_id is not None:
        raise click.UsageError("Give FRAGMENT or --external-id, not both.")
    if as_of is not None and fragment is None and external_id is None:
        raise click.UsageError("--as-of shows a fragment: give FRAGMENT or --external-id.")

    async def one(client: Client) -> MemoryInfo | Fragment:
        named = client.memory(memory)
        if fragment is None and external_id is None:
            return await named.describe()
        return await named.get_fragment(fragment or "", external_id=external_id or "", as_of=as_of)

    found = server.run_with_client(one)
    if as_json:
        print_json(found)
    elif isinstance(found, MemoryInfo):
        _print_memory(found)
    else:
        _print_fragment(found)


def _print_memory(memory: MemoryInfo) -> None:
    own = ((field.name, getattr(memory, field.name)) for field in fields(memory) if field.name != "policy")
    about = facts_table([("memory", memory.path), *(pair for pair in own if pair[0] not in {"namespace", "name"})])
    print_parts(open_console(), about, "\npolicy", facts_table(_iterate_leaves(memory.policy)))


def _iterate_leaves(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if is_dataclass(value):
        for field in fields(value):
            yield from _iterate_leaves(getattr(value, field.name), f"{prefix}.{field.name}" if prefix else field.name)
    else:
        yield prefix, value


def _print_fragment(fragment: Fragment) -> None:
    apart = {"content", "structured", "merged_text"}
    about = ((field.name, getattr(fragment, field.name)) for field in fields(fragment) if field.name not in apart)
    merged: list[RenderableType] = (
        ["\nmerged with its enhancers", escape_text(fragment.merged_text)] if fragment.merged_text else []
    )
    print_parts(open_console(), facts_table(about), "", escape_text(fragment_text(fragment)), *merged)


@click.command("stats", short_help="Count a memory's fragments.")
@click.argument("memory")
@server_options
@json_option
def stats_command(memory: str, server: Server, as_json: bool) -> None:
    """Count the fragments of MEMORY (NAMESPACE/NAME) by tier, and the observations not yet stored or indexed.

    \b
      memstream stats demo/joy
      memstream stats demo/joy --json | jq .long_term
    """

    async def fetch_stats(client: Client) -> MemoryStats:
        return await client.memory(memory).stats()

    stats = server.run_with_client(fetch_stats)
    if as_json:
        print_json(stats)
    else:
        print_parts(open_console(), facts_table((field.name, getattr(stats, field.name)) for field in fields(stats)))


@click.command("info", short_help="Show the server's version, models, capabilities and limits.")
@server_options
@json_option
def info_command(server: Server, as_json: bool) -> None:
    """Show the server's version, models, stores, capabilities and limits.

    The exit code is 1 when no server answers, so scripts can use it as a check.
    """

    async def fetch_info(client: Client) -> ServerInfo:
        return await client.server_info()

    info = server.run_with_client(fetch_info)
    if as_json:
        print_json(info)
        return
    model = info.embedding
    apart = {"embedding", "limits", "capabilities", "model_usage", "models"}
    rows: list[tuple[str, object]] = [("server", server.target)]
    rows += [(field.name, getattr(info, field.name)) for field in fields(info) if field.name not in apart]
    rows += [("embedding", f"{model.name}, {model.dimension} dimensions"), ("capabilities", info.capabilities)]
    rows += [(f"model {one.role}", _format_status(one)) for one in info.models]
    rows += [(f"asked as {one.role}", _format_usage(one)) for one in info.model_usage if one.requests]
    rows += [(f"limits.{field.name}", getattr(info.limits, field.name)) for field in fields(info.limits)]
    print_parts(open_console(), facts_table(rows))


@click.command("server", short_help="Show what the server uses and does, and who calls it.")
@server_options
@json_option
def server_command(server: Server, as_json: bool) -> None:
    """Show the server's RAM, disk, open streams and calls, and the clients that called it last.

    It needs the right admin in every namespace. --json has the settings, too.

    \b
      memstream server
      memstream server --json | jq '.clients[] | {name, principal, streams}'
    """

    async def fetch_status(client: Client) -> ServerStatus:
        return await client.server_status()

    status = server.run_with_client(fetch_status)
    if as_json:
        print_json(status)
        return
    apart = {"clients", "rpcs", "settings", "streams"}
    rows: list[tuple[str, object]] = [("server", server.target)]
    rows += [(field.name, getattr(status, field.name)) for field in fields(status) if field.name not in apart]
    rows += [(f"open streams, {rpc}", count) for rpc, count in status.streams.items()]
    called = create_table("call", "ended", "failed", "median ms", "p99 ms", numbers=("ended", "failed"), wide="call")
    for rpc in status.rpcs:
        called.add_row(rpc.rpc, f"{rpc.calls:,}", f"{rpc.failed:,}", _format_ms(rpc.median), _format_ms(rpc.p99))
    clients = create_table(
        "client", "principal", "address", "calls", "streams", "last call", numbers=("calls", "streams"), wide="client"
    )
    for one in status.clients:
        last = f"{one.last_call_time:%Y-%m-%d %H:%M:%S} UTC"
        clients.add_row(
            escape_text(one.name),
            escape_text(one.principal),
            escape_text(one.address),
            f"{one.calls:,}",
            f"{one.streams:,}",
            last,
        )
    print_parts(
        open_console(), facts_table(rows), "\ncalls since the start", called, "\nclients, the latest first", clients
    )


def _format_ms(duration: timedelta | None) -> str:
    return "" if duration is None else f"<= {duration.total_seconds() * 1e3:.3g}"


def _format_status(status: ModelStatus) -> str:
    if status.state is ModelState.UNKNOWN:
        return f"{status.model}: not called yet"
    if status.state is ModelState.SERVING:
        return f"{status.model}: serving{_format_since(', last success', status.last_success_time)}"
    in_a_row = f", {status.consecutive_failures:,} in a row" if status.consecutive_failures else ""
    never = ", no success yet" if status.last_failure_time and not status.last_success_time else ""
    success = never or _format_since(", last success", status.last_success_time)
    return f"{status.model}: FAILING ({status.last_error}){in_a_row}{success}"


def _format_since(what: str, moment: datetime | None) -> str:
    return "" if moment is None else f"{what} {moment:%Y-%m-%d %H:%M:%S} UTC"


def _format_usage(used: ModelUsage) -> str:
    tokens = f"{used.prompt_tokens:,} + {used.completion_tokens:,} tokens"
    return f"{used.requests:,} requests ({used.failed:,} failed), {tokens}, of {used.model}"
