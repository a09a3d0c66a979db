"""Commands on a data directory, without a server.

`memstream backup` and `memstream restore` copy its journal. `memstream verify` checks a journal against its event logs,
`memstream doctor` diagnoses a server's data and gives advice; both change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memstream_server.cli.failures import Exit, Failure, Missing, Misuse, describe_os_error
from memstream_server.cli.options import json_option
from memstream_server.cli.output import create_table, escape_text, open_console, print_json, print_line, print_parts
from memstream_server.settings import LogFormat, LogLevel, Settings, SettingsError, load

if TYPE_CHECKING:
    from memstream_server.adapters.journal.verify.read_only_open import OpenedJournal
    from memstream_server.adapters.journal.verify.report import Report
    from memstream_server.diagnosis import Finding


F = TypeVar("F", bound=Callable[..., Any])


def _describe(error: Exception) -> str:
    return describe_os_error(error) if isinstance(error, OSError) else str(error)


def data_options(command: F) -> F:
    """Adds --data and --config to a command, as one argument `data_dir`: the directory that a server would use."""

    @click.option("--data", "--data-dir", "data", type=click.Path(path_type=Path), help="The server's data directory.")
    @click.option(
        "--config", type=click.Path(path_type=Path), help="The server's settings file. Default: $MEMSTREAM_CONFIG."
    )
    @functools.wraps(command)
    def wrapper(*args: Any, data: Path | None, config: Path | None, **kwargs: Any) -> Any:
        try:
            settings = load(config, {"data_dir": data})
        except SettingsError as error:
            raise Misuse(str(error)) from error
        if settings.journal_url.get_secret_value():
            raise Misuse("the journal is on PostgreSQL (journal_url): use pg_dump and pg_restore")
        return command(*args, data_dir=settings.data_dir, **kwargs)

    return cast("F", wrapper)


def place_options(command: F) -> F:
    """Adds --data, --journal-url and --config to a command, as one argument `settings`: those a server would use."""

    @click.option("--data", "--data-dir", "data", type=click.Path(path_type=Path), help="The server's data directory.")
    @click.option("--journal-url", metavar="URL", help="The journal's PostgreSQL database, if it uses one.")
    @click.option(
        "--config", type=click.Path(path_type=Path), help="The server's settings file. Default: $MEMSTREAM_CONFIG."
    )
    @functools.wraps(command)
    def wrapper(*args: Any, data: Path | None, journal_url: str | None, config: Path | None, **kwargs: Any) -> Any:
        if data is not None and journal_url:
            raise Misuse("name a data directory or a database, not both")
        url = "" if data is not None else journal_url  # --data overrides the journal_url of the settings
        try:
            settings = load(config, {"data_dir": data, "journal_url": url})
        except SettingsError as error:
            raise Misuse(str(error)) from error
        return command(*args, settings=settings, **kwargs)

    return cast("F", wrapper)


@click.command("backup", short_help="Copy the journal of a data directory, even while its server runs.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@data_options
@json_option
def backup_command(file: Path, data_dir: Path, as_json: bool) -> None:
    """Copy the journal of a data directory to FILE, which must not exist. The server may be running.

    The journal is all that needs a backup: the vector index is rebuilt from it. The copy contains everything
    acknowledged before the command was started.

    \b
      memstream backup monday.memstream
      memstream backup --data ./data backups/monday.memstream
    """
    from memstream_server.adapters.journal.database import directory
    from memstream_server.ports.journal.errors import AlreadyExists, JournalError

    if not directory.journal_path(data_dir).is_file():
        raise Missing(f"there is no journal in {data_dir}: name the server's data directory with --data")
    if not file.absolute().parent.is_dir():
        raise Missing(f"there is no directory {file.absolute().parent}")
    try:
        directory.write_backup(data_dir, file)
    except AlreadyExists as error:
        raise Misuse(str(error)) from error
    except (JournalError, OSError) as error:
        raise Failure(f"no backup was made: {_describe(error)}") from error
    size = file.stat().st_size
    if as_json:
        print_json({"data_dir": str(data_dir.absolute()), "file": str(file.absolute()), "bytes": size})
    else:
        print_line(f"copied the journal of {data_dir} to {file} ({size:,} bytes)")


@click.command("restore", short_help="Restore a backup into a data directory whose server is stopped.")
@click.argument("file", type=click.Path(path_type=Path))
@data_options
@click.option("--force", is_flag=True, help="Replace an existing journal; its content is lost.")
@json_option
def restore_command(file: Path, data_dir: Path, force: bool, as_json: bool) -> None:
    """Restore the backup FILE into a data directory: a new or empty one, or with --force any that no server uses.

    The next start of the server rebuilds the vector index from the journal; recall works meanwhile. Clients whose
    streams were ahead of the backup get an error.

    \b
      memstream restore monday.memstream --data ./data
    """
    from memstream_server.adapters.journal.database import directory
    from memstream_server.ports.journal.errors import AlreadyExists, JournalError

    if not file.is_file():
        raise Missing(f"there is no backup {file}")
    replaced = directory.journal_path(data_dir).is_file()
    try:
        directory.restore(file, data_dir, force=force)
    except AlreadyExists as error:
        raise Misuse(str(error)) from error
    except (JournalError, OSError) as error:
        raise Failure(f"nothing was restored: {_describe(error)}") from error
    size = directory.journal_path(data_dir).stat().st_size
    if as_json:
        print_json({"data_dir": str(data_dir.absolute()), "file": str(file), "bytes": size, "replaced": replaced})
    else:
        lost = "; the previous journal was replaced" if replaced else ""
        print_line(f"restored {file} into {data_dir} ({size:,} bytes){lost}; the next start rebuilds the index")


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
    from memstream_server.diagnosis import run_checks
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
