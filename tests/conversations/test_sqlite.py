"""The conversations in SQLite pass the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream_server.adapters.journal import open_journal
from tests.conversations.conformance import NOW_US, ConversationConformance, Opener, Store


@pytest.fixture
def opener(tmp_path: Path) -> Opener:
    async def open_again() -> Store:
        return await open_journal(tmp_path / "data", clock_us=lambda: NOW_US, reserve_bytes=0)

    return open_again


class TestSqlite(ConversationConformance):
    """See conformance.py."""
