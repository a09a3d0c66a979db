"""Third-party programs that tests need."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


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
