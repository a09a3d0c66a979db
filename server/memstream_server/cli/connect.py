"""`memstream connect`: writes, shows and removes the configuration with which an agent host uses a memory; and
`memstream hook`, which these hosts run (see memstream.hooks, which runs without this module: a host waits for it)."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import click

from memstream.errors import InvalidArgument, MemstreamError
from memstream.hooks import EVENTS, main
from memstream.hosts import HOSTS, Connection, plan_connection, plan_removal
from memstream.hosts.files import write
from memstream_server.cli.failures import Failure, Misuse, describe_os_error
from memstream_server.cli.options import json_option
from memstream_server.cli.server import default_directory, local_option

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
@json_option
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
    as_json: bool,
) -> None:
    """Connect an agent host to a memory: its tools over MCP, and hooks that add context at session start and at each
    prompt, and observe each turn. OpenCode has no such hooks: it gets the tools.

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
        server=["--target", target] if target else ["--local", str((local or default_directory()).absolute())],
        name=name,
        hooks=not no_hooks,
        keep_secrets=keep_secrets,
    )
    try:
        changes = (plan_removal if remove else plan_connection)(what, Path.home(), Path.cwd())
        for change in () if show else changes:
            write(change)
    except MemstreamError as error:
        raise (Misuse if isinstance(error, InvalidArgument) else Failure)(error.summary()) from error
    except OSError as error:
        raise Failure(describe_os_error(error)) from error
    if as_json:
        click.echo(json.dumps([{"file": str(each.file), "diff": each.diff(), "kept": each.kept} for each in changes]))
        return
    for change in changes:
        for entry in change.kept:
            click.echo(f"memstream: {change.file}: {entry} was changed since, and stays", err=True)
        click.echo("\n".join(change.diff()) or f"{change.file}: nothing to change")


def _own_command() -> list[str]:
    """The words that start this command from any directory."""
    script = Path(sys.argv[0]).absolute()
    if script.name == "memstream" and shutil.which(str(script)):
        return [str(script)]
    return [sys.executable, "-m", "memstream_server"]


@click.command(
    "hook",
    short_help="Add context to a host's session, and observe its turns; hosts run it.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("event", type=click.Choice(EVENTS))
@click.pass_context
def hook_command(context: click.Context, event: str) -> None:
    """Answer a host's event, given as JSON on standard input; `memstream connect` configures hosts so that they run it.

    session-start and prompt print the context to add, stop observes the turn. The command takes 0.3 s at most, and
    whatever goes wrong it exits with 0 and prints nothing. MEMSTREAM_HOOK_DEBUG=1 lets it fail visibly.

    \b
      memstream hook prompt --host codex --memory 'code/{project}' --target 127.0.0.1:7700
      --host HOST               claude-code, codex, cursor, vscode or gemini-cli
      --memory NAMESPACE/NAME   the memory; {project} is the project of the session
      --local DIR | --target HOST:PORT
      --budget TOKENS           of the context of one event (1500)
      --within SECONDS          the time of the hook, from the start of its process (0.3)
      --keep-secrets            store keys, tokens and passwords too
    """
    main([event, *context.args])
