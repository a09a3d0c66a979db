"""Runs `memstream` in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import journals

COMMAND = (sys.executable, "-m", "memstream_server")


def environment(target: str = "") -> dict[str, str]:
    """This process's environment, with the target as the only MEMSTREAM_ variable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMSTREAM_")}
    return kept | ({"MEMSTREAM_TARGET": target} if target else {})


def run(*words: str, stdin: str = "", target: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `memstream WORDS` to its end."""
    return subprocess.run(
        [*COMMAND, *words],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(target) | journals.environment(words),
        timeout=120,
        check=False,
    )
