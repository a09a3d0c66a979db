"""A watch of blocks in the process: what it skips, and what wakes it; and a write whose caller has left."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from memstream_server.adapters.journal import SqlJournal
from memstream_server.engine.blocks import BlockPut, Blocks
from memstream_server.engine.runtime.clock import Clock
from memstream_server.engine.settings import Limits
from memstream_server.ports.blocks import BlockName, MemoryName
from tests.journal.samples import record
from tests.support import journals
from tests.support.waiting import until

JOY = MemoryName("comedy", "joy")


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SqlJournal]:
    opened = await journals.open_test_journal(tmp_path / "data", lambda: 1_000, reserve_bytes=0)
    await opened.create_memory(record("u1", "joy"), ())
    yield opened
    await opened.close()


async def test_slow_reader_gets_the_latest_version_alone(journal: SqlJournal) -> None:
    # Only a notification wakes a watch.
    blocks = Blocks(journal.blocks, journal, Clock(), 3_600.0, Limits())
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


async def test_write_that_fails_after_its_caller_left_is_quiet(journal: SqlJournal) -> None:
    warnings: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: warnings.append(context))
    blocks, release = Blocks(journal.blocks, journal, Clock(), 3_600.0, Limits()), threading.Event()
    holding = asyncio.create_task(journal._writer.run_exclusively(release.wait))
    leaving = asyncio.create_task(blocks.put(BlockName(MemoryName("comedy", "gone"), "task"), BlockPut("x"), None))

    async def is_writing() -> bool:
        return journal._writer.waiting == 1

    await until(is_writing)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    release.set()
    await holding
    await blocks.put(BlockName(JOY, "task"), BlockPut("written after it"), None)
    del leaving
    gc.collect()
    assert not warnings
