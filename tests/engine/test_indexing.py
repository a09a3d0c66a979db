"""The vector index in the engine: recall answers although it is lost, late, orphaned or unreachable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from memstream_server.adapters.journal.store import SqlJournal
from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import MemoryKind
from memstream_server.engine.background import indexer
from memstream_server.engine.requests import AckLevel, NewMemory, Query
from memstream_server.engine.runtime.clock import Clock
from memstream_server.ports.index import Point
from memstream_server.ports.journal.records import IndexEntry
from tests.engine import conftest
from tests.engine.assembled import assembled
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation
from tests.support.memory_index import MemoryIndex
from tests.support.scripted_models import VECTOR_BYTES
from tests.support.waiting import until

open_engine = partial(conftest.open_engine, index_from_fragments=0)
"""An engine whose index is filled from the first fragment."""
TEXTS = [f"{animal} number {number} eats {food}" for number, (animal, food) in enumerate(
    (animal, food) for animal in ("otter", "heron", "badger", "lynx") for food in ("fish", "frogs", "roots", "hares")
)]  # fmt: skip


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[PartsEngine]:
    async with open_engine(tmp_path / "data") as opened:
        yield opened


async def filled(engine: PartsEngine, level: AckLevel = AckLevel.STORED) -> str:
    record, _ = await engine.memories.create(NewMemory("test", "zoo", MemoryKind.LONG_TERM, DEFAULT, exist_ok=True))
    await engine.observe_batch("test", "zoo", "", 1, [observation(text) for text in TEXTS], level)
    return record.uid


async def unindexed(engine: PartsEngine) -> int:
    return (await engine.memories.get_statistics("test", "zoo")).counts.unindexed


async def indexed(engine: PartsEngine) -> bool:
    return await unindexed(engine) == 0


async def first(engine: PartsEngine, text: str) -> str:
    answer = await engine.recall("test", "zoo", Query(text=text, limit=1, reinforce=False))
    return answer.recollections[0].fragment.content


async def test_indexed_level_follows_the_empty_outbox(engine: PartsEngine) -> None:
    await filled(engine, AckLevel.INDEXED)
    assert await indexed(engine)


async def test_memory_beyond_ram_answers_the_same_from_the_index(tmp_path: Path) -> None:
    async with open_engine(tmp_path) as engine:
        await filled(engine, AckLevel.INDEXED)
        in_ram = [await engine.recall("test", "zoo", Query(text=text, reinforce=False)) for text in TEXTS]
    async with open_engine(tmp_path, dense_bytes_max=4 * VECTOR_BYTES) as engine:
        await until(lambda: healthy(engine))
        for text, expected in zip(TEXTS, in_ram, strict=True):
            answer = await engine.recall("test", "zoo", Query(text=text, reinforce=False))
            assert answer.degraded == ""
            assert [one.fragment.id for one in answer.recollections] == [
                one.fragment.id for one in expected.recollections
            ]
            assert np.allclose(
                [one.scored.relevance for one in answer.recollections],
                [one.scored.relevance for one in expected.recollections],
                atol=1e-5,
            )


async def healthy(engine: PartsEngine) -> bool:
    return engine.info().degraded == ""


async def test_fresh_fragments_beyond_ram_are_found_before_indexing(tmp_path: Path) -> None:
    async with open_engine(tmp_path, dense_bytes_max=1 * VECTOR_BYTES, index_flush_rows=100_000) as engine:
        await filled(engine)
        assert [await first(engine, text) for text in TEXTS] == TEXTS
    async with open_engine(tmp_path, dense_bytes_max=1 * VECTOR_BYTES) as engine:
        assert [await first(engine, text) for text in TEXTS] == TEXTS


async def test_lost_index_degrades_recall_to_lexical_search(tmp_path: Path) -> None:
    async with open_engine(tmp_path, dense_bytes_max=0) as engine:
        await filled(engine, AckLevel.INDEXED)
        await engine.storage.index.close()
        answer = await engine.recall("test", "zoo", Query(text=TEXTS[0], limit=1, reinforce=False))
        assert answer.recollections[0].fragment.content == TEXTS[0]
        assert "vector index unavailable" in answer.degraded


async def test_start_repairs_missing_and_orphaned_index_rows(tmp_path: Path) -> None:
    async with open_engine(tmp_path) as engine:
        uid = await filled(engine, AckLevel.INDEXED)
        ids = set(await engine.journal.list_indexable(uid))
        index = engine.storage.index
        await index.delete(uid, sorted(ids)[:3])
        orphan = np.zeros(engine.dimension, np.float32)
        orphan[0] = 1.0
        await index.upsert([Point(uid, "orphan", orphan)])
        await index.flush()
    async with open_engine(tmp_path) as engine:

        async def right() -> bool:
            return await healthy(engine) and set(await engine.storage.index.list_ids(uid)) == ids

        await until(right)


async def test_a_deleted_memory_leaves_the_index(engine: PartsEngine) -> None:
    uid = await filled(engine, AckLevel.INDEXED)
    await engine.memories.delete("test", "zoo")

    async def empty() -> bool:
        return await engine.storage.index.count(uid) == 0

    await until(empty)


async def test_immediate_stop_leaves_the_outbox_to_the_next_engine(tmp_path: Path) -> None:
    async with open_engine(tmp_path, index_flush_rows=100_000) as engine:
        await filled(engine)
        await asyncio.sleep(0)
    async with open_engine(tmp_path) as engine:
        await until(lambda: healthy(engine))  # the stop may have written the outbox: then it is empty from the start
        await until(lambda: indexed(engine))
        uid = (await engine.memories.get("test", "zoo")).uid
        assert await engine.storage.index.count(uid) == len(TEXTS)


class BusyIndex(MemoryIndex):
    """Stores more observations during every flush, so that the outbox is never empty.

    The engine is a future; None ends the writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine: asyncio.Future[PartsEngine | None] = asyncio.get_running_loop().create_future()
        self.said = 0

    def rest(self) -> None:
        self.engine = asyncio.get_running_loop().create_future()
        self.engine.set_result(None)

    async def flush(self) -> None:
        await super().flush()
        engine = await self.engine
        if engine is not None:
            self.said += 1
            await engine.observe_batch("test", "zoo", "", 0, [observation(f"sight {self.said}")], AckLevel.STORED)


