"""Active memories: activated once, evicted only when idle, read again after a failure, gone when deleted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from memstream_server.app.models import Models
from memstream_server.core.policy import DEFAULT, Policy, with_value
from memstream_server.core.values import MemoryKind
from memstream_server.engine.engine import Engine
from memstream_server.engine.errors import EngineError, JournalUnavailable, MemoryNotFound, ModelMismatch
from memstream_server.engine.memory.fragment_cache import FRAGMENTS_MAX
from memstream_server.engine.memory.working_set import WorkingSet
from memstream_server.engine.requests import AckLevel, MemoryChange, NewMemory, Query
from memstream_server.ports.models import EmbeddingModel
from tests.engine.assembled import NAMESPACE, Assembled, assembled, check, gone, hasty
from tests.engine.memory import observation
from tests.support import journals
from tests.support.faulty_journal import Fault
from tests.support.scripted_models import ScriptedEmbedder
from tests.support.waiting import until

__all__ = ["hasty"]

pytestmark = pytest.mark.usefixtures("hasty")

MEMORIES = [f"m-{number}" for number in range(8)]
ROUNDS = 12
SMALL = with_value(DEFAULT, "short_term.capacity", 3)


async def create(engine: Engine, name: str, policy: Policy = SMALL) -> None:
    await engine.memories.create(NewMemory(NAMESPACE, name, MemoryKind.HYBRID, policy))


async def observe(engine: Engine, name: str, *texts: str, level: AckLevel = AckLevel.STORED) -> None:
    await engine.observe_batch(NAMESPACE, name, "", 1, [observation(text) for text in texts], level)


async def recalled(engine: Engine, name: str, text: str) -> list[str]:
    answer = await engine.recall(NAMESPACE, name, Query(text=text))
    return [found.fragment.content for found in answer.recollections]


async def contents(engine: Engine, name: str) -> list[str]:
    return sorted(row.fragment.content for row in (await check(engine, name)).rows)


async def test_two_places_for_eight_memories_in_use_lose_and_double_nothing(
    tmp_path: Path,
) -> None:
    def said(name: str, producer: str, number: int) -> str:
        return f"{producer} says number {number} in {name}"

    async def speak(engine: Engine, name: str, producer: str) -> None:
        for number in range(1, ROUNDS + 1):
            item = observation(said(name, producer, number))
            await engine.observe_batch(NAMESPACE, name, producer, number, [item], AckLevel.STORED)

    async def ask(engine: Engine, name: str) -> None:
        for number in range(ROUNDS):
            assert all(name in content for content in await recalled(engine, name, f"what is number {number}?"))
            change = MemoryChange(policy=with_value(SMALL, "short_term.capacity", 2 + number % 3))
            await engine.memories.update(NAMESPACE, name, change)

    async with assembled(tmp_path, active_memories_max=2) as parts:
        for name in MEMORIES:
            await create(parts.engine, name)
        loads = counted(parts, "load_memory")
        speakers = [speak(parts.engine, name, producer) for name in MEMORIES for producer in ("left", "right")]
        await asyncio.gather(*speakers, *(ask(parts.engine, name) for name in MEMORIES))
        await parts.engine.settled()
        for name in MEMORIES:
            expected = [said(name, who, number) for who in ("left", "right") for number in range(1, ROUNDS + 1)]
            assert await contents(parts.engine, name) == sorted(expected)
        assert len(parts.engine._registry) <= 2
        assert len(loads) > 2 * len(MEMORIES)
        if not journals.DATABASE:  # there what is evicted is released, for other servers
            assert "own_memory" not in parts.journal.written, "whoever is alone has nothing to take"


async def test_an_evicted_memory_leaves_ram_without_the_collector(tmp_path: Path) -> None:
    async with assembled(tmp_path, active_memories_max=1) as parts:
        engine = parts.engine
        for name in ("one", "two"):
            await create(engine, name)
        session = await engine.open_observe(NAMESPACE, "one", "bo")
        await session.submit(1, [observation("Ada has a cat.")], AckLevel.STORED)
        session.close()
        del session
        await observe(engine, "one", "Bo has a dog.")
        assert len(await recalled(engine, "one", "who has a cat?")) == 2
        await engine.settled()
        (evicted,) = [weakref.ref(actor.working) for actor in engine._registry.actors()]
        gc.collect()
        gc.disable()
        try:
            assert await recalled(engine, "two", "anything") == []
            await until(lambda: is_free(evicted))
        finally:
            gc.enable()
        assert len(await recalled(engine, "one", "who has a cat?")) == 2


@pytest.mark.parametrize("how", ["deleted", "failed"])
async def test_a_memory_that_ends_leaves_ram_once_its_streams_have_ended(tmp_path: Path, how: str) -> None:
    async with assembled(tmp_path) as parts:
        engine = parts.engine
        await create(engine, "one")
        session = await engine.open_observe(NAMESPACE, "one", "bo")
        await session.submit(1, [observation("Ada has a cat.")], AckLevel.STORED)
        await engine.settled()
        (ended,) = [weakref.ref(actor.working) for actor in engine._registry.actors()]
        gc.collect()
        gc.disable()
        try:
            if how == "deleted":
                await engine.memories.delete(NAMESPACE, "one")
            else:
                engine._registry.reread(engine._registry.actors()[0].uid)
            with pytest.raises((MemoryNotFound, JournalUnavailable)):
                await session.reached(AckLevel.STORED, 2)
            await engine._registry.shrink()
            assert ended() is not None
            session.close()
            del session
            await engine._registry.shrink()
            await until(lambda: is_free(ended))
        finally:
            gc.enable()


async def is_free(reference: weakref.ref[Any]) -> bool:
    return reference() is None


@pytest.mark.parametrize("count", [70, FRAGMENTS_MAX + 80])
async def test_what_was_just_read_of_a_memory_is_not_asked_for_again(tmp_path: Path, count: int) -> None:
    async with assembled(tmp_path, active_memories_max=1) as parts:
        for name in MEMORIES[:2]:
            await create(parts.engine, name)
            await observe(parts.engine, name, *[f"otter number {number} of {name}" for number in range(count)])
        loads, reads = counted(parts, "load_memory"), counted(parts, "get_fragments")
        # What is older is read, and takes the place of the oldest that are there.
        older = count - FRAGMENTS_MAX + 20 if count > FRAGMENTS_MAX else 0
        for number in (count - 1, older + 10):
            wanted = f"otter number {number} of {MEMORIES[0]}"
            assert (await recalled(parts.engine, MEMORIES[0], wanted))[0] == wanted
        assert len(loads) == 1
        asked = {id_ for call in reads for id_ in call[1]}
        held = {row.fragment.id: row.fragment.content for row in (await check(parts.engine, MEMORIES[0])).rows}
        assert {held[id_] for id_ in asked} <= {f"otter number {number} of {MEMORIES[0]}" for number in range(older)}


async def test_a_memory_that_was_active_is_found_again_without_its_name_being_looked_up(tmp_path: Path) -> None:
    async with assembled(tmp_path, active_memories_max=1) as parts:
        for name in MEMORIES[:2]:
            await create(parts.engine, name)
            await observe(parts.engine, name, f"An otter lives in {name}.")
        loads, looks = counted(parts, "load_memory"), counted(parts, "get_memory")
        for _ in range(3):
            for name in MEMORIES[:2]:
                assert await recalled(parts.engine, name, "otter") == [f"An otter lives in {name}."]
        assert len(loads) == 6
        if not journals.DATABASE:  # there another server may have renamed or deleted it
            assert not looks


@pytest.mark.parametrize("fault", [None, Fault.LOST, Fault.DONE])
async def test_the_name_of_a_deleted_memory_is_another_memorys_at_once(tmp_path: Path, fault: Fault | None) -> None:
    async with assembled(tmp_path, active_memories_max=1) as parts:
        for name in MEMORIES[:2]:  # the first is evicted
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


async def test_a_memory_wanted_by_many_at_once_is_read_once(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        loads = counted(parts, "load_memory")
        await asyncio.gather(*(recalled(parts.engine, "joy", "anything") for _ in range(20)))
        assert len(loads) == 1


def counted(parts: Assembled, name: str, gate: asyncio.Event | None = None) -> list[Any]:
    """Calls of one of the journal's methods from now on; each answers when `gate` is set."""
    calls: list[Any] = []
    method = getattr(parts.journal, name)

    async def call(*arguments: Any) -> Any:
        calls.append(arguments)
        answer = await method(*arguments)
        if gate is not None:
            await gate.wait()
        return answer

    setattr(parts.journal, name, call)
    return calls


