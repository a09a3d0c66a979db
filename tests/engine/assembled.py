"""Builds an engine for a test: any index and models, a journal behind a `FaultyJournal`, short pauses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from memstream_server.adapters.journal.store import SqlJournal
from memstream_server.app.dependencies import engine_parts
from memstream_server.app.models import Models, record_models
from memstream_server.app.running import open_images, record_space
from memstream_server.core.events import Event
from memstream_server.core.replay_events import fold_all, place_of
from memstream_server.core.values import State, Vector
from memstream_server.engine.background import indexer, jobs
from memstream_server.engine.errors import EngineError, MemoryNotFound
from memstream_server.engine.memory import actor
from memstream_server.engine.memory.actor import Actor
from memstream_server.engine.runtime import registry
from memstream_server.engine.runtime.clock import Clock
from memstream_server.observability import Metrics
from memstream_server.ports.journal.reading import LoadedMemory
from memstream_server.ports.journal.records import MemoryRecord, Recorded
from memstream_server.settings import Settings
from tests.engine.engine_parts import PartsEngine
from tests.support import journals
from tests.support.faulty_journal import FaultyJournal
from tests.support.memory_index import MemoryIndex
from tests.support.scripted_models import ScriptedEmbedder
from tests.support.waiting import until

NAMESPACE = "test"


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """The engine with its stores."""

    engine: PartsEngine
    journal: FaultyJournal
    """What the engine calls."""
    stored: SqlJournal
    """The journal behind it, which never fails."""
    index: MemoryIndex
    metrics: Metrics

    @property
    def actors(self) -> registry.Registry:
        """The actors of all active memories."""
        return self.engine.actors


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the retry pauses."""
    for module, name in (
        (actor, "STORAGE_RETRY_S"),
        (registry, "REVIVE_PAUSE_S"),
        (registry, "REVIVE_PAUSE_MAX_S"),
        (jobs, "RETRY_S"),
        (indexer, "RETRY_S"),
        (indexer, "RETRY_MAX_S"),
    ):
        monkeypatch.setattr(module, name, 0.01)


@asynccontextmanager
async def assembled(
    data_dir: Path,
    *,
    models: Models | None = None,
    index: MemoryIndex | None = None,
    clock: Clock | None = None,
    own_journal: SqlJournal | None = None,
    **settings: object,
) -> AsyncIterator[Assembled]:
    """Run an engine on `data_dir`. Passing an earlier MemoryIndex simulates an index that outlived its process.

    own_journal: its journal, by default that of `data_dir`; the engine closes it.
    """
    values = {"index_flush_interval_s": 0.05, "access_flush_interval_s": 0.05} | settings
    chosen = Settings(data_dir=data_dir, **values)  # type: ignore[arg-type]  # pydantic checks
    now = clock or Clock()
    used, vectors = models or Models(ScriptedEmbedder()), index or MemoryIndex()
    stored = own_journal or await journals.open_test_journal(data_dir, now.now_us)
    journal = FaultyJournal(stored)
    space, embedding = await record_space(stored, used.embedder, chosen)
    metrics = Metrics()
    parts = engine_parts(chosen, stored, vectors, record_models(used, embedding, metrics), embedding, metrics, now)
    async with open_images(chosen, metrics) as images:
        engine = PartsEngine(replace(parts, storage=replace(parts.storage, journal=journal, images=images)), space)
        await engine.start()
        try:
            yield Assembled(engine, journal, stored, vectors, metrics)
        finally:
            journal.disarm()
            vectors.disarm()
            await engine.stop()
            await stored.close()


# ---- invariants


async def image_of(engine: PartsEngine, name: str) -> LoadedMemory:
    """The image that a restart would load."""
    record = await engine.memories.get(NAMESPACE, name)
    return await engine.journal.load_memory(record.uid, engine.info().embedding.name, 1_000_000)


async def events_of(engine: PartsEngine, uid: str) -> list[Event]:
    """All events of a memory; checks that its revisions are contiguous."""
    recorded: list[Recorded] = []
    while page := await engine.journal.list_events(uid, len(recorded), 100_000):
        recorded += page
    assert [one.revision for one in recorded] == list(range(1, len(recorded) + 1))
    return [event for one in recorded for event in one.events]


async def check(engine: PartsEngine, name: str) -> LoadedMemory:
    """Check that journal, RAM and events of a memory agree; returns the journal's image.

    Reads in the memory's order, because background tasks may commit at any other time.
    """
    looks: list[tuple[LoadedMemory, MemoryRecord, State, set[str], list[Event], dict[str, Vector]]] = []

    async def look(now: Actor) -> None:
        image, working = await image_of(engine, name), now.working
        events = await events_of(engine, image.record.uid)
        ids = list(working.columns.live_ids())
        looks.append((image, working.record, working.state, set(ids), events, working.get_vectors(ids)))

    async with engine.actors.use(NAMESPACE, name) as active:
        await active.run(look)
    image, record, state, ids, events, vectors = looks[0]
    stored_vectors = {row.fragment.id: row.vector for row in image.rows}
    assert {id_: vector.tobytes() for id_, vector in vectors.items()} == {id_: stored_vectors[id_] for id_ in vectors}
    assert image.record.revision == record.revision
    assert image.record.reflection_aggregate == pytest.approx(record.reflection_aggregate)
    for stored, held in ((image.sensory, state.sensory), (image.short_term, state.short_term)):
        ordered = sorted(stored, key=lambda one: one.fragment.last_position)
        assert [(one.fragment.id, one.enhancements) for one in ordered] == [
            (one.fragment.id, one.enhancements) for one in held
        ]
        for one, other in zip(ordered, held, strict=True):
            np.testing.assert_array_equal(one.vector, other.vector)  # to the last bit
    assert {row.fragment.id for row in image.rows} == ids
    positions = [row.fragment.position for row in image.rows]
    assert len(set(positions)) == len(positions)
    assert image.next_position > max(positions, default=-1)
    enhancements = {held.fragment.id: held.enhancements for held in (*image.sensory, *image.short_term)}
    listed = {row.fragment.id: place_of(row.fragment, enhancements.get(row.fragment.id, ())) for row in image.rows}
    assert fold_all(events) == listed
    return image


async def check_index(parts: Assembled, name: str) -> None:
    """Wait until the index is complete and the outbox is empty."""
    uid = (await parts.engine.memories.get(NAMESPACE, name)).uid

    async def settled() -> bool:  # a search that finds the index lost empties it after the outbox
        indexable = set(await parts.journal.list_indexable(uid))
        return await parts.journal.outbox_size() == 0 and parts.index.list_stored(uid) == indexable

    await until(settled)


async def gone(engine: PartsEngine, name: str) -> bool:
    """Whether the memory does not exist."""
    try:
        await engine.memories.get(NAMESPACE, name)
    except MemoryNotFound:
        return True
    return False


def passing(error: EngineError) -> bool:
    """Whether a client should retry."""
    return error.retry_after_s is not None
