"""Deletion of active memories: the name is free at once, and everything that uses the memory ends."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from memstream_server.engine.errors import JournalUnavailable, MemoryNotFound
from memstream_server.engine.requests import AckLevel, Query
from tests.engine.assembled import NAMESPACE, assembled, gone, hasty
from tests.engine.test_registry import MEMORIES, begun, contents, counted, create, observe, recalled
from tests.support.faulty_journal import Fault
from tests.support.waiting import until

__all__ = ["hasty"]

pytestmark = pytest.mark.usefixtures("hasty")


@pytest.mark.parametrize("fault", [None, Fault.LOST, Fault.DONE])
async def test_name_of_a_deleted_memory_is_free_at_once(tmp_path: Path, fault: Fault | None) -> None:
    async with assembled(tmp_path, active_memories_max=1) as parts:
        for name in MEMORIES[:2]:  # evicts the first
            await create(parts.engine, name)
            await observe(parts.engine, name, "An otter lives here.")
        if fault is not None:
            parts.journal.fail_at(1, fault, "delete_memory")
            with pytest.raises(JournalUnavailable):
                await parts.engine.memories.delete(NAMESPACE, MEMORIES[0])
        if fault is not Fault.DONE:
            await parts.engine.memories.delete(NAMESPACE, MEMORIES[0])
        with pytest.raises(MemoryNotFound):
            await recalled(parts.engine, MEMORIES[0], "otter")
        await create(parts.engine, MEMORIES[0])
        assert await recalled(parts.engine, MEMORIES[0], "otter") == []


async def test_recreated_name_is_another_memory_during_the_deletion(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        await observe(parts.engine, "joy", "the otter eats fish")
        release = parts.journal.hold("delete_memory", done=True)
        deleting = asyncio.create_task(parts.engine.memories.delete(NAMESPACE, "joy"))
        await until(lambda: gone(parts.engine, "joy"))
        assert not deleting.done()
        with pytest.raises(MemoryNotFound):
            await recalled(parts.engine, "joy", "what does the otter eat?")
        await create(parts.engine, "joy")
        assert await recalled(parts.engine, "joy", "what does the otter eat?") == []
        await observe(parts.engine, "joy", "a heron waits in the reeds")
        release()
        await deleting
        await observe(parts.engine, "joy", "badgers dig at night")
        assert await contents(parts.engine, "joy") == ["a heron waits in the reeds", "badgers dig at night"]


async def test_deletion_completes_after_its_caller_leaves(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        await observe(parts.engine, "joy", "the otter eats fish")
        release = parts.journal.hold("delete_memory", done=True)
        deleting = asyncio.create_task(parts.engine.memories.delete(NAMESPACE, "joy"))
        await until(lambda: gone(parts.engine, "joy"))
        deleting.cancel()
        await asyncio.gather(deleting, return_exceptions=True)
        release()

        async def left() -> bool:
            return len(parts.actors) == 0

        await until(left)


async def test_memory_deleted_during_activation_stays_deleted(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
    async with assembled(tmp_path) as parts:
        gate = asyncio.Event()
        loads = counted(parts, "load_memory", gate)
        reading = asyncio.create_task(recalled(parts.engine, "joy", "anything"))
        await until(lambda: begun(loads))
        await asyncio.sleep(0.05)  # the image is loaded and waits
        await parts.engine.memories.delete(NAMESPACE, "joy")
        gate.set()
        with pytest.raises(MemoryNotFound):
            await reading
        assert len(parts.actors) == 0


async def test_deletion_ends_sessions_and_waiting_recalls(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        session = await parts.engine.open_observe(NAMESPACE, "joy", "p")
        waiting = asyncio.create_task(
            parts.engine.recall(NAMESPACE, "joy", Query(text="anything", min_revision=100, wait_s=60))
        )
        reaching = asyncio.create_task(session.wait_for_level(AckLevel.STORED, 1))
        await asyncio.sleep(0.01)
        await parts.engine.memories.delete(NAMESPACE, "joy")
        for told in (waiting, reaching):
            with pytest.raises(MemoryNotFound):
                await told


async def test_deletion_ends_a_watch_that_is_behind(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        record = await parts.engine.memories.get(NAMESPACE, "joy")
        await parts.engine.memories.delete(NAMESPACE, "joy")
        async with contextlib.aclosing(parts.engine.watchers.watch(record, record.uid, 0, 0)) as steps:
            with pytest.raises(MemoryNotFound):
                await anext(steps)


async def test_deletion_ends_an_idle_watch_at_once(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        parts.engine.watchers.quiet_s = 3_600.0
        record = await parts.engine.memories.get(NAMESPACE, "joy")
        async with contextlib.aclosing(parts.engine.watch(NAMESPACE, "joy", "", record.revision, 0)) as steps:
            assert (await anext(steps))[3] == (), "the mark at the start"
            step = asyncio.ensure_future(anext(steps))
            await asyncio.sleep(0.05)
            await parts.engine.memories.delete(NAMESPACE, "joy")
            with pytest.raises(MemoryNotFound):
                await step
