"""Child processes of tests: interrupted however the tests were started, ended with their test, and their memory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


def stop_ignoring_interrupts() -> None:
    """Replace ignored signals by handlers that do nothing: children inherit ignored signals, but not handlers.

    A shell's background job (`nohup make test &`) ignores SIGINT and SIGQUIT, and so would every program that a test
    starts. Python and others handle SIGINT only if it is not ignored, so a test would wait forever for a program that
    it has interrupted.
    """
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _do_nothing)


def _do_nothing(_number: int, _frame: object) -> None:
    """This process keeps ignoring the signal."""


@contextmanager
def run_process(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int | None = subprocess.PIPE,
    stderr: int | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run a program; kill it at the end of the block if it is still running, even if the test fails or times out."""
    with subprocess.Popen(command, env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # does nothing once it has ended and was waited for


def resident_mib(pid: int) -> float:
    """Resident memory of a process, from Linux' /proc."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stop a process for a block: every thread of it has stopped before the block starts."""
    pause(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def pause(pid: int, deadline_s: float = 60.0) -> None:
    """Stop a process and wait until each of its threads has stopped: the signal is sent to one, and the others run on.

    A thread that still runs can answer a request. Raises TimeoutError after a generous deadline.
    """
    os.kill(pid, signal.SIGSTOP)
    end_s = time.monotonic() + deadline_s
    while not all(_has_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"process {pid} still runs {deadline_s:.0f} s after SIGSTOP")
        time.sleep(0.001)


def _has_stopped(task: Path) -> bool:
    try:
        state = (task / "stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True  # the thread has ended
    return state in "TtZX"
