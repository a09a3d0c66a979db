"""A watch of blocks in the process: what it skips, and what wakes it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from memstream_server.adapters.journal.store import SqlJournal
from memstream_server.engine.blocks import BlockPut, Blocks
from memstream_server.engine.runtime.clock import Clock
from memstream_server.engine.settings import EngineLimits
from memstream_server.ports.blocks import BlockName, MemoryName
from tests.journal.samples import record
from tests.support import journals

JOY = MemoryName("comedy", "joy")


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SqlJournal]:
    opened = await journals.open_test_journal(tmp_path / "data", lambda: 1_000, reserve_bytes=0)
    await opened.create_memory(record("u1", "joy"), ())
    yield opened
    await opened.close()


async def test_slow_reader_gets_the_latest_version_alone(journal: SqlJournal) -> None:
    # Only a notification wakes a watch.
    blocks = Blocks(journal.blocks, journal, Clock(), 3_600.0, EngineLimits())
    async with aclosing(blocks.watch(JOY, "u1", {})) as watch:
        first = await anext(watch)
        assert (first.written, first.deleted) == ((), ())
        for number in range(5):
            await blocks.put(BlockName(JOY, "task"), BlockPut(f"{number}"), None)
        await blocks.put(BlockName(JOY, "gone"), BlockPut("x"), None)
        await blocks.delete(BlockName(JOY, "gone"), None)
        second = await anext(watch)
        assert [(one.name, one.content.text) for one in second.written] == [("task", "4")]
        assert second.deleted == ()
        await blocks.delete(BlockName(JOY, "task"), None)
        assert (await anext(watch)).deleted == ("task",)
