"""A memstream server in its own process, with the CPU time of the server and of its Milvus Lite child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import probe

START_MAX_S = 120.0
STOP_MAX_S = 60.0
_PROCESS_CLOCK = 2
"""Marks the clock of a process in Linux: the CPU time of all of its threads, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds, user and system."""

    server: float
    lite: float
    """Of the Milvus Lite child; 0 without one."""

    def since(self, before: Cpu) -> Cpu:
        """CPU used after `before`."""
        return Cpu(self.server - before.server, self.lite - before.lite)

    @property
    def total(self) -> float:
        """Server and child together."""
        return self.server + self.lite


class BenchServer:
    """`memstream serve` over `data_dir` on loopback. `settings` are passed through the environment.

    With `probed`, its event loop runs the probe that `longest_pause` reads.
    """

    def __init__(self, data_dir: Path, *, probed: bool = True, **settings: str | float) -> None:
        self.address = ""
        self.data_dir = data_dir
        self._pauses = data_dir.with_name(f"{data_dir.name}.pauses")
        self._log = data_dir.with_name(f"{data_dir.name}.log")
        self._probed = probed
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Returns once the server is serving. Raises RuntimeError with its log if it does not start."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        port_file = self.data_dir.with_name(f"{self.data_dir.name}.address")
        port_file.unlink(missing_ok=True)
        given = {f"MEMSTREAM_{name.upper()}": str(value) for name, value in self._settings.items()}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMSTREAM_")}
        program = ["-P", probe.__file__, str(self._pauses)] if self._probed else ["-m", "memstream_server"]
        command = [sys.executable, *program, "serve", "--listen", "127.0.0.1:0"]
        command += ["--port-file", str(port_file), "--data", str(self.data_dir)]
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=kept | given
            )
        until = time.monotonic() + START_MAX_S
        while not port_file.exists():
            if self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise RuntimeError(f"the server did not start; it said:\n{self.read_log()}")
            time.sleep(0.05)
        self.address = port_file.read_text("utf-8").strip()
        return self

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if the server does not stop in time."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_MAX_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_MAX_S)

    def read_log(self) -> str:
        """The log of all starts so far."""
        return self._log.read_text("utf-8", "replace")

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def cpu_used(self) -> Cpu:
        """CPU used so far; zero on systems other than Linux."""
        return Cpu(cpu_s(self.pid), sum(cpu_s(child) for child in _child_pids(self.pid)))

    def longest_pause(self, since: float) -> probe.Pause:
        """The longest event-loop pause from `since` (`time.monotonic()`) until now."""
        return probe.longest_pause(self._pauses, since, time.monotonic())

    def resident_mb(self) -> tuple[float, float]:
        """Resident memory in MB: (server, child)."""
        return _resident_mb(self.pid), sum(_resident_mb(child) for child in _child_pids(self.pid))


def _read_stat(pid: int) -> list[str]:
    try:
        # After the last ")": the process name before it may contain any character.
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, user and system, by its own clock; 0 if it is gone, and on systems other than Linux."""
    try:
        return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
    except OSError:
        return 0.0


def _child_pids(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text("ascii").split()]
    except OSError:
        return []


def _resident_mb(pid: int) -> float:
    fields = _read_stat(pid)
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6 if fields else 0.0
