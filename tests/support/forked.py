"""Forks the servers and commands of tests from a process that has imported them: 0.1 s of CPU a start instead of 0.7 s.

The child runs `memstream` with its own environment and standard streams; signals and kills reach it like any process.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from subprocess import TimeoutExpired
from types import ModuleType, TracebackType
from typing import IO, Self
from unittest import mock

IMPORTED = [
    *("memstream_server.cli.serve", "memstream_server.app.process", "memstream_server.rpc.server"),
    *("memstream_server.adapters.journal.store", "memstream_server.adapters.milvus.lite"),
    *("memstream_server.adapters.models.openai_embedder", "memstream_server.adapters.models.llm_questions"),
    "memstream_server.rpc.http.application",
    *("sqlalchemy.dialects.sqlite", "memstream"),
]
"""What servers and commands import. None of it starts a thread, which a fork would lose."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""numpy would start threads when it is imported; `serve` sets the same."""
MEMSTREAM = "memstream_server.cli:main"
_STARTING = threading.Lock()


def start_memstream(words: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkServerProcess:
    """Start `memstream WORDS`; its output is appended to `log`."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    with Connection(out) as streams:
        return _start(MEMSTREAM, words, environment, (None, streams, streams))


def _start(
    program: str, words: Sequence[str], environment: Mapping[str, str], streams: Sequence[Connection | None]
) -> ForkServerProcess:
    with _STARTING, _without_main():
        process = _context().Process(target=_run, args=(program, list(words), dict(environment), streams), daemon=True)
        process.start()
    return process


class ForkedProgram:
    """A program with pipes, used like subprocess.Popen in text mode; killed at the end of the block if it still runs.

    `program`: a module and its function without arguments, which finds `words` in `sys.argv`: "module:function".
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], program: str = MEMSTREAM) -> None:
        ends = [os.pipe() for _ in range(3)]
        self.stdin: IO[str] = os.fdopen(ends[0][1], "w", encoding="utf-8")
        self.stdout: IO[str] = os.fdopen(ends[1][0], "r", encoding="utf-8")
        self.stderr: IO[str] = os.fdopen(ends[2][0], "r", encoding="utf-8")
        theirs = [Connection(ends[0][0], writable=False)] + [Connection(end[1], readable=False) for end in ends[1:]]
        try:
            self._process = _start(program, words, environment, theirs)
        finally:
            for each in theirs:
                each.close()
        self.args = list(words)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # does nothing once it has ended
        self._process.join()
        for file in (self.stdin, self.stdout, self.stderr):
            if not file.closed:
                file.close()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal's number after a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self._process.exitcode

    def wait(self, timeout_s: float = 120.0) -> int:
        """Wait for the end and return the exit code. Raises TimeoutExpired."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutExpired(self.args, timeout_s)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def communicate(self, text: str = "", timeout: float = 120.0) -> tuple[str, str]:
        """Write `text` to its standard input and end it; returns its output and its errors. Raises TimeoutExpired."""
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        writer = threading.Thread(target=self._write, args=(text,))
        reader.start()
        writer.start()
        out = self.stdout.read()
        reader.join()
        writer.join()
        self.wait(timeout)
        self.stdout.close()
        self.stderr.close()
        return out, errors[0]

    def _write(self, text: str) -> None:
        try:
            self.stdin.write(text)
            self.stdin.close()
        except BrokenPipeError:  # it ended without reading its input
            pass


@contextmanager
def _without_main() -> Iterator[None]:
    """Hides the main module: the child would import it, and it may be all of pytest."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, ONE_THREAD):
        forkserver.ensure_running()
    return context


def end_forks() -> None:
    """End the process that forks, and wait for it: else its CPU and that of its children counts nowhere.

    Its class has no public way to end it before this process ends, which then does not wait.
    """
    if _context.cache_info().currsize:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def _run(program: str, words: list[str], environment: dict[str, str], streams: Sequence[Connection | None]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for number, stream in enumerate(streams):
        if stream is not None:
            os.dup2(stream.fileno(), number)
    for stream in {each for each in streams if each is not None}:
        stream.close()
    if streams[0] is not None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - until the process ends
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["memstream", *words]
    module, _, function = program.partition(":")
    getattr(import_module(module), function)()


def _end_with_parent() -> None:
    """A run that was killed stops none of its servers; the process that forks them lives as long as they do."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
