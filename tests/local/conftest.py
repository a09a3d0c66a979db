"""A data directory that no server may hold when the test has ended."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstream.local_files import Directory
from tests.local.users import server_ends


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short enough for a socket in it, which pytest's own folders are not."""
    with tempfile.TemporaryDirectory(prefix="local-") as folder:
        path = Path(folder) / "mein Gedächtnis 记忆 100%"
        yield path
        files = Directory(path)
        ended = server_ends(path)
        if not ended and (pid := files.server_pid()) is not None:
            os.kill(pid, signal.SIGKILL)
        assert ended, "a server is left over"