async def test_overlay_shrinks_during_steady_writes(tmp_path: Path) -> None:
    busy = BusyIndex()
    async with assembled(tmp_path, index=busy, index_overlay_s=0.05, dense_bytes_max=0) as parts:
        uid = await filled(parts.engine)
        busy.engine.set_result(parts.engine)
        actor = parts.actors.peek(uid)
        assert actor is not None
        first_ids = set(actor.working.list_unsettled())
        assert len(first_ids) >= len(TEXTS)

        async def let_go() -> bool:
            return not first_ids & set(actor.working.list_unsettled())

        await until(let_go)
        said = busy.said
        assert await parts.engine.observe_batch("test", "zoo", "", 0, [observation("a last one")], AckLevel.INDEXED)
        assert busy.said > said  # the writes did not stop
        busy.rest()


class GatedIndex(MemoryIndex):
    """A flush waits until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    async def flush(self) -> None:
        self.reached.set()
        await self.gate.wait()
        await super().flush()


async def test_wait_of_rows_counts_from_the_running_round(tmp_path: Path) -> None:
    ahead_s, interval_s = [0.0], 3_600.0
    index, clock = GatedIndex(), Clock(monotonic_s=lambda: time.monotonic() + ahead_s[0])
    settings = {"index_flush_interval_s": interval_s, "index_flush_rows": len(TEXTS)}
    async with assembled(tmp_path, index=index, clock=clock, **settings) as parts:
        await filled(parts.engine)
        await index.reached.wait()
        await parts.engine.observe_batch("test", "zoo", "", 0, [observation("a last one")], AckLevel.STORED)
        ahead_s[0] = interval_s
        index.gate.set()
        await until(lambda: indexed(parts.engine))


async def test_outbox_is_written_with_a_stopped_clock(tmp_path: Path) -> None:
    async with assembled(tmp_path, clock=Clock(monotonic_s=lambda: 0.0)) as parts:
        await asyncio.wait_for(filled(parts.engine, AckLevel.INDEXED), 60)
        assert await indexed(parts.engine)


async def test_reconcile_ignores_in_flight_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_engine(tmp_path, index_flush_rows=100_000) as engine:
        await filled(engine)
    entered = entries_made(monkeypatch)
    busy = BusyIndex()
    async with assembled(tmp_path, index=busy, index_flush_interval_s=0.05) as parts:
        busy.engine.set_result(parts.engine)
        await until(lambda: said(busy, 5))
        await until(lambda: compared(parts.engine))
        assert not entered
        busy.rest()


async def test_reconcile_finds_missing_rows_during_steady_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = BusyIndex()
    async with assembled(tmp_path, index=busy) as parts:
        busy.rest()
        uid = await filled(parts.engine, AckLevel.INDEXED)
    lacking = sorted(busy.list_stored(uid))[:3]
    await busy.delete(uid, lacking)
    await busy.flush()
    entered = entries_made(monkeypatch)
    busy.engine = asyncio.get_running_loop().create_future()
    async with assembled(tmp_path, index=busy, index_flush_interval_s=0.05) as parts:
        busy.engine.set_result(parts.engine)
        await until(lambda: compared(parts.engine))
        await until(lambda: within(busy, uid, lacking))
        assert [(entry.memory, entry.fragment) for entry in entered] == [(uid, id_) for id_ in lacking]
        busy.rest()


class SlowlyRead(MemoryIndex):
    """Lists a memory's ids slowly."""

    async def list_ids(self, memory: str, model: str = "") -> list[str]:
        await asyncio.sleep(0.1)
        return await super().list_ids(memory, model)


