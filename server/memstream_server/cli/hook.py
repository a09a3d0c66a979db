"""`memstream hook`: what a host runs at the events of a session. See memstream.hooks, which the command runs without
this module: a host waits for it."""

from __future__ import annotations

import click

from memstream.hooks import EVENTS, main


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
      --host HOST               claude-code, codex, cursor or vscode
      --memory NAMESPACE/NAME   the memory; {project} is the project of the session
      --local DIR | --target HOST:PORT
      --budget TOKENS           of the context of one event (1500)
      --keep-secrets            store keys, tokens and passwords too
    """
    main([event, *context.args])
