"""A peer's runner as the driver sees it: a process that is asked, watched, and killed."""

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
"""Nobody is told of this run, and no model is looked for."""


@dataclass(frozen=True)
class Recalled:
    """Of each query: milliseconds and texts, best first. `errors`: what was raised instead of an answer."""

    ms: list[float]
    found: list[list[str]]
    errors: list[str]


class Failed(Exception):
    """The peer could not do what was asked; the text says why."""


class Runner:
    """One peer over one directory; `with` it. After `kill` another one over the same directory finds what was kept."""

    def __init__(self, contender: Contender, directory: Path, table: Table) -> None:
        self._contender = contender
        self._directory = directory
        self._table = table
        self._log = directory.parent / f"{directory.name}.log"
        self._process: subprocess.Popen[str] | None = None
        self._pids: list[int] = []

    def __enter__(self) -> Self:
        """Starts it. Raises Failed."""
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
            self._reply()
            self._pids = self.processes().pids
        except Failed:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it in order, unless it was killed or something went wrong."""
        if kind is None and self._process is not None:
            self._ask("close")
            self._process.wait(ANSWER_MAX_S)
            self._process = None
        self.kill()

    def open(self, memory: str) -> None:
        """Makes or finds a memory."""
        self._ask("open", memory)

    def add(self, memory: str, items: Sequence[Item]) -> float:
        """Milliseconds until all are kept."""
        (ms,) = self._ask("add", memory, items=[asdict(one) for one in items])["ms"]
        return float(ms)

    def add_each(self, memory: str, items: Sequence[Item]) -> list[float]:
        """Milliseconds of each, one at a time."""
        ms: list[float] = self._ask("add_each", memory, items=[asdict(one) for one in items])["ms"]
        return ms

    def recall(self, memory: str, queries: Sequence[Query], k: int) -> Recalled:
        """One query after the other."""
        return Recalled(**self._ask("recall", memory, queries=[asdict(one) for one in queries], k=k))

    def lines(self, memory: str) -> list[str]:
        """All that it says it holds."""
        held: list[str] = self._ask("lines", memory)["lines"]
        return held

    def processes(self) -> Processes:
        """Those that hold its memories, and what they take."""
        return Processes(**self._ask("processes"))

    def kill(self) -> None:
        """SIGKILL to everything that holds memories, at once; nothing if it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        for pid in dict.fromkeys([*self._pids, process.pid]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def _ask(self, do: str, memory: str = "", **more: Any) -> dict[str, Any]:
        self._send({"do": do, "memory": memory} | more)
        return self._reply()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._ended()) from None

    def _reply(self) -> dict[str, Any]:
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
                raise Failed(self._ended())
        finally:
            late.cancel()
        if "error" in reply:
            raise Failed(reply["error"])
        return reply

    def _ended(self) -> str:
        lines = self._log.read_text("utf-8", "replace").split("\n")
        said = " ".join(next((each for each in reversed(lines) if each.strip()), "").split())
        return f"its process ended, or was ended after {ANSWER_MAX_S:.0f} s without an answer: {said[:200]}"
