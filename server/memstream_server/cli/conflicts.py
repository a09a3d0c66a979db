"""`memstream conflicts`: list statements of a memory that may not be true together, and decide one."""

from __future__ import annotations

import click

from memstream.client import Client
from memstream.conflict_values import ConflictDecision, ConflictRecord
from memstream.errors import FragmentNotFound
from memstream.memory import Memory
from memstream_server.cli.failures import Misuse
from memstream_server.cli.options import json_option
from memstream_server.cli.output import format_time, fragment_text, print_json, print_line
from memstream_server.cli.server import Server, server_options

WORDS_SHOWN = 200
"""Characters of a fragment in the list."""
_DECISIONS = [each.value for each in ConflictDecision if each is not ConflictDecision.UNKNOWN]


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
