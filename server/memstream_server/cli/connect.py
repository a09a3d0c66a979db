"""`memstream connect`: writes, shows and removes the configuration with which an agent host uses a memory."""

from __future__ import annotations

import difflib
import re
import shutil
import sys
from pathlib import Path

import click

from memstream.errors import InvalidArgument, MemstreamError
from memstream.hosts import HOSTS, Connection, plan_connection, plan_removal
from memstream.hosts.files import Change, write
from memstream_server.cli.failures import Failure, Misuse, describe_os_error
from memstream_server.cli.server import local_option

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@click.command("connect", short_help="Connect an agent host to a memory, by its configuration and hooks.")
@click.argument("host", type=click.Choice(HOSTS))
@click.option("--remove", is_flag=True, help="Take away what this command added, and nothing else.")
@click.option("--show", is_flag=True, help="Show the change, and write nothing.")
@click.option(
    "--scope",
    type=click.Choice(["user", "project"]),
    help="Whose configuration: the user's, or that of the project in the working directory. Default: the user's; for "
    "vscode the project's.",
)
@click.option(
    "--memory",
    default="code/{project}",
    show_default=True,
    metavar="NAMESPACE/NAME",
    help="The memory; {project} is the host's project.",
)
@local_option
@click.option("--target", metavar="HOST:PORT", help="A server that runs, in place of --local.")
@click.option("--name", default="memstream", show_default=True, metavar="NAME", help="Name of the entry for the tools.")
@click.option("--no-hooks", is_flag=True, help="Only the tools: neither context at each prompt nor observed turns.")
@click.option("--keep-secrets", is_flag=True, help="Let hooks store keys, tokens and passwords too.")
def connect_command(
    host: str,
    remove: bool,
    show: bool,
    scope: str | None,
    memory: str,
    local: Path | None,
    target: str | None,
    name: str,
    no_hooks: bool,
    keep_secrets: bool,
) -> None:
    """Connect an agent host to a memory: its tools over MCP, and hooks that add context at session start and at each
    prompt, and observe each turn.

    It shows the change as a diff and writes it. A file that cannot be parsed is left alone, and what the command did
    not write stays byte for byte. A token for the server is taken from MEMSTREAM_TOKEN when the host starts it.

    \b
      memstream connect claude-code
      memstream connect vscode --target 127.0.0.1:7700 --show
      memstream connect codex --remove
    """
    if local is not None and target:
        raise Misuse("--local and --target exclude each other")
    if not _NAME.fullmatch(name):
        raise Misuse(f"--name is {name!r}: give letters, digits, - and _")
    what = Connection(
        host=host,
        scope="project" if scope == "project" or (scope is None and host == "vscode") else "user",
        command=_own_command(),
        memory=memory,
        server=["--target", target] if target else ["--local", str((local or _default_directory()).absolute())],
        name=name,
        hooks=not no_hooks,
        keep_secrets=keep_secrets,
    )
    try:
        changes = (plan_removal if remove else plan_connection)(what, Path.home(), Path.cwd())
        for change in changes:
            _show_change(change)
            if not show:
                write(change)
    except MemstreamError as error:
        raise (Misuse if isinstance(error, InvalidArgument) else Failure)(error.summary()) from error
    except OSError as error:
        raise Failure(describe_os_error(error)) from error


def _show_change(change: Change) -> None:
    for name in change.kept:
        click.echo(f"memstream: {change.file}: {name} was changed since, and stays", err=True)
    if change.before == change.after:
        click.echo(f"{change.file}: nothing to change")
        return
    old, new = ((text or "").splitlines(keepends=True) for text in (change.before, change.after))
    names = ["/dev/null" if text is None else str(change.file) for text in (change.before, change.after)]
    for line in difflib.unified_diff(old, new, names[0], names[1]):
        click.echo(line.rstrip("\r\n"))


def _own_command() -> list[str]:
    """The words that start this command from any directory."""
    script = Path(sys.argv[0]).absolute()
    if script.name == "memstream" and shutil.which(str(script)):
        return [str(script)]
    return [sys.executable, "-m", "memstream_server"]


def _default_directory() -> Path:
    option = next(each for each in connect_command.params if each.name == "local")
    assert isinstance(option, click.Option)
    return Path(str(option.flag_value))
