"""`memstream context`: what a model would see before a turn, with the tokens of its parts."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click
from rich.text import Text

from memstream.context import Context, ContextOptions, ContextReason, Omission
from memstream_server.cli.options import TimeParam, json_option, time_zone_option
from memstream_server.cli.output import create_table, escape_text, open_console, print_json, print_parts
from memstream_server.cli.server import Server, server_options


@click.command("context", short_help="Show what a model would see before a turn.")
@click.argument("question")
@click.option("-m", "--memory", "memories", multiple=True, metavar="NAMESPACE/NAME", help="Memory to recall from.")
@click.option("--conversation", default="", metavar="NAMESPACE/NAME", help="Conversation whose end is in the text.")
@click.option("--block", "blocks", multiple=True, metavar="NAMESPACE/MEMORY#NAME", help="Block at the beginning.")
@click.option("--summary", metavar="NAMESPACE/MEMORY#NAME", help="Block in place of the messages that are cut.")
@click.option("--budget", type=click.IntRange(min=0), default=0, help="Maximum number of tokens; 0 takes 4,000.")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="Maximum number of new memories.")
@click.option("--now", type=TimeParam(), metavar="TIME", help="Time of the turn. Default: the server's clock.")
@time_zone_option(of="Time zone of dates", expose=True)
@server_options
@json_option
def context_command(
    question: str,
    memories: tuple[str, ...],
    conversation: str,
    blocks: tuple[str, ...],
    summary: str | None,
    budget: int,
    limit: int | None,
    now: datetime | None,
    time_zone: str | None,
    server: Server,
    as_json: bool,
) -> None:
    """Show the context of a turn with QUESTION, and the tokens of its parts. It records nothing.

    \b
      memstream context "what is my name?" -m demo/joy
      memstream context "what now?" -m user/bob -m team/core --conversation user/monday --block 'agent/joy#persona'
      memstream context "what is my name?" -m demo/joy --json | jq -r .text
    """
    options = ContextOptions(summary=summary, limit=limit, now=now, time_zone=time_zone, reinforce=False)
    context = server.run_with_client(
        lambda client: client.context(
            memories, question, conversation=conversation, blocks=blocks, budget=budget, **options
        )
    )
    print_json(_to_fields(context)) if as_json else _print_context(context)


def _to_fields(context: Context) -> dict[str, Any]:
    names = ("tokens", "weak", "degraded", "parts", "citations", "left_out")
    return {"text": context.text} | {name: getattr(context, name) for name in names}


def _print_context(context: Context) -> None:
    out = open_console()
    grid = create_table("part", "from", "tokens", numbers=["tokens"])
    for part in context.parts:
        print_parts(out, escape_text(part.text.removesuffix("\n")))
        source = (
            f"{part.memory}#{part.name}" if part.name else part.memory or (f"#{part.number}" if part.number else "")
        )
        grid.add_row(part.kind.value, source, f"{part.tokens:,}")
    print_parts(out, grid)
    print_parts(out, Text(f"{context.tokens:,} tokens", style="dim"))
    for reason, count in _count_reasons(context.left_out).items():
        print_parts(out, Text(f"left out: {count:,} ({reason.value.replace('_', ' ')})", style="dim"))
    if context.degraded:
        print_parts(out, Text("degraded: ", style="yellow") + escape_text(context.degraded))


def _count_reasons(left_out: tuple[Omission, ...]) -> dict[ContextReason, int]:
    counts: dict[ContextReason, int] = {}
    for one in left_out:
        counts[one.reason] = counts.get(one.reason, 0) + one.count
    return counts
