"""A real server in its own process, which tests can stop, kill and restart over the same data directory."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.forked import start_memstream
from tests.support.journals import journal_url

PEER_SECRET = "the secret of a test's servers, long enough"


PORTS = range(20_000, 30_000)
"""Ports that the kernel gives to no socket of its own choice: those begin at 32,768, on macOS at 49,152."""


def free_address() -> str:
    """A loopback address for a server that keeps it across restarts. Only one process of tests gets it."""
    for number in range(len(PORTS)):
        port = PORTS[(os.getpid() * 101 + number) % len(PORTS)]
        with socket.socket() as probe, socket.socket(type=socket.SOCK_DGRAM) as reservation:
            try:
                reservation.bind(("127.0.0.1", port))  # UDP: the server's own socket is TCP
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            reservation.detach()  # it stays open until this process ends
            return f"127.0.0.1:{port}"
    raise AssertionError("no port is free")


class ServerProcess:
    """`memstream serve` on loopback. `settings` are further settings by name, passed through the environment.

    The address changes with every start unless `listen` is given. `log()` has the server's output.
    """

    def __init__(self, data_dir: Path, listen: str = "127.0.0.1:0", **settings: str | float) -> None:
        self.data_dir = data_dir
        self.address = ""
        self._listen = listen
        self._settings = settings
        self._process: ForkServerProcess | None = None
        self._asking = threading.Lock()
        self._files = data_dir.parent / f"{data_dir.name}.process"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Process id of the last start."""
        assert self._process is not None, "the server was never started"
        assert self._process.pid is not None
        return self._process.pid

    def is_running(self) -> bool:
        """Whether it was started and has not exited."""
        return self._process is not None and self._exit_code() is None

    def _exit_code(self) -> int | None:
        """None while it runs. One thread asks at a time: the code can be read once, and a second reader waits."""
        assert self._process is not None, "the server was never started"
        with self._asking:
            return self._process.exitcode

    def _wait_for_end(self, timeout_s: float) -> int:
        """The exit code. Raises AssertionError with the log if the server takes too long."""
        until = time.monotonic() + timeout_s
        while (code := self._exit_code()) is None:
            assert time.monotonic() < until, f"the server does not stop:\n{self.log()}"
            time.sleep(0.01)
        return code

    def start(self, timeout_s: float = 120.0) -> Self:
        """Returns once the server is serving. Raises AssertionError with its log if it exits or takes too long."""
        assert not self.is_running(), "the server is already running"
        self._files.mkdir(parents=True, exist_ok=True)
        port_file = self._files / "address"
        port_file.unlink(missing_ok=True)  # a killed server leaves it behind
        self._process = start_memstream(self._words(port_file), self._environment(), self._log)
        until = time.monotonic() + timeout_s
        while not port_file.exists():
            if not self.is_running() or time.monotonic() > until:
                self.kill()
                raise AssertionError(f"the server did not start:\n{self.log()}")
            time.sleep(0.02)
        self.address = port_file.read_text(encoding="utf-8").strip()
        return self

    def stop(self, timeout_s: float = 60.0) -> int:
        """Send SIGTERM; returns the exit code after the drain."""
        assert self._process is not None, "the server was never started"
        if self.is_running():
            os.kill(self.pid, signal.SIGTERM)
        return self._wait_for_end(timeout_s)

    def kill(self) -> None:
        """SIGKILL: the server stops at once and writes nothing more."""
        if self._process is not None and self.is_running():
            self._process.kill()
            self._wait_for_end(60.0)

    def restart(self) -> Self:
        """SIGKILL, then start over the same data."""
        self.kill()
        return self.start()

    def configure(self, **settings: str | float) -> Self:
        """Change settings for the next start."""
        self._settings = self._settings | settings
        return self

    def children(self) -> list[int]:
        """Process ids of its children: Milvus Lite. Linux only."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text("utf-8").split()]

    def log(self) -> str:
        """The output of all starts so far."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    @property
    def _log(self) -> Path:
        return self._files / "log"

    def _words(self, port_file: Path) -> list[str]:
        return [
            *("serve", "--listen", self._listen),
            *("--port-file", str(port_file)),
            *("--data", str(self.data_dir)),
        ]

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMSTREAM_")}
        chosen = {"journal_url": journal_url(self.data_dir), "http_listen": ""} | self._settings
        if chosen["journal_url"] and "access_policy_file" in chosen:  # servers of one database need one
            chosen = {"peer_secret": PEER_SECRET} | chosen
        return kept | {f"MEMSTREAM_{name.upper()}": str(value) for name, value in chosen.items()}
