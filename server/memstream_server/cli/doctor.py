"""`memstream doctor`: diagnoses a server's data and gives advice, without changing anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from memstream_server.cli.data import place_options
from memstream_server.cli.failures import Exit
from memstream_server.cli.options import json_option
from memstream_server.cli.output import create_table, escape_text, open_console, print_json, print_parts
from memstream_server.settings import LogFormat, LogLevel, Settings

if TYPE_CHECKING:
    from memstream_server.diagnosis.findings import Finding


@click.command("doctor", short_help="Diagnose a data directory and say what to do.")
@click.option(
    "--online",
    is_flag=True,
    help="Also send a small request to the models' endpoints, and check that Milvus is reachable.",
)
@place_options
@json_option
def doctor_command(online: bool, settings: Settings, as_json: bool) -> None:
    """Diagnose the data directory (or database) that a server with the same settings would use, without changing it.

    Each finding is ok, a note or a problem; a problem says what to do, and sets the exit code to 1. The server may be
    running. To check the journal against its event logs, use `memstream verify`.

    \b
      memstream doctor --data ./data
      memstream doctor --online --json
    """
    from memstream_server.diagnosis.examine import run_checks
    from memstream_server.observability import configure_logging

    configure_logging(LogLevel.ERROR, LogFormat.CONSOLE)  # findings report problems, on standard output
    findings = list(run_checks(settings, online))
    problems = sum(one.level == "problem" for one in findings)
    if as_json:
        print_json({"ok": not problems, "findings": findings})
    else:
        _print_findings(findings, problems)
    if problems:
        raise SystemExit(Exit.FAILED)


def _print_findings(findings: Sequence[Finding], problems: int) -> None:
    grid = create_table("", "about", "found", wide="found")
    for one in findings:
        advice = f"\n→ {one.advice}" if one.advice else ""
        grid.add_row(str(one.level), one.subject, escape_text(f"{one.text}{advice}"))
    print_parts(open_console(), grid)
    click.echo(f"{problems} problems" if problems else "no problems")
