"""Runs `memstream` commands, in a separate process or in this one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

import structlog
from click.testing import CliRunner

from memstream_server.cli.group import root
from tests.support import journals
from tests.support.forked import ForkedProgram

COMMAND = (sys.executable, "-m", "memstream_server")


def environment(target: str = "") -> dict[str, str]:
    """This process's environment, with the target as the only MEMSTREAM_ variable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMSTREAM_")}
    return kept | ({"MEMSTREAM_TARGET": target} if target else {})


def run(*words: str, stdin: str = "", target: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `memstream WORDS` in a separate process to its end."""
    with ForkedProgram(words, environment(target) | journals.environment(words)) as program:
        out, err = program.communicate(stdin)
        return subprocess.CompletedProcess(words, program.wait(), out, err)


def call(*words: str, stdin: str = "", target: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `memstream WORDS` in this process, without the 0.3 s of CPU that a process takes to start.

    `variables` are further MEMSTREAM_ variables, by setting. An exception that the command does not handle is raised.
    For signals, streams of the shell and `serve`, which changes its process, use `run`.
    """
    others = {name: None for name in os.environ if name.startswith("MEMSTREAM_")}
    given = {f"MEMSTREAM_{name.upper()}": value for name, value in variables.items()}
    chosen = {**others, **given} | ({"MEMSTREAM_TARGET": target} if target else {})
    with _logging_restored(), _standard_input(stdin):
        ended = CliRunner().invoke(
            root, words, input=stdin, env=chosen, prog_name="memstream", catch_exceptions=False, color=False
        )
    return subprocess.CompletedProcess(words, ended.exit_code, ended.stdout, ended.stderr)


@contextmanager
def _standard_input(text: str) -> Iterator[None]:
    """Makes `text` the content of the file descriptor 0, from which `observe` reads."""
    with TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        kept = os.dup(0)
        os.dup2(file.fileno(), 0)
        try:
            yield
        finally:
            os.dup2(kept, 0)
            os.close(kept)


@contextmanager
def _logging_restored() -> Iterator[None]:
    """Restores what a command that configures logs replaces: the tests' handlers, levels and hooks."""
    top = logging.getLogger()
    loggers = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    levels = [(one, one.level) for one in (top, *loggers)]
    handlers, top.handlers = top.handlers, []
    hooks, configured = (sys.unraisablehook, threading.excepthook), structlog.get_config()
    try:
        yield
    finally:
        top.handlers = handlers
        sys.unraisablehook, threading.excepthook = hooks
        structlog.configure(**configured)
        for logger, level in levels:
            logger.setLevel(level)
