"""Failures of commands: one line on standard error that says what to do, and a documented exit code."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import IO, Any, ClassVar

import click

from memstream_server.core.printable import escape_unprintable

_LINE_BREAK = "\n"
AS_JSON = "memstream.as_json"
"""Key in a click context's meta: whether the command line has --json, for failures outside of the command."""


class Exit(IntEnum):
    """Exit codes."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REJECTED = 3
    NOT_FOUND = 4
    INTERRUPTED = 130


EXIT_CODES = """\b
Exit codes:
  0  done
  1  the server or the connection failed; verify, doctor or check found a problem, replay another ranking
  2  the command line, the settings, the file of check or a value in them is invalid
  3  observe, import: some observations were rejected; the others are stored
  4  a named resource does not exist
  130  interrupted (Ctrl-C)
"""


class Failure(click.ClickException):
    """Ends the command. `reason` is the server's memstream.v1.ErrorReason, if any; --json prints it."""

    exit_code: ClassVar[int] = Exit.FAILED

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        # Read now: click prints a failure after the command's context has ended.
        context = click.get_current_context(silent=True)
        self._as_json = context is not None and bool(context.params.get("as_json") or context.meta.get(AS_JSON))

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints one line of text, or of JSON."""
        if self._as_json:
            error = {"exit_code": self.exit_code, "reason": self.reason, "message": self.message}
            click.echo(json.dumps({"error": error}, ensure_ascii=False), file=file, err=file is None)
        else:
            click.echo(f"memstream: {escape_unprintable(self.message, keep=_LINE_BREAK)}", file=file, err=file is None)


class Misuse(Failure):
    """The command line, the settings or a value in them is invalid."""

    exit_code: ClassVar[int] = Exit.USAGE


class Missing(Failure):
    """A named resource does not exist."""

    exit_code: ClassVar[int] = Exit.NOT_FOUND


def describe_os_error(error: OSError) -> str:
    """The file and what is wrong with it, without the error's number."""
    what = error.strerror or str(error)
    return what if error.filename is None else f"{error.filename}: {what}"
