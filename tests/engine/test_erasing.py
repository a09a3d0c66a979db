"""Erasure with failing writes, insights and observations in flight, and concurrent erasures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from memstream_server.app.models import Models
from memstream_server.core.events import EventType
from memstream_server.core.policy import DEFAULT, with_value
from memstream_server.core.values import Fragment, FragmentKind, MemoryKind
from memstream_server.engine.memory.enrich import Embedding
from memstream_server.engine.operations import runner
from memstream_server.engine.requests import AckLevel
from memstream_server.engine.runtime import turns
from memstream_server.ports.index import IndexUnavailable
from memstream_server.ports.models import Account
from memstream_server.ports.operations import OperationState
from tests.engine.assembled import NAMESPACE, assembled, check, events_of, hasty
from tests.engine.engine_parts import PartsEngine
from tests.engine.test_fragments import TEA, create, live, observe
from tests.support.faulty_journal import Fault
from tests.support.memory_index import MemoryIndex
from tests.support.scripted_models import ScriptedEmbedder, ScriptedInsights
from tests.support.waiting import until

__all__ = ["hasty"]  # a fixture

RIPE = with_value(DEFAULT, "short_term.enhance_threshold", 1)


async def erased(engine: PartsEngine, *ids: str) -> OperationState:
    operation = await engine.erasing.start(NAMESPACE, "joy", ids)
    return (await engine.operations.wait_for_end(operation.id)).state


async def insights(engine: PartsEngine) -> list[Fragment]:
    return [one for one in await live(engine) if one.kind is FragmentKind.INSIGHT]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("write", ["commit", "scrub_files", "outbox_refill"])
async def test_erasure_completes_after_any_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, fault: Fault
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.01)
    index = MemoryIndex()
    index.keeps_deleted = True
    models = Models(ScriptedEmbedder(), insights=ScriptedInsights())
    async with assembled(tmp_path, models=models, index=index) as parts:
        await create(parts.engine, RIPE)
        await observe(parts.engine, TEA, f"{TEA} today")
        (insight,) = await until(lambda: insights(parts.engine))
        parts.journal.fail_at(1, fault, write)
        index.fail_at(1, IndexUnavailable, "drop_all")
        assert await erased(parts.engine, insight.sources[0]) is OperationState.SUCCEEDED
        assert parts.journal.failed == write
        assert index.failed == index._call == "drop_all"
        assert [one.id for one in await live(parts.engine)] == [insight.sources[1]]
        await check(parts.engine, "joy")


class Slow(ScriptedInsights):
    """A model that answers when its gate is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def promotion_insights(self, texts: Sequence[str], account: Account) -> list[str]:
        self.asked.set()
        await self.go.wait()
        return await super().promotion_insights(texts, account)


async def test_erasing_a_source_discards_its_insight_in_flight(tmp_path: Path) -> None:
    slow = Slow()
    async with assembled(tmp_path, models=Models(ScriptedEmbedder(), insights=slow)) as parts:
        await create(parts.engine, RIPE)
        await observe(parts.engine, TEA, f"{TEA} today")
        await slow.asked.wait()
        first = (await live(parts.engine))[0]
        assert await erased(parts.engine, first.id) is OperationState.SUCCEEDED
        slow.go.set()

        async def done() -> bool:
            return not await parts.journal.list_jobs(10)

        await until(done)
        assert len(slow.shown) == 1
        assert [one.content for one in await live(parts.engine)] == [f"{TEA} today"]
        await check(parts.engine, "joy")


async def test_insight_of_erased_source_is_dropped_after_space_switch(tmp_path: Path) -> None:
    slow = Slow()
    async with assembled(tmp_path, models=Models(ScriptedEmbedder(), insights=slow)) as parts:
        await create(parts.engine, RIPE)
        await observe(parts.engine, TEA, f"{TEA} today")
        await slow.asked.wait()
        first = (await live(parts.engine))[0]
        assert await erased(parts.engine, first.id) is OperationState.SUCCEEDED
        embeddings = parts.engine.models.embeddings
        now = embeddings.in_force
        embeddings.in_force = Embedding(replace(now.model, name="another"), now.embedder)
        await parts.actors.move_to_space(lambda _: ())
        slow.go.set()

        async def done() -> bool:
            return not await parts.journal.list_jobs(10)

        await until(done)
        assert len(slow.shown) == 1
        assert [one.content for one in await live(parts.engine)] == [f"{TEA} today"]


