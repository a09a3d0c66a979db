"""The files by which processes share the server of a data directory: locks, the server's address, its settings and log.

lock            held by the server while it runs (the server's own file; it holds the server's pid)
address         the server's address while it serves (the server's own file)
local.users     every user holds a shared lock; the server waits for the exclusive one, and then ends
local.start     held by the process that finds or starts the server
local.json      pid and settings of the last server that memstream.local started
local.log       the output of the servers that memstream.local started
local.sock      the socket of the server, unless its path would be too long

Locks are flock: the kernel releases those of a process that is killed. No lock file is ever removed, because a process
could then lock the removed file and another one its successor.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO
from urllib.parse import quote

from memstream.errors import LocalServerFailed, SettingsMismatch

POLL_S = 0.01
SOCKET_PATH_BYTES_MAX = 100
"""Kernels allow 104 to 108, including the terminating zero."""
LOG_BYTES_MAX = 4 << 20
"""A start moves a larger log to local.log.old."""
TAIL_LINES = 8
HIDDEN = "a hidden value"
_SECRET = re.compile(r"key|token|secret|password|headers|query|url")
"""Names of settings whose values are kept as a hash: `local.json` holds no secret."""
_SALT = b"memstream local settings"

Values = Mapping[str, str | int | float | bool]


class Directory:
    """The files of one data directory. Methods raise LocalServerFailed if a file cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.users = path / "local.users"
        self.log = path / "local.log"
        self._state = path / "local.json"

    def create(self) -> None:
        """Creates the directory if necessary, for this user alone."""
        with self._usable():
            try:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except FileNotFoundError as error:  # of a filesystem without new directories, such as /proc
                raise self._unusable(error) from error

    def open_users(self) -> int:
        """A descriptor of `local.users`."""
        with self._usable():
            return os.open(self.users, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextlib.contextmanager
    def starting(self, wait: Callable[[str], None]) -> Iterator[None]:
        """Holds `local.start` during the block; calls `wait` with what it waits for between two attempts."""
        with self._usable():
            descriptor = os.open(self.path / "local.start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not try_lock(descriptor, fcntl.LOCK_EX):
                wait("another process starts the server")
            yield
        finally:
            os.close(descriptor)

    def is_served(self) -> bool:
        """Whether a server holds the directory, even if it is still starting or already ending."""
        try:
            with self._usable(), (self.path / "lock").open("rb") as file:
                return not try_lock(file.fileno(), fcntl.LOCK_SH)
        except FileNotFoundError:
            return False

    def server_pid(self) -> int | None:
        """The process that last held the directory's lock, as it wrote it there."""
        with contextlib.suppress(FileNotFoundError):
            named = re.match(r"pid (\d+) on ", (self.path / "lock").read_text("utf-8", "replace"))
            return int(named[1]) if named else None
        return None

    def address(self) -> str:
        """The address at which the server serves; empty if it does not yet, or no longer."""
        try:
            return (self.path / "address").read_text("utf-8").strip()
        except FileNotFoundError:
            return ""

    def socket_address(self) -> str:
        """The address for a new server: a unix socket that only this user can access.

        In the directory, or where the path would be too long in this user's own folder among the temporary files.
        """
        socket = self.path / "local.sock"
        if len(os.fsencode(socket)) > SOCKET_PATH_BYTES_MAX:
            folder = Path(tempfile.gettempdir()) / f"memstream-{os.getuid()}"
            socket = _private_folder(folder) / f"{hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]}.sock"
        return f"unix:{quote(os.fsencode(socket))}"

    # ---- settings of the running server

    def write_state(self, pid: int, settings: Values) -> None:
        """Records the server that was started and its settings, secrets as hashes."""
        state = {"pid": pid, "settings": {name: _recorded(name, value) for name, value in settings.items()}}
        part = self._state.with_name(f"local.json.{os.getpid()}")
        with open(part, "w", encoding="utf-8", opener=_open_private) as file:
            file.write(json.dumps(state, ensure_ascii=False) + "\n")
        part.replace(self._state)

    def started_settings(self, pid: int | None) -> dict[str, str] | None:
        """The recorded settings of the server `pid` by name, in JSON; None if memstream.local did not start it."""
        try:
            state = json.loads(self._state.read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return dict(state["settings"]) if state["pid"] == pid else None

    def check_settings(self, asked: Values, running: Mapping[str, str] | None) -> None:
        """Raises SettingsMismatch if the running server has other settings than a call asks for.

        Settings that the call leaves out are not compared.
        """
        if running is None:
            if asked:
                raise SettingsMismatch(
                    f"the server of {self.path} (pid {self.server_pid()}) was not started by memstream.local, so its "
                    f"settings are unknown: call memstream.local without {', '.join(asked)}, or stop that server"
                )
            return
        differing = [
            f"{name} is {_shown(name, running.get(name))} there, this call asks for {_shown(name, recorded)}"
            for name, recorded in ((name, _recorded(name, value)) for name, value in asked.items())
            if running.get(name) != recorded
        ]
        if differing:
            raise SettingsMismatch(
                f"the server of {self.path} (pid {self.server_pid()}) runs with other settings: "
                f"{'; '.join(differing)}. Use the same settings, or end the other users of the directory first"
            )

    # ---- the log

    def log_size(self) -> int:
        """Bytes of the log before a start; moves a log that has grown too large."""
        with contextlib.suppress(FileNotFoundError):
            size = self.log.stat().st_size
            if size <= LOG_BYTES_MAX:
                return size
            self.log.replace(self.log.with_name("local.log.old"))
        return 0

    def open_log(self) -> IO[bytes]:
        """The log, to be appended to."""
        return open(self.log, "ab", opener=_open_private)

    def failed(self, what: str, offset: int = 0) -> LocalServerFailed:
        """The error that says `what`, names the log and quotes its last lines after `offset` bytes."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(offset, file.seek(0, os.SEEK_END) - 8_192))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            lines = []
        lines = [line for line in lines if line.strip()]
        tail = "".join(f"\n  {line}" for line in lines[-TAIL_LINES:])
        return LocalServerFailed(
            f"{what}. Its log is {self.log}" + (f", which ends with:{tail}" if tail else ", empty")
        )

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> LocalServerFailed:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        return LocalServerFailed(f"{self.path} cannot be used as a data directory: {why}")


def _open_private(path: str, flags: int) -> int:
    """For `open`: a new file belongs to this user alone."""
    return os.open(path, flags, 0o600)


def try_lock(descriptor: int, kind: int) -> bool:
    """Takes a lock if no other process prevents it. Raises OSError."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def secrets_in(recorded: Mapping[str, str]) -> set[str]:
    """Names of the recorded settings whose values are hashes."""
    return {name for name in recorded if _SECRET.search(name)}


def wait_until(ready: Callable[[], bool], limit_s: float) -> bool:
    """Waits until `ready()`; False if it is not after `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() >= end_s:
            return False
        time.sleep(POLL_S)
    return True


def _recorded(name: str, value: str | int | float | bool) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return hashlib.sha256(_SALT + text.encode()).hexdigest() if _SECRET.search(name) else text


def _shown(name: str, recorded: str | None) -> str:
    if recorded is None:
        return "not set"
    return HIDDEN if _SECRET.search(name) else recorded


def _private_folder(folder: Path) -> Path:
    """Creates the folder; refuses one that another user has made, or may enter."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise LocalServerFailed(
            f"{folder} is not this user's alone, so the server's socket cannot be there: set TMPDIR to another folder, "
            "or use a data directory with a shorter path"
        )
    return folder
