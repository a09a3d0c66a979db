"""RAM and journal stay bounded over any number of producers, request_ids, memories and watches."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest

from memstream_server.adapters.journal.sql import reads
from memstream_server.core.filters import Listing
from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import SequenceConflict
from memstream_server.engine.requests import AckLevel, NewMemory, Query
from memstream_server.engine.runtime.clock import Clock
from memstream_server.ports.journal.records import Answer, batch_request
from tests.engine.assembled import NAMESPACE, Assembled, assembled, check, hasty
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import SettableClock, observation
from tests.support.waiting import until

__all__ = ["hasty"]

pytestmark = pytest.mark.usefixtures("hasty")

OFF_S = 86_400.0
DAY_US = 24 * 3600 * 1_000_000
STORED = AckLevel.STORED


async def create(engine: PartsEngine, name: str, kind: MemoryKind = MemoryKind.LONG_TERM) -> str:
    return (await engine.memories.create(NewMemory(NAMESPACE, name, kind, DEFAULT)))[0].uid


async def observe(engine: PartsEngine, name: str, text: str, request: str = "") -> None:
    await engine.observe_batch(NAMESPACE, name, "", 1, [observation(text)], STORED, request, text.encode())


async def contents(engine: PartsEngine, name: str) -> list[str]:
    return [row.fragment.content for row in (await check(engine, name)).rows]


# ---- producers


async def test_producers_leave_ram_and_resume_where_they_were(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        engine = parts.engine
        await create(engine, "joy")
        for number in range(20):
            producer = f"p{number}"
            await engine.observe_batch(NAMESPACE, "joy", producer, 1, [observation(producer)], STORED)
            await observe(engine, "joy", f"request {number}", f"r{number}")
            await observe(engine, "joy", f"nobody {number}")
        assert (engine.memory_stats().producers, engine.memory_stats().sessions) == (0, 0)
        session = await engine.open_observe(NAMESPACE, "joy", "p3")
        assert (session.opened.received, session.opened.stored, engine.memory_stats().producers) == (1, 1, 1)
        await session.submit(1, [observation("p3")])  # a repeat
        await session.submit(2, [observation("more of p3")])
        await session.wait_for_level(STORED, 2)
        session.close()
        session = await engine.open_observe(NAMESPACE, "joy", "p4")
        with pytest.raises(SequenceConflict):
            await session.submit(1, [observation("something else")])
        session.close()
        assert (engine.memory_stats().producers, engine.memory_stats().sessions) == (0, 0)
        assert len(await contents(engine, "joy")) == 61


async def test_closed_producer_stays_until_its_batches_are_stored(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        release = parts.journal.hold("commit")
        session = await parts.engine.open_observe(NAMESPACE, "joy", "p")
        await session.submit(1, [observation("one")])
        session.close()
        assert parts.engine.memory_stats().producers == 1
        again = await parts.engine.open_observe(NAMESPACE, "joy", "p")
        assert (again.opened.received, again.opened.stored) == (1, 0)
        release()
        assert (await again.wait_for_level(STORED, 1)).stored == 1
        again.close()
        assert parts.engine.memory_stats().producers == 0


async def test_request_id_leaves_the_journal_after_a_day(tmp_path: Path) -> None:
    clock = SettableClock()
    async with assembled(tmp_path, clock=Clock(now_us=clock.now_us), maintenance_interval_s=OFF_S) as parts:
        engine = parts.engine
        uid = await create(engine, "joy")
        await engine.observe_batch(NAMESPACE, "joy", "lasting", 1, [observation("kept")], STORED)
        for number in range(300):  # more than one slice
            await observe(engine, "joy", f"said {number}", f"r{number}")
        clock.offset_us += DAY_US - 60_000_000
        await engine.run_maintenance()
        await observe(engine, "joy", "said 7", "r7")
        assert len(await contents(engine, "joy")) == 301
        clock.offset_us += 120_000_000
        await engine.run_maintenance()
        assert [await _answer(parts, uid, name) for name in ("r7", "r299")] == [None, None]
        assert await _hashes(parts, uid, "lasting") == 1
        await observe(engine, "joy", "said 7", "r7")  # too old to be distinguished from a new request
        page, *_ = await engine.fragments.list_page(NAMESPACE, "joy", Listing(), -1, 999)
        assert [one.content for one in page if one.duplicate_count] == ["said 7"]


async def _answer(parts: Assembled, uid: str, request_id: str) -> Answer | None:
    return await parts.engine.stored_answer(batch_request(NAMESPACE, uid, request_id))


async def _hashes(parts: Assembled, uid: str, producer: str) -> int:
    return len(await parts.journal.received_hashes(uid, producer, 1, 9))


# ---- active memories


async def test_growing_memories_stay_within_the_byte_bound(tmp_path: Path) -> None:
    """Both fit when they are activated but not after they have grown: the one used last stays."""
    async with assembled(tmp_path, active_bytes_max=1 << 20) as parts:
        engine = parts.engine
        for name in ("sad", "joy"):
            await create(engine, name)
            await observe(engine, name, f"{name} begins")
        assert engine.memory_stats().memories == 2
        for name in ("sad", "joy"):
            lines = [observation(f"{name} {number} {'x' * 1_000}") for number in range(130)]
            await engine.observe_batch(NAMESPACE, name, "p", 1, lines, STORED)

        async def within() -> bool:
            held = engine.memory_stats()
            return held.memories == 1 and held.size_bytes <= 1 << 20

        await until(within)
        assert not (await engine.memories.get_statistics(NAMESPACE, "sad")).active
        assert (await engine.memories.get_statistics(NAMESPACE, "joy")).active
        found = await engine.recall(NAMESPACE, "sad", Query(text="sad begins", limit=1))
        assert [one.fragment.content for one in found.recollections] == ["sad begins"]


async def test_deleted_memories_leave_nothing_in_ram(tmp_path: Path) -> None:
    async with assembled(tmp_path, active_memories_max=1, maintenance_interval_s=OFF_S) as parts:
        engine = parts.engine
        for number in range(10):
            await create(engine, f"m{number}")
            await observe(engine, f"m{number}", "hello")
            await engine.run_maintenance()
        for number in range(10):
            await engine.memories.delete(NAMESPACE, f"m{number}")
        await engine.run_maintenance()
        held = engine.memory_stats()
        assert (held.memories, held.size_bytes, held.producers, held.watchers) == (0, 0, 0, 0)
        assert not engine.ownership._epochs


# ---- watchers


async def test_watch_read_ahead_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "EVENTS_BYTES_MAX", 2_000)
    async with assembled(tmp_path) as parts:
        engine = parts.engine
        uid = await create(engine, "joy")
        for number in range(30):
            lines = [observation(f"{number} {line}") for line in range(10)]
            await engine.observe_batch(NAMESPACE, "joy", "", 1, lines, STORED)
        page = await engine.journal.list_events(uid, 0, 256)
        assert 1 <= len(page) < 31
        assert len(await engine.journal.list_events(uid, 5, 256)) >= 1
        seen: list[int] = []
        async with aclosing(engine.watch(NAMESPACE, "joy", uid, 0, 0)) as steps:
            async for _, revision, _, events in steps:
                assert events, "no pause while there is more"
                seen.append(revision)
                if revision == 20:
                    await observe(engine, "joy", "and one more")
                if revision == 32:
                    break
        assert seen == list(range(1, 33))
        assert engine.memory_stats().watchers == 0
