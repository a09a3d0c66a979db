"""Scripts that use memstream.local in processes of their own, and what a test sees of their server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import memstream.sync
from memstream.local_files import Directory, wait_until
from tests.support.forked import ForkedProgram

WAIT_S = 60.0

HOLD = "from tests.local.users import hold; hold()"
"""Uses the directory until its standard input ends."""


def hold() -> None:
    """The program of HOLD."""
    with memstream.sync.local(sys.argv[1]) as client:
        client.create_memory("ns/m", exist_ok=True)
        print("ready", flush=True)
        sys.stdin.readline()


def holding(directory: Path) -> ForkedProgram:
    """HOLD as a fork, for which Python need not start; killed at the end of the block."""
    return ForkedProgram([str(directory)], os.environ, "tests.local.users:hold")


@contextlib.contextmanager
def script(text: str, *arguments: object, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A Python script; killed at the end of the block if it still runs."""
    command = [sys.executable, "-c", text, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **(pipes | options)) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str] | ForkedProgram) -> str:
    """The next line that a script prints; fails with its errors if there is none."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline().strip()
    assert line, process.stderr.read()
    return line


def finish(process: subprocess.Popen[str] | ForkedProgram) -> str:
    """Ends a script's standard input and waits for it. Returns what it still printed; it must succeed."""
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    return out


def server_pid(directory: Path) -> int:
    """The server that runs on the directory."""
    files = Directory(directory)
    assert files.is_served()
    pid = files.server_pid()
    assert pid is not None
    return pid


def kill_server(directory: Path) -> int:
    """SIGKILL to the server of the directory; returns once it no longer holds the directory."""
    pid = server_pid(directory)
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not Directory(directory).is_served(), WAIT_S)
    return pid


def server_ends(directory: Path) -> bool:
    """Whether the server of the directory ends within the time limit."""
    return wait_until(lambda: not Directory(directory).is_served(), WAIT_S)