async def test_reconcile_of_many_memories_does_not_delay_indexing(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        for number in range(50):
            new = NewMemory("test", f"zoo {number}", MemoryKind.LONG_TERM, DEFAULT)
            await parts.engine.memories.create(new)
    async with assembled(tmp_path, index=SlowlyRead()) as parts:
        await filled(parts.engine, AckLevel.INDEXED)
        assert not await compared(parts.engine)  # takes five seconds without a pause


def entries_made(monkeypatch: pytest.MonkeyPatch) -> list[IndexEntry]:
    """The entries that all later comparisons make."""
    made: list[IndexEntry] = []
    enter = SqlJournal.outbox_enter

    async def told(journal: SqlJournal, entries: Sequence[IndexEntry]) -> None:
        made.extend(entries)
        await enter(journal, entries)

    monkeypatch.setattr(SqlJournal, "outbox_enter", told)
    return made


async def compared(engine: PartsEngine) -> bool:
    return engine.indexer._reconciler.done


async def within(index: MemoryIndex, uid: str, ids: list[str]) -> bool:
    return set(ids) <= index.list_stored(uid)


async def said(busy: BusyIndex, times: int) -> bool:
    return busy.said >= times


async def test_rebuild_progress_never_decreases_during_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, told, enough = [len(TEXTS), 2, 7, 7, 1], list[tuple[int, int]](), asyncio.Event()

    async def left() -> int:
        return sizes.pop(0) if len(sizes) > 1 else sizes[0]

    async def at(done: int, total: int) -> None:
        told.append((done, total))
        if len(told) == 8:
            enough.set()

    monkeypatch.setattr(indexer, "POLL_INTERVAL_S", 0.01)
    async with assembled(tmp_path, index_flush_interval_s=60.0) as parts:
        await filled(parts.engine)
        flush = parts.index.flush

        async def slow() -> None:
            await enough.wait()
            await flush()

        monkeypatch.setattr(parts.index, "flush", slow)
        monkeypatch.setattr(parts.journal, "outbox_size", left, raising=False)
        await parts.engine.indexer.rebuild_index(at)
        assert told == sorted(told)
        assert all(done <= total for done, total in told)
