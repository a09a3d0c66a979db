"""The server of a data directory, started and ended for the processes that use it (`memstream.local`).

Rules
- The server is a process of its own session: Ctrl-C in a script does not reach it, and it drains when it ends.
- It ends with its last user, however that user ends. Users are counted by the kernel: see `local.users` in
  memstream.local_files.
- If it crashes, the next call or reconnect of any user starts it again at the same address with the same settings.
- It gets no MEMSTREAM_ variable of the environment: its settings are the arguments alone, so two calls can be compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from memstream.argument_types import LocalSetting
from memstream.errors import InvalidArgument, LocalServerFailed, StreamClosed
from memstream.local_files import POLL_S, Directory, secrets_in, try_lock, wait_until

logger = logging.getLogger("memstream.local")

RESTARTS_MAX, RESTARTS_SPAN_S = 3, 60.0
"""A server that crashes more often in that time is not started again by the same client."""
STOP_S = 30.0
"""Limit of waiting for the server's end after its last user has closed: its drain and its index flush take less."""
NOTICE_S = 1.0
"""Within this time the server notices that its last user has gone."""
RESERVED = {
    "data_dir": "it is the path",
    "port_file": "the address is found through the directory",
    "users_file": "memstream.local sets it",
    "journal_url": "the journal is in the directory: run `memstream serve` and use memstream.connect",
}
_MISSING = "the server is not installed here, only the SDK: pip install '.[server]'"


class LocalServer:
    """One client's use of a directory's server. `open` once, then `release` once; blocking methods are thread-safe."""

    def __init__(self, path: Path, settings: Mapping[str, LocalSetting], start_timeout_s: float) -> None:
        check_fork()
        self.address = ""
        self._files = Directory(path)
        self._asked = plain_settings(settings)
        self._settings: dict[str, str | int | float | bool] | None = None
        """All settings of the running server; None if memstream.local did not start it."""
        self._missing: set[str] = set()
        """Secret settings of the running server that this process does not have."""
        self._start_timeout_s = start_timeout_s
        self._deadline_s = 0.0
        self._users: int | None = None
        self._changing = threading.Lock()
        self._cancelled = self._forked = False
        self._restarts: list[float] = []
        _OPEN.add(self)

    # ---- asynchronous, for the client

    async def start(self) -> None:
        """`open` in a thread; a cancelled start releases the server again."""
        try:
            await asyncio.to_thread(self.open)
        except asyncio.CancelledError:
            self._cancelled = True
            raise

    def check_process(self) -> None:
        """Raises StreamClosed in a process that was forked after the client was made."""
        if self._forked:
            raise StreamClosed(FORKED)

    async def revive(self) -> None:
        """Starts the server again if it has ended. Raises LocalServerFailed."""
        await asyncio.to_thread(self._revive)

    async def release(self) -> None:
        """Ends the use of the server; if this was the last use, waits until the server has ended. Idempotent."""
        await asyncio.to_thread(self.close)

    # ---- blocking

    def open(self) -> None:
        """Finds the directory's server or starts it. Raises LocalServerFailed, SettingsMismatch."""
        self._deadline_s = time.monotonic() + self._start_timeout_s
        self._files.create()
        self._users = self._files.open_users()
        try:
            with self._files.starting(self._wait):
                while not try_lock(self._users, fcntl.LOCK_SH):
                    self._wait("the former server of the directory is still ending")
                self._find_or_start()
            if self._cancelled:
                raise LocalServerFailed("the start was cancelled")
        except BaseException:
            self._drop()
            raise

    def close(self) -> None:
        """See `release`."""
        with self._changing:
            users = self._users
            if users is None or self._forked:
                return
            # Only the last user gets the exclusive lock: the server still waits for it.
            last = try_lock(users, fcntl.LOCK_EX)
            self._drop()
        if last:
            self._wait_for_end()

    def _wait_for_end(self) -> None:
        """Waits until the server has ended, unless another process begins to use it."""
        probe = self._files.open_users()
        try:

            def ending() -> bool:
                free = try_lock(probe, fcntl.LOCK_SH)
                fcntl.flock(probe, fcntl.LOCK_UN)
                return not free or not self._files.is_served()

            if wait_until(ending, NOTICE_S):
                wait_until(lambda: not self._files.is_served(), STOP_S)
        finally:
            os.close(probe)

    def _revive(self) -> None:
        with self._changing:
            self.check_process()
            if self._users is None or self._files.is_served():
                return
            self._deadline_s = time.monotonic() + self._start_timeout_s
            with self._files.starting(self._wait):
                if self._files.is_served():  # another process was faster
                    return
                self._restart()

    def _restart(self) -> None:
        if self._settings is None:
            raise LocalServerFailed(
                f"the server of {self._files.path} has ended; memstream.local did not start it: start it again, or "
                "call memstream.local again, which starts one"
            )
        if self._missing:
            raise self._files.failed(
                f"the server of {self._files.path} has ended, and this process lacks its {', '.join(self._missing)} to "
                "start it again: pass it to memstream.local"
            )
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < RESTARTS_SPAN_S]
        if len(self._restarts) >= RESTARTS_MAX:
            raise self._files.failed(
                f"the server of {self._files.path} has ended {RESTARTS_MAX + 1} times within {RESTARTS_SPAN_S:.0f} s"
            )
        self._restarts.append(now)
        logger.warning(
            "the server of %s has ended, starting it again; its log is %s", self._files.path, self._files.log
        )
        self._start(self.address)

    def _find_or_start(self) -> None:
        while self._files.is_served():
            if address := self._files.address():
                pid = self._files.server_pid()
                running = self._files.started_settings(pid)
                self._files.check_settings(self._asked, running)
                self.address = address
                if running is not None:
                    secret = secrets_in(running)
                    known = {name: json.loads(text) for name, text in running.items() if name not in secret}
                    self._settings = known | self._asked
                    self._missing = secret - self._asked.keys()
                return
            self._wait(f"the server of the directory (pid {self._files.server_pid()}) does not serve yet, or is ending")
        self._settings = dict(self._asked)
        self._start(str(self._asked.get("listen") or self._files.socket_address()))

    def _start(self, listen: str) -> None:
        """Starts the server and waits until it serves."""
        if importlib.util.find_spec("memstream_server") is None:
            raise LocalServerFailed(_MISSING)
        path, settings = self._files.path, dict(self._settings or {})
        recorded = dict(settings)
        settings.pop("listen", None)
        settings.setdefault("http_listen", "")  # by default only this user can reach the server
        (path / "address").unlink(missing_ok=True)  # of a killed server
        before = self._files.log_size()
        command = [sys.executable, "-P", "-m", "memstream_server", "serve", "--data", str(path), "--listen", listen]
        command += ["--users-file", str(self._files.users)]
        if settings:
            command += ["--config", "/dev/stdin"]  # a nameless file: other users can see flags
        with _config_file(settings) as config, self._files.open_log() as log:
            process = subprocess.Popen(
                command,
                stdin=config,
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("MEMSTREAM_")},
                start_new_session=True,
                umask=0o077,
            )
        try:
            self._files.write_state(process.pid, recorded)
            while not self._files.address():
                if process.poll() is not None:
                    raise self._files.failed(
                        f"the server of {path} ended with {process.returncode} at its start", before
                    )
                self._wait("the server does not serve yet", before)
        except BaseException:
            process.kill()
            process.wait()
            raise
        threading.Thread(target=process.wait, name="memstream reaper", daemon=True).start()
        self.address = self._files.address() or listen

    def _wait(self, what: str, offset: int | None = None) -> None:
        if self._cancelled:
            raise LocalServerFailed("the start was cancelled")
        if time.monotonic() >= self._deadline_s:
            text = f"{self._files.path} has no server after {self._start_timeout_s:g} s: {what}"
            raise LocalServerFailed(text) if offset is None else self._files.failed(text, offset)
        time.sleep(POLL_S)

    def _drop(self) -> None:
        if self._users is not None:
            os.close(self._users)
            self._users = None
        _OPEN.discard(self)

    def forget(self) -> None:
        """In a forked process: no longer a user, the parent alone is."""
        self._forked = True
        if self._users is not None:
            os.close(self._users)


