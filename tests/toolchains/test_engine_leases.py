"""Engines on one PostgreSQL database: what a lease allows, and which engine runs operations and writes the index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from memstream_server.adapters.journal.store import SqlJournal, open_journal
from memstream_server.adapters.models.hashing import computed_spaces
from memstream_server.app.dependencies import engine_parts
from memstream_server.app.models import Models
from memstream_server.app.running import record_space
from memstream_server.core.policy import Policy
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import EngineError, LeaseLost, OwnedElsewhere
from memstream_server.engine.requests import AckLevel, NewMemory, NewObservation, Query
from memstream_server.engine.runtime.clock import Clock
from memstream_server.observability import Metrics
from memstream_server.ports.operations import Operation, OperationState
from memstream_server.settings import Settings
from tests.engine.engine_parts import PartsEngine
from tests.support.memory_index import MemoryIndex
from tests.support.scripted_models import ScriptedEmbedder
from tests.support.waiting import until
from tests.toolchains.postgres import Cluster

pytestmark = pytest.mark.toolchain

LEASE_S = 600.0


@pytest.fixture
def url(postgres: Cluster) -> str:
    return postgres.database()


class ManualTime:
    """A clock whose monotonic time only the test advances."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.clock = Clock(monotonic_s=lambda: self.ahead_s)


class SlowEmbedder(ScriptedEmbedder):
    """Advances the clock while it embeds."""

    def __init__(self, manual: ManualTime) -> None:
        super().__init__()
        self._manual = manual
        self.delay_s = 0.0

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        self._manual.ahead_s, self.delay_s = self._manual.ahead_s + self.delay_s, 0.0
        return await super().embed(texts)


@asynccontextmanager
async def engine_on(
    url: str, manual: ManualTime, embedder: ScriptedEmbedder, index: MemoryIndex, **settings: Any
) -> AsyncIterator[PartsEngine]:
    """One of several engines on a database, built as the server does it."""
    chosen = Settings(lease_s=LEASE_S, lease_renew_s=0.1, index_flush_interval_s=0.05, **settings)
    shared = {"shared": True, "lease_s": LEASE_S}
    clock_us, computed = manual.clock.now_us, computed_spaces()
    journal = await open_journal(Path("/nonexistent"), url=url, clock_us=clock_us, computed=computed, **shared)
    models = Models(embedder)
    space, embedding = await record_space(journal, embedder, chosen)
    parts = engine_parts(chosen, journal, index, models, embedding, Metrics(), manual.clock)
    engine = PartsEngine(parts, space)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        await journal.close()


async def observe(engine: PartsEngine, name: str, content: str) -> None:
    item = NewObservation(content=content, digest=content.encode().ljust(16)[:16])
    await engine.observe_batch("comedy", name, "", 1, [item], AckLevel.STORED)


async def recall_contents(engine: PartsEngine, name: str, text: str) -> set[str]:
    answer = await engine.recall("comedy", name, Query(text=text, reinforce=False))
    return {one.fragment.content for one in answer.recollections}


def new_memory(name: str) -> NewMemory:
    return NewMemory("comedy", name, MemoryKind.LONG_TERM, Policy())


