"""`memstream backup` and `memstream restore`: copy the journal of a data directory, without a server."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from memstream_server.cli.failures import Failure, Missing, Misuse, describe_os_error
from memstream_server.cli.options import json_option
from memstream_server.cli.output import print_json, print_line
from memstream_server.settings import SettingsError, load

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
