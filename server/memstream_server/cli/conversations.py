"""`memstream conversations`: list a namespace's conversations, show, search or delete one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import click

from memstream.client import Client
from memstream.conversation_values import Message
from memstream.listed_values import ConversationSummary
from memstream_server.cli.failures import Misuse
from memstream_server.cli.listing import Row, limit_option, show_list, shown_max
from memstream_server.cli.options import LabelParam, json_option
from memstream_server.cli.output import create_table, escape_line, format_time, print_json, print_line
from memstream_server.cli.server import Server, server_options

_WORDS_SHOWN = 400
_NAME_SHOWN = 40


@click.command("conversations", short_help="List a namespace's conversations, show, search or delete one.")
@click.argument("where", metavar="NAMESPACE[/NAME]")
@click.option("--prefix", default="", metavar="TEXT", help="List only names with this prefix.")
@click.option(
    "--label", "labels", multiple=True, type=LabelParam(), metavar="KEY=VALUE", help="List only those with this label."
)
@click.option("--latest", is_flag=True, help="Show the latest first.")
@click.option("--find", "wanted", default="", metavar="TEXT", help="Show only messages that contain TEXT.")
@click.option("--delete", "deletes", is_flag=True, help="Delete the conversation with messages, plans and state.")
@limit_option
@server_options
@json_option
def conversations_command(
    where: str,
    prefix: str,
    labels: tuple[tuple[str, str], ...],
    latest: bool,
    wanted: str,
    deletes: bool,
    limit: int | None,
    server: Server,
    as_json: bool,
) -> None:
    """List the conversations of NAMESPACE, or show the messages of NAMESPACE/NAME. --find reads all messages.

    \b
      memstream conversations agents --label user=bob --latest
      memstream conversations agents/run-7 --latest --limit 10
      memstream conversations agents --find "Paris"
      memstream conversations agents/run-7 --delete
    """
    chosen = _Choice(where, prefix, dict(labels), latest, wanted)
    if chosen.is_one and (prefix or labels):
        raise Misuse("--prefix and --label select conversations: name a namespace alone")
    most = shown_max(limit, as_json)
    if deletes:
        if not chosen.is_one or latest or wanted:
            raise Misuse("--delete needs NAMESPACE/NAME and no other selection")
        _delete_conversation(server, where, as_json)
    elif chosen.is_one or wanted:
        _show_messages(server, chosen, most, as_json)
    else:
        _list_conversations(server, chosen, most, as_json)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which conversations, and which of their messages."""

    where: str
    prefix: str
    labels: dict[str, str]
    latest: bool
    wanted: str

    @property
    def is_one(self) -> bool:
        """Whether it names a conversation."""
        return "/" in self.where

    def list_conversations(self, client: Client, size: int = 0) -> AsyncIterator[ConversationSummary]:
        return client.list_conversations(
            self.where, name_prefix=self.prefix, labels=self.labels, latest_first=self.latest, page_size=size
        )

    async def list_messages(self, client: Client) -> AsyncIterator[tuple[str, Message]]:
        """(path of the conversation, message)."""
        paths = [self.where]
        if not self.is_one:
            paths = [f"{self.where}/{found.name}" async for found in self.list_conversations(client)]
        for path in paths:
            async for message in client.conversation(path).messages(newest_first=self.latest):
                if self.wanted in message.content or self.wanted in (message.body or ""):
                    yield path, message


def _show_messages(server: Server, chosen: _Choice, most: int, as_json: bool) -> None:
    def print_row(found: tuple[str, Message]) -> None:
        path, message = found
        said = escape_line(message.content or message.body or "", _WORDS_SHOWN)
        who = escape_line(message.role or message.sender, _NAME_SHOWN)
        place = str(message.number) if chosen.is_one else f"{path} {message.number}"
        print_line(f"{place}  {format_time(message.create_time)}  {who}: {said}")

    async def print_rows(client: Client) -> int:
        count = 0
        async for path, message in chosen.list_messages(client):
            if most and count == most:
                print_line(f"the first {most:,}; there are more: --limit 0 shows all", err=True)
                break
            count += 1
            if as_json:
                print_json({"conversation": path, "message": message})
            else:
                print_row((path, message))
        return count

    if not server.run_with_client(print_rows) and not as_json:
        print_line("no message", err=True)


def _list_conversations(server: Server, chosen: _Choice, most: int, as_json: bool) -> None:
    grid = create_table("name", "messages", "changed", "expires", "labels", numbers=["messages"], wide="labels")

    def format_row(found: ConversationSummary) -> Row:
        labels = ", ".join(f"{key}={value}" for key, value in found.labels.items())
        expires = "" if found.expire_time is None else format_time(found.expire_time)
        changed, count = format_time(found.update_time), f"{found.message_count:,}"
        return found.name, count, changed, expires, escape_line(labels, _WORDS_SHOWN)

    show_list(server, chosen.list_conversations, grid, format_row, most, as_json, "no conversation")


def _delete_conversation(server: Server, path: str, as_json: bool) -> None:
    async def delete(client: Client) -> int:
        return await client.conversation(path).delete()

    count = server.run_with_client(delete)
    if as_json:
        print_json({"messages": count})
    else:
        print_line(f"deleted {path}, {count:,} messages")
