"""Third-party programs that tests need."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache"


class Absent(Exception):
    """A program is not available; the text gives the reason."""


def run(*command: str | Path, stdin: str = "", cwd: Path | None = None, **variables: str) -> str:
    """Runs a program and returns its output. Raises AssertionError when it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | variables,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]}:\n{done.stdout}{done.stderr}"
    return done.stdout


@contextlib.contextmanager
def alone(work: str) -> Iterator[None]:
    """Does `work` in one process of a parallel test run at a time; the others wait and then find it done."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{work}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install_packages(what: str, *packages: str, timeout_s: float = 600) -> None:
    """Installs packages of Debian. Raises Absent, which names `what` is missing and why it cannot be installed."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Absent(f"{what} is not installed, and only root of a Debian may install it")
    with alone("apt-get"):
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            try:
                done = subprocess.run(
                    ["apt-get", "--quiet", *command],
                    env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
                    capture_output=True,
                    text=True,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise Absent(f"apt-get {command[0]} took longer than {timeout_s:.0f} s") from None
            if done.returncode:
                raise Absent(f"apt-get {command[0]} failed: {done.stderr.strip()[-300:]}")
