"""The conversations in the journal pass the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conversations.conformance import NOW_US, ConversationConformance, Opener, Store
from tests.support import journals


@pytest.fixture
def opener(tmp_path: Path) -> Opener:
    async def open_again() -> Store:
        return await journals.open_test_journal(tmp_path / "data", lambda: NOW_US, reserve_bytes=0)

    return open_again


class TestJournal(ConversationConformance):
    """See conformance.py."""
