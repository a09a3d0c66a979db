"""The operations in SQLite pass the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream_server.adapters.journal import open_journal
from tests.operations.conformance import NOW_US, Opener, OperationConformance, Store


@pytest.fixture
def opener(tmp_path: Path) -> Opener:
    async def open_again() -> Store:
        return await open_journal(tmp_path / "data", clock_us=lambda: NOW_US, reserve_bytes=0)

    return open_again


class TestSqlite(OperationConformance):
    """See conformance.py."""
