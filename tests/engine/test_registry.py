"""Active memories: loaded once, evicted only when idle, loaded again after a failure."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from memstream_server.app.models import Models
from memstream_server.core.policy import DEFAULT, Policy, with_value
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import EngineError, JournalUnavailable, MemoryNotFound, ModelMismatch
from memstream_server.engine.memory.actor import Actor
from memstream_server.engine.memory.working_set import LATEST_MAX, WorkingSet
from memstream_server.engine.requests import AckLevel, MemoryChange, NewMemory, Query
from memstream_server.ports.models import EmbeddingModel
from tests.engine.assembled import NAMESPACE, Assembled, assembled, check, hasty
from tests.engine.engine_parts import PartsEngine
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


async def create(engine: PartsEngine, name: str, policy: Policy = SMALL) -> None:
    await engine.memories.create(NewMemory(NAMESPACE, name, MemoryKind.HYBRID, policy))


async def observe(engine: PartsEngine, name: str, *texts: str, level: AckLevel = AckLevel.STORED) -> None:
    await engine.observe_batch(NAMESPACE, name, "", 1, [observation(text) for text in texts], level)


async def recalled(engine: PartsEngine, name: str, text: str) -> list[str]:
    answer = await engine.recall(NAMESPACE, name, Query(text=text))
    return [found.fragment.content for found in answer.recollections]


async def contents(engine: PartsEngine, name: str) -> list[str]:
    return sorted(row.fragment.content for row in (await check(engine, name)).rows)


async def test_evicting_memories_in_use_loses_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    def said(name: str, producer: str, number: int) -> str:
        return f"{producer} says number {number} in {name}"

    async def speak(engine: PartsEngine, name: str, producer: str) -> None:
        for number in range(1, ROUNDS + 1):
            item = observation(said(name, producer, number))
            await engine.observe_batch(NAMESPACE, name, producer, number, [item], AckLevel.STORED)

    async def ask(engine: PartsEngine, name: str) -> None:
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
        await parts.engine.wait_for_reinforcement()
        for name in MEMORIES:
            expected = [said(name, who, number) for who in ("left", "right") for number in range(1, ROUNDS + 1)]
            assert await contents(parts.engine, name) == sorted(expected)
        assert len(parts.actors) <= 2
        assert len(loads) > len(MEMORIES)
        if not journals.DATABASE:  # with a shared journal an evicted memory is released to other servers
            assert "own_memory" not in parts.journal.written, "a process alone takes no memory"


async def test_evicted_memory_leaves_ram_without_the_gc(tmp_path: Path) -> None:
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
        await engine.wait_for_reinforcement()
        (evicted,) = [weakref.ref(actor.working) for actor in engine.actors.list_actors()]
        gc.collect()
        gc.disable()
        try:
            assert await recalled(engine, "two", "anything") == []
            await until(lambda: is_free(evicted))
        finally:
            gc.enable()
        assert len(await recalled(engine, "one", "who has a cat?")) == 2


@pytest.mark.parametrize("how", ["deleted", "failed"])
async def test_ended_actor_leaves_ram_after_its_streams(tmp_path: Path, how: str) -> None:
    async with assembled(tmp_path) as parts:
        engine = parts.engine
        await create(engine, "one")
        session = await engine.open_observe(NAMESPACE, "one", "bo")
        await session.submit(1, [observation("Ada has a cat.")], AckLevel.STORED)
        await engine.wait_for_reinforcement()
        (ended,) = [weakref.ref(actor.working) for actor in engine.actors.list_actors()]
        gc.collect()
        gc.disable()
        try:
            if how == "deleted":
                await engine.memories.delete(NAMESPACE, "one")
            else:
                engine.actors.reread_memory(engine.actors.list_actors()[0].uid)
            with pytest.raises((MemoryNotFound, JournalUnavailable)):
                await session.wait_for_level(AckLevel.STORED, 2)
            await engine.actors.enforce_bounds()
            assert ended() is not None
            session.close()
            del session
            await engine.actors.enforce_bounds()
            await until(lambda: is_free(ended))
        finally:
            gc.enable()


async def is_free(reference: weakref.ref[Any]) -> bool:
    return reference() is None


@pytest.mark.parametrize("count", [70, LATEST_MAX + 80])
async def test_loaded_fragments_are_not_read_again(tmp_path: Path, count: int) -> None:
    # without images, which have no content
    async with assembled(tmp_path, active_memories_max=1, images_bytes_max=0) as parts:
        for name in MEMORIES[:2]:
            await create(parts.engine, name)
            await observe(parts.engine, name, *[f"otter number {number} of {name}" for number in range(count)])
        loads, reads = counted(parts, "load_memory"), counted(parts, "get_fragments")
        older = max(0, count - LATEST_MAX)
        for number in (count - 1, older + 10):
            wanted = f"otter number {number} of {MEMORIES[0]}"
            assert (await recalled(parts.engine, MEMORIES[0], wanted))[0] == wanted
        assert len(loads) == 1
        asked = {id_ for call in reads for id_ in call[1]}
        held = {row.fragment.id: row.fragment.content for row in (await check(parts.engine, MEMORIES[0])).rows}
        assert {held[id_] for id_ in asked} <= {f"otter number {number} of {MEMORIES[0]}" for number in range(older)}


async def test_reactivation_needs_no_lookup_by_name(tmp_path: Path) -> None:
    async with assembled(tmp_path, active_memories_max=1) as parts:
        for name in MEMORIES[:2]:
            await create(parts.engine, name)
            await observe(parts.engine, name, f"An otter lives in {name}.")
        loads, looks = counted(parts, "load_memory"), counted(parts, "get_memory")
        for _ in range(3):
            for name in MEMORIES[:2]:
                assert await recalled(parts.engine, name, "otter") == [f"An otter lives in {name}."]
        assert len(loads) == 6
        if not journals.DATABASE:  # with a shared journal another server may have renamed or deleted it
            assert not looks


async def test_concurrent_activations_load_a_memory_once(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        parts.actors._created.clear()  # as after a restart
        loads = counted(parts, "load_memory")
        await asyncio.gather(*(recalled(parts.engine, "joy", "anything") for _ in range(20)))
        assert len(loads) == 1


def counted(parts: Assembled, name: str, gate: asyncio.Event | None = None) -> list[Any]:
    """The calls of one journal method from now on; each returns when `gate` is set."""
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


async def test_cancelled_caller_does_not_end_a_shared_activation(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        parts.actors._created.clear()  # as after a restart
        gate = asyncio.Event()
        loads = counted(parts, "load_memory", gate)
        first, second = (asyncio.create_task(recalled(parts.engine, "joy", "anything")) for _ in range(2))
        await until(lambda: begun(loads))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        gate.set()
        assert await second == []
        assert len(loads) == 1


async def test_recall_embeds_no_promoted_content_again(tmp_path: Path) -> None:
    embedder = ScriptedEmbedder()
    async with assembled(tmp_path, models=Models(embedder)) as parts:
        await create(parts.engine, "joy")
        texts = [f"otter {name} eats fish" for name in ("Ann", "Bob", "Cleo", "Dan", "Eve", "Fay", "Gus", "Hal")]
        for text in texts:
            await observe(parts.engine, "joy", text)
        embedder.texts.clear()
        found = await recalled(parts.engine, "joy", "otter fish")
        await parts.engine.wait_for_reinforcement()
        held = parts.actors.list_actors()[0].working.held_ids()
        promoted = [
            row.fragment.content for row in (await check(parts.engine, "joy")).rows if row.fragment.id not in held
        ]
        assert set(promoted) & set(found)
        assert embedder.texts == ["otter fish"]


async def begun(calls: list[Any]) -> bool:
    return bool(calls)


class OtherModel(ScriptedEmbedder):
    """A model with another embedding space."""

    async def model(self) -> EmbeddingModel:
        return EmbeddingModel("other", 384)


async def test_data_of_another_model_is_refused_with_a_solution(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        await observe(parts.engine, "joy", "the otter eats fish")
    with pytest.raises(ModelMismatch, match="memstream reindex"):
        async with assembled(tmp_path, models=Models(OtherModel())):
            pass


async def test_reload_fails_waits_for_a_revision_with_a_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, wait_for_revision = asyncio.Event(), Actor.wait_for_revision

    async def wait(actor: Actor, revision: int) -> None:
        begun.set()
        await wait_for_revision(actor, revision)

    monkeypatch.setattr(Actor, "wait_for_revision", wait)
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        uid = (await parts.engine.memories.get(NAMESPACE, "joy")).uid
        query = Query(text="otter", min_revision=2, wait_s=60)
        await recalled(parts.engine, "joy", "otter")
        waiting = asyncio.create_task(parts.engine.recall(NAMESPACE, "joy", query))
        await begun.wait()
        parts.actors.reread_memory(uid)
        with pytest.raises(JournalUnavailable) as refused:
            await waiting
        assert refused.value.retry_after_s
        again = asyncio.create_task(parts.engine.recall(NAMESPACE, "joy", query))
        await observe(parts.engine, "joy", "the otter eats fish")
        assert [found.fragment.content for found in (await again).recollections] == ["the otter eats fish"]


@journals.only_sqlite("taking a memory is a write of the journal that can be made to fail")
async def test_received_batches_are_stored_after_failures_unasked(tmp_path: Path) -> None:
    embedder = ScriptedEmbedder()
    async with assembled(tmp_path, models=Models(embedder)) as parts:
        await create(parts.engine, "joy", with_value(SMALL, "wait_for_models", True))
        uid = (await parts.engine.memories.get(NAMESPACE, "joy")).uid
        embedder.fail(times=1_000_000)
        await observe(parts.engine, "joy", "the otter eats fish", level=AckLevel.RECEIVED)

        for _ in range(3):  # the reload after it fails too
            await until(lambda: active(parts, uid))
            parts.journal.fail_at(1, Fault.LOST)
            parts.actors.reread_memory(uid)
            await until(lambda: failed(parts))
        embedder.heal()

        async def stored() -> bool:
            return (await parts.engine.memories.get_statistics(NAMESPACE, "joy")).counts.pending == 0

        await until(stored)
        assert await contents(parts.engine, "joy") == ["the otter eats fish"]


@journals.only_sqlite("taking a memory is a write of the journal that can be made to fail")
@pytest.mark.parametrize("fault", [Fault.FULL, Fault.LOST, Fault.DONE])
async def test_memory_is_reloaded_after_failures_to_take_it(tmp_path: Path, fault: Fault) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        await observe(parts.engine, "joy", "the otter eats fish")
        uid = (await parts.engine.memories.get(NAMESPACE, "joy")).uid
        parts.journal.fail_at(1, fault, "own_memory")
        parts.actors.reread_memory(uid)
        await until(lambda: failed(parts))
        await until(lambda: active(parts, uid))
        await observe(parts.engine, "joy", "badgers dig")
        assert await contents(parts.engine, "joy") == ["badgers dig", "the otter eats fish"]
        await check(parts.engine, "joy")


@journals.only_sqlite("on a database another port takes: tests/toolchains/test_ownership.py")
async def test_late_write_of_a_failed_actor_is_refused_after_reload(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, "joy")
        await observe(parts.engine, "joy", "the otter eats fish")
        uid = (await parts.engine.memories.get(NAMESPACE, "joy")).uid
        first = (await parts.journal.load_memory(uid, parts.engine.info().embedding.name, 0)).record.epoch
        let_go = parts.journal.hold("receive")
        late = asyncio.create_task(observe(parts.engine, "joy", "a late lynx", level=AckLevel.RECEIVED))
        await until(lambda: written(parts, "receive"))
        parts.actors.reread_memory(uid)
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
    return parts.actors.peek(uid) is not None


async def failed(parts: Assembled) -> bool:
    return bool(parts.journal.failed)


async def test_stop_while_a_model_is_down_keeps_received_batches(tmp_path: Path) -> None:
    embedder = ScriptedEmbedder()
    embedder.fail(times=1_000_000)
    async with assembled(tmp_path, models=Models(embedder)) as parts:
        await create(parts.engine, "joy", with_value(SMALL, "wait_for_models", True))
        await observe(parts.engine, "joy", "the otter eats fish", "badgers dig", level=AckLevel.RECEIVED)
    async with assembled(tmp_path) as parts:

        async def stored() -> bool:
            return (await parts.engine.memories.get_statistics(NAMESPACE, "joy")).counts.pending == 0

        await until(stored)
        assert await contents(parts.engine, "joy") == ["badgers dig", "the otter eats fish"]


async def test_accesses_are_written_even_if_one_memory_is_deleted(tmp_path: Path) -> None:
    async with assembled(tmp_path, access_flush_interval_s=3_600.0) as parts:
        for name in MEMORIES:
            await create(parts.engine, name)
            await observe(parts.engine, name, f"hello {name}")
        for name in MEMORIES:
            assert await recalled(parts.engine, name, "hello")
        await parts.engine.wait_for_reinforcement()
        await parts.engine.memories.delete(NAMESPACE, MEMORIES[3])
        await parts.engine.write_accesses()  # the background task does it every few seconds
        for name in MEMORIES[:3] + MEMORIES[4:]:
            (row,) = (await check(parts.engine, name)).rows
            assert row.fragment.access_count == 1


async def test_only_used_memories_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with assembled(tmp_path) as parts:
        registry = parts.actors
        for name in MEMORIES:
            await create(parts.engine, name)
            await observe(parts.engine, name, "hello")
        for _ in range(2):  # those in use during the first pass are measured once more
            await registry.enforce_bounds()
        measured: list[str] = []
        size = WorkingSet.size_bytes.fget
        assert size is not None

        def seen(working: WorkingSet) -> int:
            measured.append(working.record.name)
            return int(size(working))

        monkeypatch.setattr(WorkingSet, "size_bytes", property(seen))
        before = parts.engine.memory_stats().size_bytes
        await observe(parts.engine, MEMORIES[3], *(f"{number} {'x' * 1_000}" for number in range(20)))
        for _ in range(2):
            await registry.enforce_bounds()
        assert set(measured) == {MEMORIES[3]}
        assert parts.engine.memory_stats().size_bytes > before + 20_000


async def test_measuring_and_evicting_apply_no_waiting_rows(tmp_path: Path) -> None:
    async with assembled(tmp_path, active_memories_max=1, maintenance_interval_s=86_400) as parts:
        registry = parts.actors

        async def is_evicted() -> bool:
            return actor not in registry.list_actors()

        await create(parts.engine, "one")
        await observe(parts.engine, "one", "hello", "It rains.")
        (actor,) = registry.list_actors()
        waiting = actor.working.pending_rows
        assert waiting > 0
        await registry.enforce_bounds()
        await create(parts.engine, "two")
        await observe(parts.engine, "two", "hello")
        await until(is_evicted)
        assert actor.working.pending_rows == waiting
        assert actor.working.fragment_count == len(actor.working.columns) == 2
        assert (await recalled(parts.engine, "one", "rain"))[0] == "It rains."