async def test_sources_of_many_fragments_are_sorted_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paused = list[None]()

    async def pause() -> None:
        paused.append(None)

    async def cite_each_other(uid: str) -> dict[str, list[str]]:
        return {f"insight {number}": [f"source {number}"] for number in range(6_400)}

    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        await observe(parts.engine, TEA)
        monkeypatch.setattr(parts.journal, "list_citing", cite_each_other)
        monkeypatch.setattr(turns, "pause_if_due", pause)
        (fragment,) = await live(parts.engine)
        assert await erased(parts.engine, fragment.id) is OperationState.SUCCEEDED
        assert await live(parts.engine) == []
    assert len(paused) >= 99


async def test_erasure_waits_for_unstored_observations(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        release = parts.journal.hold("commit")
        await observe(parts.engine, TEA, level=AckLevel.RECEIVED)
        record = await parts.engine.memories.get(NAMESPACE, "joy")

        async def received() -> list[str]:
            image = await parts.journal.load_memory(record.uid, "", 0)
            return [one.id for receipt in image.pending for one in receipt.fragments]

        (waiting,) = await until(received)
        erasing = asyncio.create_task(erased(parts.engine, waiting))
        release()
        assert await erasing is OperationState.SUCCEEDED
        assert await live(parts.engine) == []
        told = [event.type for event in await events_of(parts.engine, record.uid)]
        assert told.count(EventType.ERASED) == 1


async def test_cancel_ends_erasure_that_waits_for_unstored(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        release = parts.journal.hold("commit")
        await observe(parts.engine, TEA, level=AckLevel.RECEIVED)
        record = await parts.engine.memories.get(NAMESPACE, "joy")
        image = await parts.journal.load_memory(record.uid, "", 0)
        (waiting,) = [one.id for receipt in image.pending for one in receipt.fragments]
        operation = await parts.engine.erasing.start(NAMESPACE, "joy", [waiting])
        await cancelled(parts.engine, operation.id)
        release()


async def test_cancel_ends_erasure_while_the_index_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away() -> None:
        raise IndexUnavailable("scripted: away")

    async with assembled(tmp_path) as parts:
        await create(parts.engine, kind=MemoryKind.LONG_TERM)
        (said,) = await observe(parts.engine, TEA)
        monkeypatch.setattr(parts.index, "flush", away)
        operation = await parts.engine.erasing.start(NAMESPACE, "joy", [said])
        await cancelled(parts.engine, operation.id)


async def cancelled(engine: PartsEngine, id: str) -> None:
    """A running operation ends even if the thing that it waits for never comes."""

    async def at_work() -> bool:
        return (await engine.operations.get(id)).state is OperationState.RUNNING

    await until(at_work)
    await asyncio.sleep(0.3)
    await engine.operations.cancel(id)
    async with asyncio.timeout(60):
        assert (await engine.operations.wait_for_end(id)).state is OperationState.CANCELLED


async def test_waiting_erasures_share_one_rebuild(tmp_path: Path) -> None:
    index = MemoryIndex()
    index.keeps_deleted, index.drop_s = True, 1.0  # the others arrive during the first one
    async with assembled(tmp_path, index=index) as parts:
        await create(parts.engine, kind=MemoryKind.LONG_TERM)
        await observe(parts.engine, *(f"{animal} at the river" for animal in ("otters", "herons", "foxes", "weasels")))
        ids = [one.id for one in await live(parts.engine)]
        assert await asyncio.gather(*(erased(parts.engine, id_) for id_ in ids)) == [OperationState.SUCCEEDED] * 4
        assert 1 <= index.drops < 4
        assert await live(parts.engine) == []


@pytest.mark.parametrize(("idle", "erases"), [(True, False), (False, True)])
async def test_an_index_that_erases_or_is_idle_is_kept(tmp_path: Path, idle: bool, erases: bool) -> None:
    index = MemoryIndex()
    index.keeps_deleted, index.is_idle, index.erases = True, idle, erases
    async with assembled(tmp_path, index=index) as parts:
        await create(parts.engine, kind=MemoryKind.LONG_TERM)
        first, _ = await observe(parts.engine, "otters at the river", "herons at the river")
        index.fail_at(1, IndexUnavailable, "erase_deleted")
        assert await erased(parts.engine, first) is OperationState.SUCCEEDED
        assert (index.drops, index.erasures) == (0, int(erases))
        assert [one.content for one in await live(parts.engine)] == ["herons at the river"]
