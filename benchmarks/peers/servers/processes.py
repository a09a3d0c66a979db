"""The runner's side of a server: a free port, the start of its process, and the resources of its process tree.

Standard library only, because it runs in each peer's environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from benchmarks.peers.protocol import Processes

START_MAX_S = 120.0
STOP_MAX_S = 30.0
_POLL_S = 0.05
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class NotStarted(Exception):
    """The server does not answer; the message has the end of its log."""


class ServerProcess:
    """A server that the runner starts and ends."""

    def __init__(self, command: Sequence[str], directory: Path, **variables: str) -> None:
        self._log = directory / "server.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory, env=os.environ | variables
            )

    def wait_until(self, answers: Callable[[], bool]) -> None:
        """Wait until `answers` is true. Ends the process and raises NotStarted if that takes too long."""
        until = time.monotonic() + START_MAX_S
        while not answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise NotStarted(self._log.read_text("utf-8", "replace").strip()[-300:])
            time.sleep(_POLL_S)

    def measure(self) -> Processes:
        """Resources of the server and of its descendants."""
        return measure(list_tree(self._process.pid))

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if it does not stop in time."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_MAX_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_MAX_S)


def find_free_port() -> int:
    """A TCP port of loopback that nobody uses at this moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def accepts(port: int) -> bool:
    """Whether a process accepts connections on that port of loopback."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def list_tree(pid: int) -> list[int]:
    """The process and all its descendants, parents first; only the process on systems without /proc."""
    found = [pid]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in children.read_text("ascii").split()]
    return found


def measure(pids: Collection[int]) -> Processes:
    """Totals over processes; zero for one that has ended, and on systems without /proc."""
    memory = [_read_memory(pid) for pid in pids]
    return Processes(
        list(pids),
        resident_mb=sum(rss for rss, _ in memory),
        cpu_s=sum(_read_cpu_s(pid) for pid in pids),
        proportional_mb=sum(pss for _, pss in memory),
    )


def name_of(pid: int) -> str:
    """Name of the program; empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8").strip()
    except OSError:
        return ""


def _read_memory(pid: int) -> tuple[float, float]:
    """(RSS, PSS) in MB."""
    try:
        totals = dict(re.findall(r"^(\w+): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text("ascii"), re.M))
    except OSError:
        return 0.0, 0.0
    return int(totals["Rss"]) * 1.024e-3, int(totals["Pss"]) * 1.024e-3


def _read_cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * _TICK_S
