"""The SQLite journal passes the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream_server.adapters.journal import open_journal
from memstream_server.ports.journal import Journal
from tests.journal.conformance import JournalConformance, Now, Opener


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def opener(tmp_path: Path, now: Now) -> Opener:
    async def open_again() -> Journal:
        return await open_journal(tmp_path / "data", clock_us=now, reserve_bytes=0)

    return open_again


class TestSqlite(JournalConformance):
    """See conformance.py."""