def plain_settings(settings: Mapping[str, LocalSetting]) -> dict[str, str | int | float | bool]:
    """The settings that were given, paths as absolute text. Raises InvalidArgument."""
    plain: dict[str, str | int | float | bool] = {}
    for name, value in settings.items():
        if name in RESERVED:
            raise InvalidArgument(name, f"cannot be set here: {RESERVED[name]}")
        if isinstance(value, Path):
            plain[name] = str(value.expanduser().absolute())
        elif isinstance(value, str | int | float | bool):
            plain[name] = value
        elif value is not None:
            raise InvalidArgument(name, f"is {type(value).__name__}, a setting is text, a number, a bool or a path")
    return plain


def _config_file(settings: Mapping[str, str | int | float | bool]) -> IO[bytes]:
    """A nameless TOML file of the settings, at its beginning."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    for name, value in settings.items():
        # JSON's texts, numbers and bools are also TOML's, but for DEL.
        file.write(f"{name} = {json.dumps(value).replace(chr(0x7F), chr(92) + 'u007f')}\n".encode())
    file.seek(0)
    return file


_OPEN: weakref.WeakSet[LocalServer] = weakref.WeakSet()
FORKED = (
    "this process was forked from one that uses memstream, and gRPC does not survive a fork: start workers with the "
    "method spawn or forkserver, or call memstream.local in the workers alone"
)
_forked_from_user = False


def check_fork() -> None:
    """Raises StreamClosed in a process that was forked from a user of memstream.local."""
    if _forked_from_user:
        raise StreamClosed(FORKED)


def _forget_servers() -> None:
    global _forked_from_user
    servers = list(_OPEN)
    _forked_from_user = _forked_from_user or bool(servers)
    for server in servers:
        with contextlib.suppress(OSError):
            server.forget()


os.register_at_fork(after_in_child=_forget_servers)
