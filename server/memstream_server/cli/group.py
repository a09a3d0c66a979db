"""The table of commands. A command's module is imported on first use, which keeps --help fast."""

from __future__ import annotations

import difflib
import errno
import os
import sys
from importlib import import_module
from typing import Any

import click

from memstream_server.cli.failures import AS_JSON, EXIT_CODES, Exit, Failure, Misuse

COMMANDS = {
    "dev": ("dev", "Run a server with a sample memory, to try memstream."),
    "serve": ("serve", "Run a server until SIGTERM or SIGINT."),
    "observe": ("observe", "Send observations from files or standard input into a memory."),
    "recall": ("recall", "Query a memory."),
    "context": ("recall", "Show what a model would see before a turn."),
    "check": ("check", "Check what a memory recalls against a file of expectations."),
    "list": ("listing", "List namespaces, a namespace's memories, or a memory's fragments."),
    "show": ("showing", "Show a memory and its policy, or one of its fragments."),
    "sessions": ("listing", "List a memory's sessions."),
    "conversations": ("conversations", "List a namespace's conversations, show, search or delete one."),
    "blocks": ("blocks", "List a memory's blocks, show, write, edit or delete one."),
    "queries": ("listing", "List the standing queries that are open on a memory."),
    "history": ("corrections", "Show what a fragment said before it was changed."),
    "receipts": ("listing", "List the receipts of a memory's recalls."),
    "replay": ("listing", "Rank a recall again, as of its receipt."),
    "stats": ("showing", "Count a memory's fragments."),
    "info": ("showing", "Show the server's version, models, capabilities and limits."),
    "server": ("showing", "Show what the server uses and does, and who calls it."),
    "export": ("transfer", "Export a memory or a namespace to a file."),
    "import": ("transfer", "Import an export, or chats and memories of another program."),
    "supersede": ("corrections", "Mark fragments as corrected by a newer one."),
    "conflicts": ("corrections", "List statements that may not be true together, and decide one."),
    "erase": ("long_work", "Erase fragments permanently, with everything derived from them."),
    "purge": ("long_work", "Erase forgotten fragments past their grace period now."),
    "reindex": ("long_work", "Rebuild the vector index, or re-embed all content."),
    "operations": ("long_work", "List, show, await and cancel operations."),
    "keys": ("keys", "Create, list and revoke API keys."),
    "models": ("models", "Install, list and remove local embedding models."),
    "healthcheck": ("healthcheck", "Exit with 0 if the server with these settings is serving."),
    "mcp": ("mcp", "Serve a memory's tools over the Model Context Protocol."),
    "connect": ("connect", "Connect an agent host to a memory, by its configuration and hooks."),
    "hook": ("connect", "Add context to a host's session, and observe its turns; hosts run it."),
    "backup": ("data", "Copy the journal of a data directory, even while its server runs."),
    "verify": ("data", "Check a journal against its event logs."),
    "doctor": ("data", "Diagnose a data directory and say what to do."),
    "restore": ("data", "Restore a backup into a data directory whose server is stopped."),
}
"""Module and summary by name; the command is `NAME_command` of memstream_server.cli.MODULE."""

MOVED = {"adopt": "import --from milvus URI NAMESPACE/MEMORY --collection NAME"}
"""Commands that others have replaced."""

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a failed write to the output."""

_INTRODUCTION = """A memory server for agents, and its client on the command line.

\b
  memstream serve                                        # in one terminal
  memstream observe --create demo/joy notes.txt          # in another
  memstream recall demo/joy "when does the train leave?" --explain

A memory is named NAMESPACE/NAME. Commands connect to --target, else $MEMSTREAM_TARGET, else 127.0.0.1:7700.
`memstream COMMAND --help` shows details and examples.
"""


def _show_version(ctx: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    from importlib import metadata  # slow: takes as long as the rest of --help

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

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] in MOVED:
            ctx.fail(f"There is no command {args[0]!r} any more: use `memstream {MOVED[args[0]]}`.")
        if args and args[0] not in COMMANDS and (near := difflib.get_close_matches(args[0], COMMANDS, 1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[AS_JSON] = "--json" in args
        for number, word in enumerate(args, 1):
            _check_decoded(number, word)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(Exit.INTERRUPTED) from None
        except click.UsageError as error:
            if ctx.meta[AS_JSON]:
                raise Misuse(error.format_message()) from error
            raise
        except ValueError as error:
            from memstream.errors import InvalidArgument  # imported late: --help does not need it

            if isinstance(error, InvalidArgument):
                raise Misuse(error.summary()) from error
            raise
        except OSError as error:
            if error.errno not in _UNWRITABLE or error.filename is not None:
                raise  # includes a broken pipe, which click handles
            raise Failure(f"the output could not be written: {error.strerror or error}") from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _check_decoded(number: int, word: str) -> None:
    """Raises Misuse for a word with bytes that are invalid in the locale's encoding; Python decodes them to
    surrogates."""
    wrong = next((at for at, character in enumerate(word) if "\ud800" <= character <= "\udfff"), None)
    if wrong is not None:
        shown = "".join(map(_byte_or_character, word))
        encoding = sys.getfilesystemencoding().upper()
        raise Misuse(f"word {number} of the command line is not {encoding} from character {wrong + 1} on: '{shown}'")


def _byte_or_character(character: str) -> str:
    """Formats a character; a surrogate that Python uses for an invalid byte as in a bytes literal."""
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
    """Runs the command line and exits with one of the codes in failures.py."""
    _open_closed_streams()
    if sys.argv[1:2] != ["serve"]:
        # Clients: their errors have the cause, which gRPC would print for every attempt to connect.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    root.main(prog_name="memstream")


def _open_closed_streams() -> None:
    """Opens standard streams that the parent process closed: else the next file or socket would get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # gets the free number
