"""`memstream verify`: checks a journal against its event logs, without changing it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memstream_server.cli.data import place_options
from memstream_server.cli.failures import Exit, Failure, Missing
from memstream_server.cli.options import json_option
from memstream_server.cli.output import create_table, escape_text, open_console, print_json, print_line, print_parts
from memstream_server.settings import Settings

if TYPE_CHECKING:
    from memstream_server.adapters.journal.verify.read_only_open import OpenedJournal
    from memstream_server.adapters.journal.verify.report import Report


@click.command("verify", short_help="Check a journal against its event logs.")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@place_options
@json_option
def verify_command(file: Path | None, settings: Settings, as_json: bool) -> None:
    """Check the journal of a data directory or database, or the backup FILE, without changing it.

    The command replays every memory's events from the first and compares the result with its fragments. It also checks
    numbers, receipts, vectors, lineage, conversations and operations. The server may be running: each memory is read as
    one snapshot. The exit code is 1 if there is a violation.

    \b
      memstream verify --data ./data
      memstream verify monday.memstream --json
    """
    from memstream_server.adapters.journal.verify.verify import verify_journal
    from memstream_server.adapters.models.hashing import computed_spaces
    from memstream_server.ports.journal.errors import JournalError

    if file is not None and not file.is_file():
        raise Missing(f"there is no file {file}")
    where = str(file or ("the database" if settings.journal_url.get_secret_value() else settings.data_dir))
    try:
        with _open_journal(file, settings) as looked, _progress_bar() as bar:
            task = bar.add_task("memories and conversations", total=None)
            report = verify_journal(
                looked, lambda done, total: bar.update(task, completed=done, total=total), computed_spaces()
            )
    except (JournalError, OSError) as error:
        raise Failure(f"{where} cannot be verified: {error}") from error
    if as_json:
        print_json(_report_json(where, report))
    else:
        _print_report(where, report)
    if report.violations:
        raise SystemExit(Exit.FAILED)


def _open_journal(file: Path | None, settings: Settings) -> AbstractContextManager[OpenedJournal]:
    from memstream_server.adapters.journal.verify import read_only_open

    if file is not None:
        return read_only_open.open_backup(file)
    if url := settings.journal_url.get_secret_value():
        return read_only_open.open_database(url)
    return read_only_open.open_data_directory(settings.data_dir)


def _progress_bar() -> Progress:
    """A progress bar on standard error, if that is a terminal."""
    out = open_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=out, transient=True, disable=not out.is_terminal)


def _report_json(where: str, report: Report) -> dict[str, object]:
    return {
        "verified": where,
        "ok": not report.violations,
        "checked": report.checked,
        "violated": report.violated,
        "violations": report.violations,
        "compacted": report.compacted,
        "unfinished": report.unfinished,
    }


def _print_report(where: str, report: Report) -> None:
    from memstream_server.adapters.journal.verify.report import CHECKS

    grid = create_table("check", "checked", "violated", "what", numbers=("checked", "violated"), wide="what")
    for name, what in CHECKS.items():
        grid.add_row(name, f"{report.checked[name]:,}", f"{report.violated[name]:,}", what)
    out = open_console()
    print_parts(out, grid)
    for name, first in report.compacted.items():
        print_line(
            f"{name}: its events are kept from revision {first} on, so older fragments were only compared from there"
        )
    for id_, what in report.unfinished.items():
        print_line(f"operation {id_} has not ended: {escape_text(what)}")
    if report.violations:
        found = create_table("check", "memory", "fragment", "what is wrong", wide="what is wrong")
        for each in report.violations:
            found.add_row(each.check, escape_text(each.memory), each.fragment, escape_text(each.text))
        print_parts(out, found)
    count = sum(report.violated.values())
    more = f", {len(report.violations):,} of them shown" if count > len(report.violations) else ""
    print_line(f"{where}: {f'{count:,} violations{more}' if count else 'everything is as its events say'}")
