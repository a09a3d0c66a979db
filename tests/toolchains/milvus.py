"""A real Milvus server for the tests: PyPI's milvus 2.3.5, in namespaces that have only loopback.

It listens on every interface, on a dozen ports and without authentication, and cannot be configured otherwise: so it
runs in a network namespace, and in a process namespace that ends with it. relay.py forwards a unix socket into the
namespace, through which the tests and their servers reach it.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from tests.toolchains.programs import Absent, alone

VERSION = "2.3.5"
PORT = 19_530
INSTALL_S = 300
START_S = 120
CACHE = Path(__file__).resolve().parents[2] / ".cache" / f"milvus-{VERSION}"
_ALONE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")


def install_server() -> Path:
    """Returns the program; installs it into a separate virtual environment in .cache/ the first time. Raises Absent."""
    with alone(CACHE.name):
        return _find_or_install()


def _find_or_install() -> Path:
    program = CACHE / "bin" / "milvus-server"
    if program.exists():
        return program
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Absent(f"there is no milvus {VERSION} for {sys.platform} on {platform.machine()}")
    venv.create(CACHE, with_pip=True)
    try:
        done = subprocess.run(
            [str(CACHE / "bin" / "python"), "-m", "pip", "install", "--quiet", f"milvus=={VERSION}"],
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Absent(f"installing milvus took longer than {INSTALL_S} s") from None
    if done.returncode:
        raise Absent(f"milvus {VERSION} cannot be installed: {done.stderr.strip()[-300:]}")
    return program


def _check_namespaces() -> None:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        raise Absent("Milvus needs a network namespace: unshare (util-linux) and ip (iproute2) are not both installed")
    tried = subprocess.run([*_ALONE, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise Absent(f"Milvus needs a network namespace, which this system refuses: {tried.stderr.strip()}")


class MilvusServer:
    """A running server; clients connect to `uri`. Its data are empty, unless `folder` has those of an earlier one."""

    def __init__(self, folder: Path | None = None) -> None:
        _check_namespaces()
        program = install_server()
        # short: sockets' paths are limited
        self.folder = folder or Path(tempfile.mkdtemp(prefix="memstream-mv-", dir="/tmp"))
        self.folder.mkdir(mode=0o700, exist_ok=True)
        (self.folder / "socket").unlink(missing_ok=True)  # of a server that was killed
        self.uri = f"unix:{self.folder / 'socket'}"
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *_ALONE,
                    *(sys.executable, str(Path(__file__).with_name("relay.py"))),
                    *(str(self.folder / "socket"), str(PORT)),
                    *(str(program), "--data", str(self.folder / "data"), "--proxy-port", str(PORT)),
                ],
                stdin=subprocess.PIPE,  # relay.py ends when it closes, with this process too
                stdout=log,
                stderr=log,
            )

    def wait(self) -> None:
        """Returns when it serves. Raises Absent."""
        from pymilvus import MilvusClient, MilvusException

        until = time.monotonic() + START_S
        while True:
            try:
                client = MilvusClient(self.uri, timeout=2, dedicated=True)
                client.list_collections(timeout=5)  # pyright: ignore[reportUnusedCoroutine]  # no coroutine at run time
                client.close()
                return
            except MilvusException as error:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise Absent(f"Milvus did not start ({error.message}): {self.log()[-500:]}") from error
                time.sleep(0.5)

    @property
    def pid(self) -> int:
        """Process id of its first process, the parent of all others."""
        return self._process.pid

    def remove(self) -> None:
        """Ends it and its child processes, and removes its data."""
        self._process.kill()
        self._process.communicate(timeout=30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """Returns its output."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")
