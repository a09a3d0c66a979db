"""`memstream keys`: manages the file of API keys that a server reads (`api_keys_file`), without a server."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from memstream_server.cli.failures import Failure, Missing, Misuse
from memstream_server.cli.options import json_option
from memstream_server.cli.output import create_table, escape_line, open_console, print_json, print_parts
from memstream_server.rpc.access import keys
from memstream_server.rpc.access.files import AccessError

F = TypeVar("F", bound=Callable[..., Any])


def _file_option(command: F) -> F:
    """Adds --file to a command; an invalid file ends the command."""

    @click.option(
        "--file",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="MEMSTREAM_API_KEYS_FILE",
        show_envvar=True,
        required=True,
        help="The file of keys.",
    )
    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except keys.NoSuchKey as error:
            raise Missing(str(error)) from error
        except keys.InvalidKeyName as error:
            raise Misuse(str(error)) from error
        except AccessError as error:
            raise Failure(str(error)) from error

    return cast("F", wrapper)


@click.group("keys", short_help="Create, list and revoke API keys.")
def keys_command() -> None:
    """Create, list and revoke the API keys of a server.

    The server reloads the file when it changes. Its access_policy_file grants permissions to a key, as key:NAME.

    \b
      memstream keys create joy --file keys.json
      memstream keys list --file keys.json --json
      memstream keys revoke 0123456789ab --file keys.json
    """


@keys_command.command("create", short_help="Create a key and print it once.")
@click.argument("name")
@_file_option
@json_option
def create(name: str, file: Path, as_json: bool) -> None:
    """Create a key for NAME and print it. The file only stores its hash."""
    key, given = keys.create_key(file, name)
    if as_json:
        print_json({"id": key.id, "name": key.name, "created": key.created, "key": given})
        return
    click.echo(given)
    click.echo(f"memstream: this is key {key.id} of {key.name}; it cannot be shown again", err=True)


@keys_command.command("list", short_help="List keys by id and name.")
@_file_option
@json_option
def listing(file: Path, as_json: bool) -> None:
    """List the keys, oldest first."""
    if not file.exists():
        raise Missing(f"there is no file {file}: `memstream keys create` creates it")
    there = keys.read_keys(file)
    if as_json:
        for key in there:
            print_json({"id": key.id, "name": key.name, "created": key.created})
        return
    grid = create_table("id", "name", "created")
    for key in there:
        grid.add_row(key.id, escape_line(key.name, 128), key.created)
    print_parts(open_console(), grid)


@keys_command.command("revoke", short_help="Revoke a key.")
@click.argument("id")
@_file_option
@json_option
def revoke(id: str, file: Path, as_json: bool) -> None:
    """Revoke the key with this ID. Servers reject it within seconds, and end the streams that it opened."""
    gone = keys.revoke_key(file, id)
    if as_json:
        print_json({"id": gone.id, "name": gone.name})
    else:
        click.echo(f"revoked key {gone.id} of {gone.name}")
