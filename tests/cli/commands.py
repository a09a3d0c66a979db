"""`memstream` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import journals

COMMAND = (sys.executable, "-m", "memstream_server")


def environment(target: str = "") -> dict[str, str]:
    """This process's, with nothing of MEMSTREAM_ but the target."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMSTREAM_")}
    return kept | ({"MEMSTREAM_TARGET": target} if target else {})


def run(*words: str, stdin: str = "", target: str = "") -> subprocess.CompletedProcess[str]:
    """`memstream WORDS` until it ends."""
    return subprocess.run(
        [*COMMAND, *words],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(target) | journals.environment(words),
        timeout=120,
        check=False,
    )
