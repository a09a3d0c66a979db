"""A data directory that a real server has filled, copied for each test; helpers that run commands on it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import call
from tests.diagnosis.lived import live
from tests.server.conftest import make_server

__all__ = ["make_server"]

Entry = tuple[int, int, str]


@pytest.fixture(scope="package")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do not change it."""
    data_dir = tmp_path_factory.mktemp("lived") / "data"
    asyncio.run(live(data_dir))
    return data_dir


@pytest.fixture
def data_dir(lived: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(lived, tmp_path / "data"))


def entries(folder: Path) -> dict[str, Entry]:
    """Every file with mode, modification time and content, to check that a command changes nothing."""
    return {
        str(file.relative_to(folder)): (
            file.stat().st_mode,
            file.stat().st_mtime_ns,
            hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
        )
        for file in sorted(folder.rglob("*"))
    }


def looked(command: str, data_dir: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of `memstream COMMAND --json`, which leaves the directory as it was."""
    before = entries(data_dir) if data_dir.is_dir() else {}
    ended = call(command, "--data", str(data_dir), "--json", *flags)
    assert (entries(data_dir) if data_dir.is_dir() else {}) == before
    assert "Traceback" not in ended.stderr, ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout or ended.stderr)
    return ended.returncode, answer


def changed(data_dir: Path, *statements: str, **values: object) -> None:
    """Change the journal with SQL."""
    with closing(sqlite3.connect(data_dir / "journal.db")) as connection, connection:
        for statement in statements:
            assert connection.execute(statement, values).rowcount, f"nothing was changed: {statement}"


def asked(data_dir: Path, question: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(data_dir / "journal.db")) as connection:
        return connection.execute(question).fetchall()