async def test_nothing_is_served_from_ram_after_the_lease_expired(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manual, index = ManualTime(), MemoryIndex()
    embedder = SlowEmbedder(manual)
    lost: list[float] = []
    async with engine_on(url, manual, embedder, index) as engine:
        engine.ownership.on_loss(lambda: lost.append(manual.ahead_s))
        await engine.memories.create(new_memory("joy"))
        await observe(engine, "joy", "words")
        assert await recall_contents(engine, "joy", "words") == {"words"}
        processes, allowed = engine.storage.processes, asyncio.Event()
        assert processes is not None
        renew = processes.renew

        async def renew_when_allowed(*given: Any) -> Any:
            await allowed.wait()
            return await renew(*given)

        # A renewal between the two times would extend the lease.
        monkeypatch.setattr(processes, "renew", renew_when_allowed)
        manual.ahead_s += LEASE_S * 0.89
        assert await recall_contents(engine, "joy", "words") == {"words"}, "before the margin"
        manual.ahead_s += LEASE_S * 0.02
        with pytest.raises(LeaseLost):
            await recall_contents(engine, "joy", "words")
        allowed.set()
        assert (await engine.memories.get("comedy", "joy")).name == "joy", "answers from the journal need no lease"
        await until(lambda: _can_recall(engine))
        assert len(lost) == 1
        embedder.delay_s = LEASE_S
        with pytest.raises(LeaseLost):  # it expired while the answer was computed
            await recall_contents(engine, "joy", "words")
        await until(lambda: _can_recall(engine))
        assert (await engine.memories.get("comedy", "joy")).epoch == 3


async def _can_recall(engine: PartsEngine) -> bool:
    try:
        return await recall_contents(engine, "joy", "words") == {"words"}
    except EngineError:
        return False


async def test_only_memories_evicted_from_ram_can_be_taken(url: str) -> None:
    manual, index = ManualTime(), MemoryIndex()
    async with (
        engine_on(url, manual, ScriptedEmbedder(), index, active_memories_max=1) as one,
        engine_on(url, manual, ScriptedEmbedder(), index) as two,
    ):
        for name in ("a", "b"):
            await one.memories.create(new_memory(name))
            await observe(one, name, f"words of {name}")
        with pytest.raises(OwnedElsewhere):
            await observe(two, "b", "mine")
        await until(lambda: _can_observe(two, "a"))
        assert await recall_contents(two, "a", "words") == {"words of a", "words of two"}
        with pytest.raises(OwnedElsewhere):
            await recall_contents(one, "a", "words")


async def _can_observe(engine: PartsEngine, name: str) -> bool:
    try:
        await observe(engine, name, "words of two")
    except OwnedElsewhere:
        return False
    return True


@pytest.mark.parametrize("write", ["create", "claim", "save"])
async def test_an_operation_with_an_unanswered_commit_is_done(
    url: str, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease and its claims end with the session: no operation stays claimed but not done."""
    async with engine_on(url, ManualTime(), ScriptedEmbedder(), MemoryIndex()) as engine:
        await until(lambda: _is_leader(engine))
        assert isinstance(engine.journal, SqlJournal)
        number, database, store = engine.ownership.number, engine.journal._database, engine.storage.operations
        commit, written, cut = database.commit, getattr(store, write), [True]
        writing: list[bool] = []

        async def armed(*given: Any) -> Any:
            writing.append(True)
            return await written(*given)

        def unanswered(connection: Any) -> None:
            commit(connection)
            if writing and cut:
                cut.clear()
                raise OSError("scripted: the connection is gone")

        monkeypatch.setattr(store, write, armed)
        monkeypatch.setattr(database, "commit", unanswered)
        asked = Operation(engine.runtime.ids.next_id(), "reindex", "", "", '{"embed": false}')
        if write == "claim":
            await store.create(asked)
        else:
            asked = await engine.reindexing.start(embed=False)
        async with asyncio.timeout(60):
            assert (await engine.operations.wait_for_end(asked.id)).state is OperationState.SUCCEEDED
        assert not cut
        assert engine.ownership.number != number


async def test_one_engine_writes_the_index_and_the_others_follow(url: str) -> None:
    """Without vectors in RAM the overlay drops what another process has written to the index."""
    manual, index = ManualTime(), MemoryIndex()
    async with (
        engine_on(url, manual, ScriptedEmbedder(), index, dense_bytes_max=0, index_overlay_s=0.0) as one,
        engine_on(url, manual, ScriptedEmbedder(), index, dense_bytes_max=0, index_overlay_s=0.0) as two,
    ):
        await until(lambda: _is_leader(one))
        await two.memories.create(new_memory("joy"))
        session = await two.open_observe("comedy", "joy", "p")
        items = [NewObservation(content=f"words {n}", digest=bytes([n] * 16)) for n in range(20)]
        await session.submit(1, items)
        await asyncio.wait_for(session.wait_for_level(AckLevel.INDEXED, 20), 60)
        session.close()
        uid = (await two.memories.get("comedy", "joy")).uid
        assert await index.count(uid) == 20
        actor = two.actors.peek(uid)
        assert actor is not None
        await until(lambda: _is_indexed(actor))
        assert not two.ownership.leads


async def _is_leader(engine: PartsEngine) -> bool:
    return engine.ownership.leads


async def _is_indexed(actor: Any) -> bool:
    return not actor.working.fresh
