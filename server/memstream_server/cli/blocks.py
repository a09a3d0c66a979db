"""`memstream blocks`: list a memory's blocks, show, write, edit or delete one."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import click

from memstream.blocks import Block, BlockInfo, Blocks
from memstream.client import Client
from memstream_server.cli.failures import Misuse
from memstream_server.cli.listing import Row, show_list
from memstream_server.cli.options import json_option
from memstream_server.cli.output import create_table, escape_line, format_time, print_json, print_line
from memstream_server.cli.server import Server, server_options

_SHOWN = 100


@click.command("blocks", short_help="List a memory's blocks, show, write, edit or delete one.")
@click.argument("where", metavar="NAMESPACE/MEMORY[#BLOCK]")
@click.option("--put", "text", metavar="TEXT", help="Write this text; - reads standard input.")
@click.option("--append", "lines", metavar="TEXT", help="Add lines at the end.")
@click.option("--replace", "parts", nargs=2, metavar="OLD NEW", help="Replace the only occurrence of OLD.")
@click.option(
    "--insert",
    "insertion",
    nargs=2,
    type=(click.IntRange(min=0), str),
    metavar="LINE TEXT",
    help="Add lines after LINE; 0: before the first.",
)
@click.option("--keep", "question", metavar="QUESTION", help="Let the block keep itself: its text answers QUESTION.")
@click.option(
    "--ask",
    "scopes",
    multiple=True,
    metavar="NAMESPACE/MEMORY",
    help="With --keep: ask this memory instead of the block's own; repeat it for more.",
)
@click.option("--instructions", default="", help="With --keep: how an LLM is to write the answer.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=0),
    help="With --put and --keep: tokens that the text may have; 0: no bound.",
)
@click.option("--etag", default="", help="Write only if the block has this etag.")
@click.option("--versions", "shows_versions", is_flag=True, help="Show the versions that are kept, the latest first.")
@click.option("--version", type=click.IntRange(min=1), help="Show this version.")
@click.option("--delete", "deletes", is_flag=True, help="Delete the block with all versions.")
@server_options
@json_option
def blocks_command(
    where: str,
    text: str | None,
    lines: str | None,
    parts: tuple[str, str] | None,
    insertion: tuple[int, str] | None,
    question: str | None,
    scopes: tuple[str, ...],
    instructions: str,
    max_tokens: int | None,
    etag: str,
    shows_versions: bool,
    version: int | None,
    deletes: bool,
    server: Server,
    as_json: bool,
) -> None:
    """List the blocks of NAMESPACE/MEMORY, or show, write, edit or delete one of them.

    \b
      memstream blocks agents/joy
      memstream blocks agents/joy#persona --put "I am Joy."
      memstream blocks agents/joy#persona --replace Joy Jo
      memstream blocks agents/joy#persona --versions
      memstream blocks agents/joy#profile --keep "Who is Bob?" --max-tokens 200
    """
    memory, _, name = where.partition("#")
    chosen = [
        text is not None,
        lines is not None,
        bool(parts),
        bool(insertion),
        question is not None,
        shows_versions,
        version is not None,
        deletes,
    ]
    if sum(chosen) > 1:
        raise Misuse("give one of --put, --append, --replace, --insert, --keep, --versions, --version and --delete")
    if any(chosen) and not name:
        raise Misuse("name a block: NAMESPACE/MEMORY#BLOCK")
    if max_tokens is not None and text is None and question is None:
        raise Misuse("--max-tokens goes with --put and --keep")
    if (instructions or scopes) and question is None:
        raise Misuse("--ask and --instructions go with --keep")
    place = _Place(server, memory, name, as_json)
    if text is not None:
        whole = sys.stdin.read() if text == "-" else text
        place.write(lambda blocks: blocks.put(name, whole, max_tokens=max_tokens, etag=etag))
    elif lines is not None:
        place.write(lambda blocks: blocks.append(name, lines, etag=etag))
    elif parts:
        place.write(lambda blocks: blocks.replace(name, *parts, etag=etag))
    elif insertion:
        place.write(lambda blocks: blocks.insert(name, *insertion, etag=etag))
    elif question is not None:
        asked = question
        place.write(
            lambda blocks: blocks.keep(
                name, asked, scopes=scopes, instructions=instructions, max_tokens=max_tokens, etag=etag
            )
        )
    elif deletes:
        place.delete(etag)
    elif name and not shows_versions:
        place.show(version or 0)
    else:
        place.list_rows()


@dataclass(frozen=True, slots=True)
class _Place:
    """The blocks of a memory, or one of them."""

    server: Server
    memory: str
    name: str
    as_json: bool

    def write(self, call: Callable[[Blocks], Awaitable[BlockInfo]]) -> None:
        async def run(client: Client) -> BlockInfo:
            return await call(client.memory(self.memory).blocks)

        found = self.server.run_with_client(run)
        if self.as_json:
            print_json(found)
        else:
            bound = f" of {found.max_tokens:,}" if found.max_tokens else ""
            kept = ", keeps itself" if found.standing is not None else ""
            print_line(f"{self.memory}#{found.name} is version {found.version}, {found.tokens:,}{bound} tokens{kept}")

    def delete(self, etag: str) -> None:
        async def run(client: Client) -> bool:
            return await client.memory(self.memory).blocks.delete(self.name, etag=etag)

        deleted = self.server.run_with_client(run)
        if self.as_json:
            print_json({"deleted": deleted})
        else:
            print_line(f"{'deleted' if deleted else 'there is no'} {self.memory}#{self.name}")

    def show(self, version: int) -> None:
        async def run(client: Client) -> Block:
            return await client.memory(self.memory).blocks.get(self.name, version=version)

        found = self.server.run_with_client(run)
        if self.as_json:
            print_json(found)
        else:
            print_line(found.text)
            if found.standing is not None and found.standing.problem:
                print_line(f"not up to date: {found.standing.problem}", err=True)

    def list_rows(self) -> None:
        grid = create_table(
            "block", "version", "tokens", "bound", "changed", "text", numbers=["version", "tokens"], wide="text"
        )

        def format_row(found: Block) -> Row:
            bound = f"{found.max_tokens:,}" if found.max_tokens else ""
            changed, text = format_time(found.update_time), escape_line(found.text, _SHOWN)
            return found.name, str(found.version), f"{found.tokens:,}", bound, changed, text

        def ask(client: Client, _size: int) -> AsyncIterator[Block]:
            blocks = client.memory(self.memory).blocks
            return blocks.versions(self.name) if self.name else blocks.list()

        show_list(self.server, ask, grid, format_row, 0, self.as_json, "no block")
