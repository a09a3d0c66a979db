"""Retention in the background: expiry, ttl, strength and capacity; erasure after the grace period; pruned events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from memstream_server.core.events import EventType, Reason
from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import MemoryKind
from memstream_server.engine.background import retention
from memstream_server.engine.errors import CursorCompacted, FragmentNotFound, JournalUnavailable, OwnedElsewhere
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.memory.actor import Actor
from memstream_server.engine.requests import AckLevel, NewMemory, Query
from memstream_server.engine.runtime.clock import Clock
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.operations import OperationState
from tests.engine.conftest import open_engine
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import SettableClock, observation
from tests.engine.test_by_request import NAME, create, listed, tell, told
from tests.support.waiting import until

SECOND_US = 1_000_000
OFF_S = 86_400.0


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
async def engine(tmp_path: Path, clock: SettableClock) -> AsyncIterator[PartsEngine]:
    """Maintenance runs only on demand."""
    given = Clock(now_us=clock.now_us)
    async with open_engine(tmp_path / "data", clock=given, maintenance_interval_s=OFF_S) as opened:
        yield opened


async def contents(engine: PartsEngine) -> list[str]:
    return [one.content for one in await listed(engine)]


async def why(engine: PartsEngine) -> dict[str, Reason]:
    return {event.fragment: event.reason for event in await told(engine, EventType.FORGOTTEN)}


async def test_expired_fragments_are_forgotten_unless_pinned(engine: PartsEngine, clock: SettableClock) -> None:
    await create(engine, MemoryKind.HYBRID)
    (soon,) = await tell(engine, "soon", ttl_us=SECOND_US)
    (pinned,) = await tell(engine, "pinned", ttl_us=SECOND_US)
    await tell(engine, "never")
    await engine.fragments.update(*NAME, FragmentChange(id=pinned, pinned=True))
    await engine.run_maintenance()
    assert await contents(engine) == ["soon", "pinned", "never"]
    clock.offset_us += 2 * SECOND_US
    await engine.run_maintenance()
    assert await contents(engine) == ["pinned", "never"]
    assert await why(engine) == {soon: Reason.EXPIRED}
    await engine.fragments.update(*NAME, FragmentChange(id=pinned, pinned=False))
    await engine.run_maintenance()
    assert await contents(engine) == ["never"]


async def test_failing_memory_does_not_block_maintenance_of_others(
    engine: PartsEngine, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    await create(engine, MemoryKind.HYBRID)
    await tell(engine, "soon", "soon, too", ttl_us=SECOND_US)
    other = NewMemory(NAME[0], "other", MemoryKind.HYBRID, DEFAULT)
    record, _ = await engine.memories.create(other)
    use_uid = engine.actors.use_uid

    def failing(uid: str) -> AbstractAsyncContextManager[Actor]:
        if uid == record.uid:
            raise JournalUnavailable("this one cannot be read", retry_after_s=0.1)
        return use_uid(uid)

    items = [observation(text, ttl_us=SECOND_US // 2) for text in ("sooner", "sooner, too", "and a third")]
    await engine.observe_batch(NAME[0], "other", "", 1, items, AckLevel.STORED)
    clock.offset_us += 2 * SECOND_US
    monkeypatch.setattr(engine.actors, "use_uid", failing)
    await engine.run_maintenance()
    monkeypatch.undo()
    assert await contents(engine) == []


async def test_ttl_counts_from_creation_without_an_expiry(engine: PartsEngine, clock: SettableClock) -> None:
    await create(engine, retention__ttl_s=100)
    old = await tell(engine, "old", observe_time_us=1)
    await tell(engine, "own", ttl_us=1_000 * SECOND_US)
    clock.offset_us += 60 * SECOND_US
    await tell(engine, "young")
    await engine.run_maintenance()
    assert await contents(engine) == ["old", "own", "young"]
    clock.offset_us += 60 * SECOND_US
    await engine.run_maintenance()
    assert await contents(engine) == ["own", "young"]
    assert await why(engine) == dict.fromkeys(old, Reason.EXPIRED)


async def test_weak_fragments_are_forgotten_and_recalled_ones_kept(engine: PartsEngine, clock: SettableClock) -> None:
    await create(engine, retention__retention_min=0.4, retention__strength_half_life_s=100)
    await tell(engine, "the heron by the canal", "an umbrella in the hall")
    (weak,) = await tell(engine, "a trifle", importance=0.0)
    clock.offset_us += 50 * SECOND_US
    await engine.run_maintenance()
    assert await why(engine) == {weak: Reason.RETENTION}
    clock.offset_us += 60 * SECOND_US
    assert (await engine.recall(*NAME, Query(text="heron", limit=1))).recollections
    await engine.wait_for_reinforcement()
    await engine.write_accesses()  # the background task does it every few seconds
    clock.offset_us += 60 * SECOND_US
    await engine.run_maintenance()
    assert await contents(engine) == ["the heron by the canal"]


async def test_weakest_fragments_beyond_capacity_are_forgotten(engine: PartsEngine, clock: SettableClock) -> None:
    await create(engine, retention__long_term_capacity=3)
    for number, importance in enumerate((0.9, 0.1, 0.2, 0.8, 0.7, 0.0)):
        await tell(engine, f"line {number}", importance=importance)
    pinned = (await listed(engine))[5]
    await engine.fragments.update(*NAME, FragmentChange(id=pinned.id, pinned=True))
    clock.offset_us += 3_000_000 * SECOND_US
    await engine.run_maintenance()
    assert await contents(engine) == ["line 0", "line 3", "line 5"]
    assert set((await why(engine)).values()) == {Reason.CAPACITY}
    await engine.run_maintenance()
    assert len(await listed(engine)) == 3


async def test_fragment_is_erased_after_the_grace_period(engine: PartsEngine, clock: SettableClock) -> None:
    await create(engine, retention__forget_grace_s=100)
    ids = await tell(engine, "one", "two")
    await engine.fragments.forget(*NAME, ids[:1])
    clock.offset_us += 90 * SECOND_US
    await engine.run_maintenance()
    assert (await engine.fragments.restore(*NAME, ids[:1])).count == 1
    await engine.fragments.forget(*NAME, ids[:1])
    clock.offset_us += 90 * SECOND_US
    await engine.run_maintenance()
    assert [one.id for one in await listed(engine, forgotten=True)] == ids[:1]
    clock.offset_us += 20 * SECOND_US
    await engine.run_maintenance()
    assert await listed(engine, forgotten=True) == []
    assert await contents(engine) == ["two"]
    erased = await told(engine, EventType.ERASED)
    assert [(event.fragment, event.reason) for event in erased] == [(ids[0], Reason.EXPIRED)]
    with pytest.raises(FragmentNotFound):
        await engine.fragments.get(*NAME, id=ids[0])
    assert await engine.journal.get_vectors(erased[0].fragment, engine.info().embedding.name, ids[:1]) == {}


async def test_inactive_memory_is_maintained_too(tmp_path: Path, clock: SettableClock) -> None:
    given = Clock(now_us=clock.now_us)
    async with open_engine(tmp_path / "data", clock=given, maintenance_interval_s=OFF_S) as engine:
        await create(engine, retention__ttl_s=100)
        await tell(engine, "old")
    clock.offset_us += 200 * SECOND_US
    async with open_engine(tmp_path / "data", clock=given, maintenance_interval_s=OFF_S) as engine:
        await engine.run_maintenance()
        assert await listed(engine) == []
        assert len(await listed(engine, forgotten=True)) == 1


@pytest.mark.parametrize("lines_after", [0, 3])
async def test_watch_before_pruned_events_fails_with_oldest_revision(
    engine: PartsEngine, clock: SettableClock, lines_after: int
) -> None:
    """Also if every event was pruned, so that no event shows the gap."""
    await create(engine, retention__event_retention_s=100)
    await tell(engine, "one")
    await tell(engine, "two")
    pruned = (await engine.memories.get(*NAME)).revision
    clock.offset_us += 200 * SECOND_US
    for number in range(lines_after):
        await tell(engine, f"late {number}")
    await engine.run_maintenance()
    for cursor in (0, pruned - 1):
        steps = engine.watch(*NAME, "", cursor, 0)
        with pytest.raises(CursorCompacted) as refused:
            await anext(steps)
        assert refused.value.details["oldest_revision"] == str(pruned)
    steps = engine.watch(*NAME, "", pruned, 0)
    await tell(engine, "news")
    assert (await anext(steps))[1] == pruned + 1
    await steps.aclose()


async def test_purge_that_waits_for_another_server_is_cancellable(
    engine: PartsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def elsewhere(record: MemoryRecord) -> AsyncIterator[int]:
        raise OwnedElsewhere("another server owns the memory", retry_after_s=0.1)
        yield 0

    await create(engine, MemoryKind.LONG_TERM)
    await engine.fragments.forget(*NAME, await tell(engine, "gone"))
    monkeypatch.setattr(engine.retention, "purge_memory", elsewhere)
    operation = await engine.purging.start(NAME[0], "")

    async def left_to_another() -> bool:
        row = (await engine.storage.operations.list_page(*NAME, "", 1) or [operation])[0]
        return row.memory == NAME[1] and row.process is None

    await until(left_to_another)
    await engine.operations.cancel(operation.id)
    async with asyncio.timeout(60):
        assert (await engine.operations.wait_for_end(operation.id)).state is OperationState.CANCELLED


async def test_purge_erases_in_memories_that_have_forgotten(engine: PartsEngine, clock: SettableClock) -> None:
    await create(engine, retention__forget_grace_s=60)
    await engine.memories.create(NewMemory(NAME[0], "untouched", MemoryKind.HYBRID, DEFAULT))
    ids = await tell(engine, "tea", "cake", "milk")
    await engine.fragments.forget(*NAME, ids[:2])
    for later_us, kept in ((0, 2), (61 * SECOND_US, 0)):
        clock.offset_us += later_us
        operation = await engine.purging.start("", "")
        assert (await engine.operations.wait_for_end(operation.id)).done == 2 - kept
        assert len(await listed(engine, forgotten=True)) == kept


async def test_memory_counts_fragments_that_are_not_forgotten(engine: PartsEngine, clock: SettableClock) -> None:
    await create(engine, MemoryKind.HYBRID, retention__forget_grace_s=60)

    async def counted() -> int:
        (record,) = await engine.memories.list_page(NAME[0], "", 10)
        assert record == await engine.memories.get(*NAME)
        stats = (await engine.memories.get_statistics(*NAME)).counts
        assert record.fragments == stats.sensory + stats.short_term + stats.long_term
        return record.fragments

    assert await counted() == 0
    ids = await tell(engine, "tea", "cake", "milk", "tea")
    told_us = (await engine.memories.get(*NAME)).change_time_us
    assert await counted() == 3
    await engine.fragments.forget(*NAME, ids[:2])
    assert await counted() == 1
    await engine.fragments.restore(*NAME, ids[:1])
    assert await counted() == 2
    clock.offset_us += 61 * SECOND_US
    await engine.run_maintenance()
    assert await counted() == 2
    assert (await engine.memories.get(*NAME)).change_time_us > told_us
    await tell(engine, "soon", ttl_us=SECOND_US)
    clock.offset_us += 2 * SECOND_US
    await engine.run_maintenance()
    assert await counted() == 2
