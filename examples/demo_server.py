"""A memstream server for the demo, in its own process, which the demo can kill."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

START_MAX_S = 120.0
STOP_MAX_S = 60.0


class DemoServer:
    """`memstream serve` over one data directory, on any free port of this machine."""

    def __init__(self, directory: Path) -> None:
        self.address = ""
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._log = directory / "server.log"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> float:
        """Returns the seconds until it served. Raises RuntimeError with its log if it does not start."""
        began = time.monotonic()
        port_file = self._directory / "address"
        port_file.unlink(missing_ok=True)  # a killed server leaves it behind
        log_offset = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as out:
            command = [sys.executable, "-m", "memstream_server", "serve", "--listen", "127.0.0.1:0"]
            command += ["--port-file", str(port_file), "--data", str(self._directory / "data")]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        until = began + START_MAX_S
        while not port_file.exists():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"the server did not start; it said:\n{self._read_log(log_offset)}")
            time.sleep(0.05)
        self.address = port_file.read_text("utf-8").strip()
        return time.monotonic() - began

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(STOP_MAX_S)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if it does not exit in time."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_MAX_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def _read_log(self, since: int) -> str:
        return self._log.read_bytes()[since:].decode("utf-8", "replace")
