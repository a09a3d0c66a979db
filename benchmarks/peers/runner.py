"""The driver side of a runner: starts the process, sends requests, and kills it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.contenders import Contender
from benchmarks.peers.load import Table
from benchmarks.peers.protocol import Item, Processes, Query
from tests.toolchains.environments import ROOT

ANSWER_MAX_S = 900.0
_QUIET = {"ANONYMIZED_TELEMETRY": "False", "MEM0_TELEMETRY": "False", "HF_HUB_OFFLINE": "1"}
"""No telemetry, and no download of models."""


@dataclass(frozen=True)
class Recalled:
    """Milliseconds and texts (best first) of each query. `errors`: exceptions raised instead of an answer."""

    ms: list[float]
    found: list[list[str]]
    errors: list[str]


class Failed(Exception):
    """The peer could not do what was asked; the message has the reason."""


class Runner:
    """One peer over one directory, as a context manager. After `kill`, a new Runner over the same directory reopens its
    data."""

    def __init__(self, contender: Contender, directory: Path, table: Table) -> None:
        self._contender = contender
        self._directory = directory
        self._table = table
        self._log = directory.parent / f"{directory.name}.log"
        self._process: subprocess.Popen[str] | None = None
        self._pids: list[int] = []

    def __enter__(self) -> Self:
        """Start the process. Raises Failed."""
        python = self._contender.python()
        self._directory.mkdir(parents=True, exist_ok=True)
        command = [str(python), "-P", "-m", self._contender.module, "--variant", self._contender.variant]
        command += ["--directory", str(self._directory), "--vectors", str(self._table.file)]
        command += ["--model", str(self._table.model or "")]
        home = {"HOME": str(self._directory), "PYTHONPATH": str(ROOT), "DBGPT_HOME": str(self._directory)}
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=kept | home | _QUIET,
                cwd=self._directory,
                encoding="utf-8",
            )
        try:
            self._read_reply()
            self._pids = self.processes().pids
        except Failed:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it in order, unless it was killed or an error occurred."""
        if kind is None and self._process is not None:
            self._request("close")
            self._process.wait(ANSWER_MAX_S)
            _close_pipes(self._process)
            self._process = None
        self.kill()

    def open(self, memory: str) -> None:
        """Create or find a memory."""
        self._request("open", memory)

    def add(self, memory: str, items: Sequence[Item]) -> float:
        """Milliseconds until all items are kept."""
        (ms,) = self._request("add", memory, items=[asdict(one) for one in items])["ms"]
        return float(ms)

    def add_each(self, memory: str, items: Sequence[Item], batch: int = 1) -> list[float]:
        """Milliseconds of each batch of items, one at a time."""
        ms: list[float] = self._request("add_each", memory, items=[asdict(one) for one in items], batch=batch)["ms"]
        return ms

    def recall(self, memory: str, queries: Sequence[Query], k: int) -> Recalled:
        """Ask one query after the other."""
        return Recalled(**self._request("recall", memory, queries=[asdict(one) for one in queries], k=k))

    def lines(self, memory: str) -> list[str]:
        """All lines that it lists."""
        held: list[str] = self._request("lines", memory)["lines"]
        return held

    def processes(self) -> Processes:
        """The processes that hold its memories, and their resources."""
        return Processes(**self._request("processes"))

    def kill(self) -> None:
        """SIGKILL all processes that hold memories; does nothing if not running."""
        process, self._process = self._process, None
        if process is None:
            return
        for pid in dict.fromkeys([*self._pids, process.pid]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        _close_pipes(process)

    def _request(self, do: str, memory: str = "", **more: Any) -> dict[str, Any]:
        self._send({"do": do, "memory": memory} | more)
        return self._read_reply()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._describe_end()) from None

    def _read_reply(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        late = threading.Timer(ANSWER_MAX_S, self._process.kill)
        late.start()
        try:
            while line := self._process.stdout.readline():
                reply: dict[str, Any] = json.loads(line)
                if "embed" not in reply:
                    break
                self._send({"vectors": self._table.vectors(reply["embed"])})
            else:
                raise Failed(self._describe_end())
        finally:
            late.cancel()
        if "error" in reply:
            raise Failed(reply["error"])
        return reply

    def _describe_end(self) -> str:
        lines = self._log.read_text("utf-8", "replace").split("\n")
        said = " ".join(next((each for each in reversed(lines) if each.strip()), "").split())
        return f"its process ended, or was ended after {ANSWER_MAX_S:.0f} s without an answer: {said[:200]}"


def _close_pipes(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