async def test_whoever_gives_up_an_activation_ends_it_for_nobody_else(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        gate = asyncio.Event()
        loads = counted(parts, "load_memory", gate)
        first, second = (asyncio.create_task(recalled(parts.engine, "joy", "anything")) for _ in range(2))
        await until(lambda: begun(loads))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        gate.set()
        assert await second == []
        assert len(loads) == 1


async def begun(calls: list[Any]) -> bool:
    return bool(calls)


class OtherModel(ScriptedEmbedder):
    """Another embedding space."""

    async def model(self) -> EmbeddingModel:
        return EmbeddingModel("other", 384)


async def test_data_of_another_model_is_refused_and_the_way_out_named(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        await observe(parts.engine, "joy", "the otter eats fish")
    with pytest.raises(ModelMismatch, match="memstream reindex"):
        async with assembled(tmp_path, models=Models(OtherModel())):
            pass


async def test_a_name_made_anew_is_another_memory_while_the_old_one_is_still_being_removed(tmp_path: Path) -> None:
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
        await observe(parts.engine, "joy", "a heron stands in the reeds")
        release()
        await deleting
        await observe(parts.engine, "joy", "badgers dig at night")
        assert await contents(parts.engine, "joy") == ["a heron stands in the reeds", "badgers dig at night"]


async def test_a_deletion_whose_caller_is_gone_ends_all_the_same(tmp_path: Path) -> None:
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
            return len(parts.engine._registry) == 0

        await until(left)


async def test_a_memory_deleted_while_it_is_activated_does_not_come_back(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        gate = asyncio.Event()
        loads = counted(parts, "load_memory", gate)
        reading = asyncio.create_task(recalled(parts.engine, "joy", "anything"))
        await until(lambda: begun(loads))
        await asyncio.sleep(0.05)  # the image is read, and waits
        await parts.engine.memories.delete(NAMESPACE, "joy")
        gate.set()
        with pytest.raises(MemoryNotFound):
            await reading
        assert len(parts.engine._registry) == 0


async def test_sessions_and_waiting_recalls_of_a_deleted_memory_are_told(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        session = await parts.engine.open_observe(NAMESPACE, "joy", "p")
        waiting = asyncio.create_task(
            parts.engine.recall(NAMESPACE, "joy", Query(text="anything", min_revision=100, wait_s=60))
        )
        reaching = asyncio.create_task(session.reached(AckLevel.STORED, 1))
        await asyncio.sleep(0.01)
        await parts.engine.memories.delete(NAMESPACE, "joy")
        for told in (waiting, reaching):
            with pytest.raises(MemoryNotFound):
                await told


async def test_a_watch_that_is_behind_is_told_of_the_end_of_its_memory(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        record = await parts.engine.memories.get(NAMESPACE, "joy")
        await parts.engine.memories.delete(NAMESPACE, "joy")
        async with contextlib.aclosing(parts.engine._watchers.watch(record, record.uid, 0, 0)) as steps:
            with pytest.raises(MemoryNotFound):
                await anext(steps)


async def test_a_watch_that_waits_is_told_of_the_end_of_its_memory_at_once(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        parts.engine._watchers.quiet_s = 3_600.0
        record = await parts.engine.memories.get(NAMESPACE, "joy")
        async with contextlib.aclosing(parts.engine.watch(NAMESPACE, "joy", "", record.revision, 0)) as steps:
            step = asyncio.ensure_future(anext(steps))
            await asyncio.sleep(0.05)
            await parts.engine.memories.delete(NAMESPACE, "joy")
            with pytest.raises(MemoryNotFound):
                await step


async def test_who_waits_for_a_revision_is_told_to_try_again_when_the_memory_is_read_anew(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        uid = (await parts.engine.memories.get(NAMESPACE, "joy")).uid
        query = Query(text="otter", min_revision=2, wait_s=60)
        await recalled(parts.engine, "joy", "otter")
        waiting = asyncio.create_task(parts.engine.recall(NAMESPACE, "joy", query))
        await asyncio.sleep(0.01)
        parts.engine._registry.reread(uid)
        with pytest.raises(JournalUnavailable) as refused:
            await waiting
        assert refused.value.retry_after_s
        again = asyncio.create_task(parts.engine.recall(NAMESPACE, "joy", query))
        await observe(parts.engine, "joy", "the otter eats fish")
        assert [found.fragment.content for found in (await again).recollections] == ["the otter eats fish"]


@journals.only_sqlite("taking a memory is a write of the journal that can be made to fail")
async def test_what_was_received_is_stored_after_failures_though_nobody_asks(tmp_path: Path) -> None:
    embedder = ScriptedEmbedder()
    async with assembled(tmp_path, models=Models(embedder)) as parts:
        await create(parts.engine, "joy", with_value(SMALL, "wait_for_models", True))
        uid = (await parts.engine.memories.get(NAMESPACE, "joy")).uid
        embedder.fail(times=1_000_000)
        await observe(parts.engine, "joy", "the otter eats fish", level=AckLevel.RECEIVED)

        for _ in range(3):  # and when it is read again that fails, too
            await until(lambda: active(parts, uid))
            parts.journal.fail_at(1, Fault.LOST)
            parts.engine._registry.reread(uid)
            await until(lambda: failed(parts))
        embedder.heal()

        async def stored() -> bool:
            return (await parts.engine.memories.statistics(NAMESPACE, "joy")).counts.pending == 0

        await until(stored)
        assert await contents(parts.engine, "joy") == ["the otter eats fish"]


@journals.only_sqlite("taking a memory is a write of the journal that can be made to fail")
@pytest.mark.parametrize("fault", [Fault.FULL, Fault.LOST, Fault.DONE])
async def test_a_memory_is_read_again_though_taking_it_fails(tmp_path: Path, fault: Fault) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        await observe(parts.engine, "joy", "the otter eats fish")
        uid = (await parts.engine.memories.get(NAMESPACE, "joy")).uid
        parts.journal.fail_at(1, fault, "own_memory")
        parts.engine._registry.reread(uid)
        await until(lambda: failed(parts))
        await until(lambda: active(parts, uid))
        await observe(parts.engine, "joy", "badgers dig")
        assert await contents(parts.engine, "joy") == ["badgers dig", "the otter eats fish"]
        await check(parts.engine, "joy")


@journals.only_sqlite("on a database another port takes: tests/toolchains/test_ownership.py")
async def test_what_an_ended_actor_still_writes_is_refused_once_the_memory_was_read_again(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        await observe(parts.engine, "joy", "the otter eats fish")
        uid = (await parts.engine.memories.get(NAMESPACE, "joy")).uid
        first = (await parts.engine._journal.load_memory(uid, parts.engine.info().embedding.name, 0)).record.epoch
        let_go = parts.journal.hold("receive")
        late = asyncio.create_task(observe(parts.engine, "joy", "a late lynx", level=AckLevel.RECEIVED))
        await until(lambda: written(parts, "receive"))
        parts.engine._registry.reread(uid)
        await until(lambda: active(parts, uid))
        assert (await parts.engine.memories.get(NAMESPACE, "joy")).epoch == first + 1
        let_go()
        with pytest.raises(EngineError):
            await late
        await observe(parts.engine, "joy", "badgers dig")
        assert await contents(parts.engine, "joy") == ["badgers dig", "the otter eats fish"]
        await check(parts.engine, "joy")


async def written(parts: Assembled, name: str) -> bool:
    return name in parts.journal.written


async def active(parts: Assembled, uid: str) -> bool:
    return parts.engine._registry.peek(uid) is not None


async def failed(parts: Assembled) -> bool:
    return bool(parts.journal.failed)


async def test_an_engine_that_stops_while_a_model_is_waited_for_keeps_what_it_received(tmp_path: Path) -> None:
    embedder = ScriptedEmbedder()
    embedder.fail(times=1_000_000)
    async with assembled(tmp_path, models=Models(embedder)) as parts:
        await create(parts.engine, "joy", with_value(SMALL, "wait_for_models", True))
        await observe(parts.engine, "joy", "the otter eats fish", "badgers dig", level=AckLevel.RECEIVED)
    async with assembled(tmp_path) as parts:

        async def stored() -> bool:
            return (await parts.engine.memories.statistics(NAMESPACE, "joy")).counts.pending == 0

        await until(stored)
        assert await contents(parts.engine, "joy") == ["badgers dig", "the otter eats fish"]


async def test_accesses_of_several_memories_are_written_though_one_is_gone(tmp_path: Path) -> None:
    async with assembled(tmp_path, access_flush_interval_s=3_600.0) as parts:
        for name in MEMORIES:
            await create(parts.engine, name)
            await observe(parts.engine, name, f"hello {name}")
        for name in MEMORIES:
            assert await recalled(parts.engine, name, "hello")
        await parts.engine.settled()
        await parts.engine.memories.delete(NAMESPACE, MEMORIES[3])
        await parts.engine._reinforcement._write_accesses()  # what the background does every few seconds
        for name in MEMORIES[:3] + MEMORIES[4:]:
            (row,) = (await check(parts.engine, name)).rows
            assert row.fragment.access_count == 1


async def test_only_memories_that_were_used_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with assembled(tmp_path) as parts:
        registry = parts.engine._registry
        for name in MEMORIES:
            await create(parts.engine, name)
            await observe(parts.engine, name, "hello")
        for _ in range(2):  # what was in use the first time is looked at once more
            await registry.shrink()
        measured: list[str] = []
        size = WorkingSet.size_bytes.fget
        assert size is not None

        def seen(working: WorkingSet) -> int:
            measured.append(working.record.name)
            return int(size(working))

        monkeypatch.setattr(WorkingSet, "size_bytes", property(seen))
        before = parts.engine.held().size_bytes
        await observe(parts.engine, MEMORIES[3], *(f"{number} {'x' * 1_000}" for number in range(20)))
        for _ in range(2):
            await registry.shrink()
        assert set(measured) == {MEMORIES[3]}
        assert parts.engine.held().size_bytes > before + 20_000
