"""Which commands there are; each one's module is imported only when it is used, so that --help is quick."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import Any

import click

from memstream_server.cli.failures import AS_JSON, EXIT_CODES, Failure, Misuse

COMMANDS = {
    "serve": ("serve", "Run a server until it is told to stop."),
    "observe": ("observe", "Send observations from files or standard input into a memory."),
    "recall": ("recall", "Ask what a memory knows."),
    "list": ("listing", "List namespaces, a namespace's memories, or a memory's fragments."),
    "show": ("showing", "Show a memory and its policy, or one of its fragments."),
    "stats": ("showing", "Count what a memory holds."),
    "info": ("showing", "Show what the server is and can do."),
    "export": ("transfer", "Write a memory, or all of a namespace, to a file."),
    "import": ("transfer", "Bring an export into a server."),
    "adopt": ("adopt", "Bring a Milvus collection into a new memory, as its long-term memory."),
    "erase": ("long_work", "Erase fragments for good, with all that derives from them."),
    "purge": ("long_work", "Erase now what is forgotten and past its grace."),
    "reindex": ("long_work", "Rebuild the vector index, or embed everything anew."),
    "operations": ("long_work", "List long work, look at it, wait for it, cancel it."),
    "keys": ("keys", "Make, list and revoke API keys."),
    "healthcheck": ("healthcheck", "Say by the exit code whether the server of these settings serves."),
    "mcp": ("mcp", "Serve a memory's tools over the Model Context Protocol."),
    "backup": ("data", "Copy the journal of a data directory, also while its server runs."),
    "verify": ("verify", "Check that a journal holds what its event logs say."),
    "doctor": ("doctor", "Say what is wrong with a data directory, and what to do."),
    "restore": ("data", "Put a backup into a data directory whose server is stopped."),
}
"""Module and summary by name; the command is `NAME_command` of memstream_server.cli.MODULE."""

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""How writing to where the output goes may fail."""

_INTRODUCTION = """A memory server for agents, and its client on the command line.

\b
  memstream serve                                        # in one terminal
  memstream observe --create demo/joy notes.txt          # in another
  memstream recall demo/joy "when does the train leave?" --explain

A memory is named NAMESPACE/NAME. The server asked is --target, else $MEMSTREAM_TARGET, else 127.0.0.1:7700.
`memstream COMMAND --help` says more, with examples.
"""


def _show_version(ctx: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    from importlib import metadata  # as long as all the rest of --help

    try:
        version = metadata.version("memstream")
    except metadata.PackageNotFoundError:  # run from a source tree
        version = "unknown"
    click.echo(f"memstream {version}")
    ctx.exit()


class LazyGroup(click.Group):
    """The commands of COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"memstream_server.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[AS_JSON] = "--json" in args
        for number, word in enumerate(args, 1):
            _check_decoded(number, word)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            from memstream.errors import InvalidArgument  # what raised it has imported it; --help does not

            if isinstance(error, InvalidArgument):
                raise Misuse(error.summary()) from error
            raise
        except OSError as error:
            if error.errno not in _UNWRITABLE or error.filename is not None:
                raise  # a broken pipe too, which click takes for the end that it is
            raise Failure(f"the output could not be written: {error.strerror or error}") from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _check_decoded(number: int, word: str) -> None:
    """Raises Misuse for a word whose bytes are not in the encoding of the command line: Python gives surrogates."""
    wrong = next((at for at, character in enumerate(word) if "\ud800" <= character <= "\udfff"), None)
    if wrong is not None:
        shown = "".join(map(_byte_or_character, word))
        encoding = sys.getfilesystemencoding().upper()
        raise Misuse(f"word {number} of the command line is not {encoding} from character {wrong + 1} on: '{shown}'")


def _byte_or_character(character: str) -> str:
    """As in a bytes literal, where Python has put a surrogate for a byte."""
    is_byte = "\udc80" <= character <= "\udcff"
    return f"\\x{ord(character) - 0xDC00:02x}" if is_byte else ascii(character)[1:-1]


@click.command(
    cls=LazyGroup,
    help=_INTRODUCTION,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def root() -> None:
    """The command without a subcommand; its help is `_INTRODUCTION`."""


def main() -> None:
    """Run the command line and exit with one of the codes of failures.py."""
    _open_closed()
    root.main(prog_name="memstream")


def _open_closed() -> None:
    """Standard streams that whoever started this closed: else the next file or socket would be taken for them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # takes the number that is free
