"""A data directory that no server may hold when the test has ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstream.local_files import Directory
from tests.local.users import server_ends


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mein Gedächtnis 记忆 100%"
    yield path
    files = Directory(path)
    ended = server_ends(path)
    if not ended and (pid := files.server_pid()) is not None:
        os.kill(pid, signal.SIGKILL)
    assert ended, "a server is left over"
