"""A PostgreSQL cluster for the tests: Debian's package, a temporary directory, and only a unix socket."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.toolchains.programs import Absent, alone, install_packages

INSTALL_S = 300
START_S = 60
_CONFIGURATION = {
    "listen_addresses": "",
    "fsync": "off",  # these tests kill processes, not machines
    "max_connections": "100",
    "shared_buffers": "16MB",
    "autovacuum": "off",
    "lc_messages": "C",
    "deadlock_timeout": "200ms",
}


def find_binaries() -> Path:
    """Returns the folder of initdb and postgres; installs them if allowed. Raises Absent."""
    with alone("postgresql"):
        found = _find_installed()
        if found is None:
            install_packages("PostgreSQL (initdb)", "postgresql", timeout_s=INSTALL_S)
            found = _find_installed()
    if found is None:
        raise Absent("Debian's package of PostgreSQL has no initdb")
    return found


def _find_installed() -> Path | None:
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[4]))
    named = shutil.which("initdb")
    if named is not None:
        places.append(Path(named).resolve())
    return places[-1].parent if places else None


def _user() -> str | None:
    """The user who owns the cluster, because PostgreSQL refuses to run as root. None: the user who runs the tests."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), None)


class Cluster:
    """A running cluster. It listens on a socket in a directory that is closed to everybody else.

    `folder` may have the data of an earlier cluster. `settings` replace those of the tests.
    """

    def __init__(
        self, binaries: Path | None = None, folder: Path | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        self._binaries = binaries or find_binaries()
        self._settings = _CONFIGURATION | dict(settings or {})
        # short: sockets' paths are limited
        self.folder = folder or Path(tempfile.mkdtemp(prefix="memstream-pg-", dir="/tmp"))
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        user = _user()
        # Not Popen's own `user`, for which Python forks: with gRPC's threads about, the child dies.
        self._as: tuple[str, ...] = ()
        if user is not None:
            entry = pwd.getpwnam(user)
            os.chown(self.folder, entry.pw_uid, entry.pw_gid)
            self._as = ("setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups")
        if (self.folder / "data").exists():
            return
        initdb = [str(self._binaries / "initdb"), "--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8"]
        made = subprocess.run(
            [*self._as, *initdb, "--username=memstream", f"--pgdata={self.folder / 'data'}"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            self.remove()
            raise Absent(f"initdb failed: {made.stderr.strip()[-300:]}")

    def start(self) -> None:
        """Starts it and returns when it answers."""
        chosen = self._settings | {"unix_socket_directories": str(self.folder)}
        settings = [part for name, value in chosen.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._as, str(self._binaries / "postgres"), "-D", str(self.folder / "data"), *settings],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise Absent(f"PostgreSQL did not start: {self.log()[-500:]}")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        """Process id of the running cluster's first process."""
        assert self._process is not None
        return self._process.pid

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stops it: SIGINT in order, SIGQUIT like a crash."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(30)
                raise

    def remove(self) -> None:
        """Stops it and removes its data."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """Returns its log."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def database(self, options: str = "") -> str:
        """Creates an empty database and returns its URL."""
        name = f"t{next(self._numbers)}"
        self.execute("postgres", f"CREATE DATABASE {name} {options}")
        return self.url(name)

    def url(self, database: str) -> str:
        """Returns the URL of a database of the cluster."""
        return f"postgresql://memstream@/{database}?host={self.folder}&port={self._settings.get('port', '5432')}"

    def execute(self, database: str, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Runs one statement outside of transactions and returns its rows. `database` is a name or a URL."""
        import psycopg

        target = database if "://" in database else self.url(database)
        with psycopg.connect(target, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def dump(self, url: str, file: Path) -> None:
        """Runs pg_dump as in docs/operations.md."""
        self._run("pg_dump", "--format=custom", f"--file={file}", url)

    def restore(self, url: str, file: Path) -> None:
        """Runs pg_restore over the existing data as in docs/operations.md."""
        self._run("pg_restore", "--clean", "--if-exists", "--single-transaction", f"--dbname={url}", str(file))

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run([str(self._binaries / program), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def end_sessions(self, url: str) -> int:
        """Ends all sessions of a database from the server's side, as a restart does, and returns their number."""
        name = url.partition("?")[0].rpartition("/")[2]
        found = self.execute(
            "postgres", "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", name
        )
        return len(found)

    def _answers(self) -> bool:
        import psycopg

        try:
            self.execute("postgres", "SELECT 1")
        except psycopg.OperationalError:
            return False
        return True
