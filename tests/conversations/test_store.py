"""The conversations in the journal pass the conformance suite."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import Connection

from memstream_server.adapters.journal.conversations import SqlConversations
from memstream_server.adapters.journal.sql import hidden_conversations
from memstream_server.ports.conversation_records import StateName, StateScope
from tests.conversations.conformance import NOW_US, ConversationConformance, Opener, Store
from tests.support import journals


@pytest.fixture
def opener(tmp_path: Path) -> Opener:
    async def open_again() -> Store:
        return await journals.open_test_journal(tmp_path / "data", lambda: NOW_US, reserve_bytes=0)

    return open_again


class TestJournal(ConversationConformance):
    """See conformance.py."""


async def test_calls_of_a_moment_delete_what_is_left_once(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 erasures deleted the same rows: a write of nothing for each slice and call."""
    purged: list[int] = []
    purge = hidden_conversations.purge_slice

    def count(connection: Connection, number: int) -> bool:
        gone = purge(connection, number)
        if gone:
            purged.append(number)
        return gone

    async def leave(_self: SqlConversations, _namespace: str) -> None:
        pass

    monkeypatch.setattr(hidden_conversations, "purge_slice", count)
    store = await opener()
    name = StateName("space", StateScope.APP, "app")
    with monkeypatch.context() as failing:
        failing.setattr(SqlConversations, "purge_deleted", leave)
        for number in range(4):
            await store.conversations.set_state(name, b'"%d' % number + b"x" * 200_000 + b'"', None, NOW_US)
    assert not purged
    await asyncio.gather(*(store.conversations.erase_user("space", "nobody") for _ in range(8)))
    assert len(purged) == len(set(purged)) == 3
