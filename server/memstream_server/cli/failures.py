"""How a command fails: one clear line on standard error that says what to do, and an exit code with a meaning."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import IO, Any, ClassVar

import click

from memstream_server.core.printable import printable

_LINE_BREAK = "\n"
AS_JSON = "memstream.as_json"
"""In the meta of a click context: whether the command line has --json, for failures outside of the command itself."""


class Exit(IntEnum):
    """What the exit code says."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REJECTED = 3
    NOT_FOUND = 4


EXIT_CODES = """\b
Exit codes:
  0  done
  1  the server or the connection failed, or refused; verify found a violation, doctor a problem
  2  the command line, the settings or a value in them is wrong
  3  observe: some observations were rejected; the others are stored
  4  what was named does not exist
"""


class Failure(click.ClickException):
    """Ends the command. `reason` is a memstream.v1.ErrorReason where a server gave one; --json prints it so."""

    exit_code: ClassVar[int] = Exit.FAILED

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        # Taken now: click prints a failure after the command's context has ended.
        context = click.get_current_context(silent=True)
        self._as_json = context is not None and bool(context.params.get("as_json") or context.meta.get(AS_JSON))

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it: a line of text, or one of JSON."""
        if self._as_json:
            error = {"exit_code": self.exit_code, "reason": self.reason, "message": self.message}
            click.echo(json.dumps({"error": error}, ensure_ascii=False), file=file, err=file is None)
        else:
            click.echo(f"memstream: {printable(self.message, keep=_LINE_BREAK)}", file=file, err=file is None)


class Misuse(Failure):
    """The command line, the settings or a value in them is wrong."""

    exit_code: ClassVar[int] = Exit.USAGE


class Missing(Failure):
    """What was named does not exist."""

    exit_code: ClassVar[int] = Exit.NOT_FOUND
