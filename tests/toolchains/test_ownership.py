"""Who owns a memory, on PostgreSQL: what is taken, what is refused, and when a lease counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
import pytest

from memstream_server.adapters.journal import SqlJournal, open_journal
from memstream_server.adapters.journal.database.postgres import LEADING, process_lock_key
from memstream_server.adapters.journal.processes import SqlProcesses
from memstream_server.app.dependencies import engine_parts
from memstream_server.app.models import Models
from memstream_server.app.opening import record_space
from memstream_server.core.policy import Policy
from memstream_server.core.values import MemoryKind
from memstream_server.engine.engine import Engine
from memstream_server.engine.errors import EngineError, LeaseLost, OwnedElsewhere
from memstream_server.engine.requests import AckLevel, NewMemory, NewObservation, Query
from memstream_server.engine.runtime.clock import Clock
from memstream_server.observability import Metrics
from memstream_server.ports.journal.errors import Conflict, OutcomeUnknown, Unreadable
from memstream_server.ports.journal.writing import Access, Accesses
from memstream_server.ports.operations import Operation, OperationState
from memstream_server.ports.processes import Owner
from memstream_server.settings import Settings
from tests.journal.samples import MODEL, Now, receipt, record, transition
from tests.support.memory_index import MemoryIndex
from tests.support.scripted_models import ScriptedEmbedder
from tests.support.waiting import until
from tests.toolchains.postgres import Cluster

pytestmark = pytest.mark.toolchain

LEASE_S = 600.0


@pytest.fixture
def url(postgres: Cluster) -> str:
    return postgres.database()


@dataclass(frozen=True, slots=True)
class Server:
    """A journal of one process."""

    journal: SqlJournal
    processes: SqlProcesses
    number: int


@asynccontextmanager
async def joined(url: str, count: int, lease_s: float = LEASE_S) -> AsyncIterator[list[Server]]:
    """So many processes on a database with the memory u1."""
    made: list[Server] = []
    for number in range(count):
        journal = await open_journal(Path("/nonexistent"), url=url, shared=True, lease_s=lease_s, clock_us=Now())
        assert journal.processes is not None
        made.append(Server(journal, journal.processes, await journal.processes.join(f"host:{number}", LEASE_S)))
    await made[0].journal.create_memory(record(), ())
    try:
        yield made
    finally:
        for server in made:
            await server.journal.close()


def end_writer(cluster: Cluster, url: str, server: Server) -> None:
    """End a process's session that writes, from the database's side."""
    lock_key = process_lock_key(str(server.number))
    where = f"locktype = 'advisory' AND granted AND (classid::bigint << 32 | objid::bigint) = {lock_key}"
    assert cluster.execute(url, f"SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE {where}") == [(True,)]


# ---- taking


async def test_a_memory_is_taken_from_nobody_and_not_from_a_living_owner(url: str) -> None:
    async with joined(url, 2) as (one, two):
        assert await one.processes.take_memory("u1", one.number) == 1
        assert await one.processes.take_memory("u1", one.number) == 2, "its owner may take it again"
        assert await two.processes.take_memory("u1", two.number) == Owner(one.number, "host:0")
        assert await two.processes.find_owner("comedy", "joy", two.number) == Owner(one.number, "host:0")
        assert await one.processes.find_owner("comedy", "joy", one.number) is None
        assert await two.processes.owned_by_others(two.number) == {"u1"}
        await two.processes.release_memory("u1", two.number)
        assert await two.processes.take_memory("u1", two.number) == Owner(one.number, "host:0"), (
            "it was not theirs to give"
        )
        await one.processes.release_memory("u1", one.number)
        assert await two.processes.take_memory("u1", two.number) == 3
        with pytest.raises(Conflict):
            await two.processes.take_memory("nobody", two.number)


async def test_a_memory_is_taken_when_its_owners_lease_ran_out_by_the_databases_clock(
    postgres: Cluster, url: str
) -> None:
    async with joined(url, 2) as (one, two):
        await one.processes.take_memory("u1", one.number)
        postgres.execute(url, "UPDATE processes SET lease_until_us = 1 WHERE number = %s", one.number)
        assert await two.processes.list_living(two.number) == frozenset()
        assert await one.processes.renew(one.number, "host:0", LEASE_S) is None, "a lease that ran out is not renewed"
        assert await two.processes.take_memory("u1", two.number) == 2


async def test_a_memory_is_taken_when_its_owners_session_has_ended(postgres: Cluster, url: str) -> None:
    async with joined(url, 2) as (one, two):
        await one.processes.take_memory("u1", one.number)
        assert one.processes.is_connected()
        end_writer(postgres, url, one)
        assert await two.processes.take_memory("u1", two.number) == 2
        await until(lambda: _disconnected(one))  # known without asking the database anything
        with pytest.raises(Conflict):
            await one.journal.open_producer("u1", 1, "p")
        assert not one.processes.is_connected(), "another session is not the one the lease came with"


async def _disconnected(server: Server) -> bool:
    return not server.processes.is_connected()


async def test_of_many_that_want_a_memory_one_gets_it(url: str) -> None:
    async with joined(url, 3) as servers:
        for number in range(10):
            uid = f"w{number}"
            await servers[0].journal.create_memory(record(uid, f"name{number}"), ())
            taken = await asyncio.gather(*(one.processes.take_memory(uid, one.number) for one in servers))
            assert [epoch for epoch in taken if isinstance(epoch, int)] == [1]


async def test_leaving_gives_everything_back(postgres: Cluster, url: str) -> None:
    async with joined(url, 2) as (one, two):
        await one.processes.take_memory("u1", one.number)
        await one.processes.leave(one.number)
        assert postgres.execute(url, "SELECT owner FROM memories") == [(None,)]
        assert await two.processes.take_memory("u1", two.number) == 2


async def test_joining_again_gives_everything_back(url: str) -> None:
    async with joined(url, 2) as (one, two):
        await one.processes.take_memory("u1", one.number)
        assert await one.processes.join("host:0", LEASE_S) > two.number
        assert await two.processes.take_memory("u1", two.number) == 2


async def test_one_process_leads_until_its_session_ends(postgres: Cluster, url: str) -> None:
    async with joined(url, 2) as (one, two):

        async def leads(server: Server) -> bool:
            renewal = await server.processes.renew(server.number, "", LEASE_S)
            return renewal is not None and renewal.leads

        assert [await leads(one), await leads(two), await leads(one), await leads(two)] == [True, False, True, False]
        held = f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = {LEADING} AND granted"
        assert postgres.execute(url, held) == [(1,)]
        end_writer(postgres, url, one)
        assert await leads(two)


async def test_what_was_received_and_belongs_to_nobody_living_is_found(postgres: Cluster, url: str) -> None:
    async with joined(url, 2) as (one, two):
        epoch = await one.processes.take_memory("u1", one.number)
        assert epoch == 1
        await one.journal.open_producer("u1", 1, "p")
        await one.journal.receive(receipt(1, 2, 0))
        assert await two.processes.list_abandoned(two.number) == []
        end_writer(postgres, url, one)
        assert await two.processes.list_abandoned(two.number) == ["u1"]
        await two.processes.take_memory("u1", two.number)
        assert await two.processes.list_abandoned(two.number) == []


# ---- writing


async def test_a_stale_owner_writes_nothing(postgres: Cluster, url: str) -> None:
    async with joined(url, 2) as (one, two):
        await one.processes.take_memory("u1", one.number)
        await one.journal.open_producer("u1", 1, "p")
        postgres.execute(url, "UPDATE processes SET lease_until_us = 1 WHERE number = %s", one.number)
        await two.processes.take_memory("u1", two.number)
        before = await two.journal.load_memory("u1", MODEL, 10)
        for write in (
            one.journal.open_producer("u1", 1, "p"),
            one.journal.receive(receipt(1, 2, 0)),
            one.journal.commit(transition(1)),
            one.journal.add_accesses(Accesses("u1", 1, (Access("f1", 1, 1),))),
            one.journal.delete_memory("u1", None, 1),
        ):
            with pytest.raises(Conflict):
                await write
        assert await two.journal.load_memory("u1", MODEL, 10) == before


@pytest.mark.parametrize("kept", [True, False])
async def test_a_write_that_meets_a_taking_under_way_waits_for_its_outcome(url: str, kept: bool) -> None:
    async with joined(url, 1) as (one,):
        await one.processes.take_memory("u1", one.number)
        await one.journal.open_producer("u1", 1, "p")
        with psycopg.connect(url) as taking:
            taking.execute("UPDATE memories SET epoch = epoch + 1 WHERE uid = 'u1'")
            writes = asyncio.gather(
                one.journal.receive(receipt(1, 2, 0)), one.journal.commit(transition(1)), return_exceptions=True
            )
            await until(lambda: _waits(url))
            (taking.commit if kept else taking.rollback)()
            results = await writes
        assert [type(result) for result in results] == ([Conflict] * 2 if kept else [type(None)] * 2)


async def _waits(url: str) -> bool:
    with psycopg.connect(url, autocommit=True) as look:
        return look.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() != (0,)


async def test_taking_waits_for_nobody_who_stopped_inside_a_transaction(url: str) -> None:
    async with joined(url, 1) as (one,):
        with psycopg.connect(url) as stopped:
            stopped.execute("UPDATE memories SET revision = revision + 1 WHERE uid = 'u1'")
            assert await one.processes.take_memory("u1", one.number) is None
            stopped.rollback()
        assert await one.processes.take_memory("u1", one.number) == 1


async def test_a_row_that_is_kept_too_long_fails_one_write_and_not_the_session(url: str) -> None:
    async with joined(url, 1, lease_s=1.0) as (one,):
        await one.processes.take_memory("u1", one.number)
        await one.journal.open_producer("u1", 1, "p")
        with psycopg.connect(url) as stopped:
            stopped.execute("UPDATE memories SET revision = revision + 1 WHERE uid = 'u1'")
            with pytest.raises(OutcomeUnknown, match="lock timeout"):
                await one.journal.receive(receipt(1, 2, 0))
            stopped.rollback()
        assert one.processes.is_connected()
        await one.journal.receive(receipt(1, 2, 0))


async def test_a_server_that_stops_inside_a_transaction_keeps_its_rows_no_longer_than_its_lease(url: str) -> None:
    async with joined(url, 2, lease_s=1.0) as (one, two):
        await one.processes.take_memory("u1", one.number)
        going, inside = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop(connection: Any) -> None:
            connection.exec_driver_sql("UPDATE memories SET revision = revision + 1 WHERE uid = 'u1' AND epoch = 1")
            loop.call_soon_threadsafe(inside.set)
            asyncio.run_coroutine_threadsafe(going.wait(), loop).result(60)

        stopped = asyncio.create_task(one.journal._writer.submit(stop, 1, False))
        await inside.wait()
        assert await two.processes.take_memory("u1", two.number) is None
        assert await until(lambda: two.processes.take_memory("u1", two.number)) == 2
        going.set()
        await asyncio.gather(stopped, return_exceptions=True)
        assert (await two.journal.load_memory("u1", MODEL, 0)).record.revision == 1


async def test_a_writer_that_reconnects_ends_the_session_it_had_before(postgres: Cluster, url: str) -> None:
    """The database may not have noticed that the connection is gone: its locks would be kept for a minute."""
    async with joined(url, 1) as (one,):
        await one.processes.take_memory("u1", one.number)
        former = psycopg.connect(url, autocommit=True)
        waiting = asyncio.create_task(
            asyncio.to_thread(former.execute, f"SELECT pg_advisory_lock({process_lock_key(str(one.number))})".encode())
        )
        await until(lambda: _waits(url))
        end_writer(postgres, url, one)
        await waiting
        await one.journal.create_memory(record("u2", "two"), ())
        with pytest.raises(psycopg.OperationalError):
            former.execute("SELECT 1")


async def test_one_server_alone_and_others_exclude_each_other(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstream_server.adapters.journal.database.postgres.LOCK_WAIT_S", 0.3)

    async def opened(shared: bool) -> SqlJournal:
        return await open_journal(Path("/nonexistent"), url=url, shared=shared, clock_us=Now())

    for first, second in ((True, False), (False, True), (False, False)):
        journal = await opened(first)
        with pytest.raises(Unreadable, match=r"in use by memstream pid \d+ on .*set milvus_uri"):
            await opened(second)
        await journal.close()


# ---- the lease in the engine


class Hands:
    """A clock whose monotonic time the test moves on, and only the test."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.clock = Clock(monotonic_s=lambda: self.ahead_s)


class Leaping(ScriptedEmbedder):
    """Lets time pass while it embeds."""

    def __init__(self, hands: Hands) -> None:
        super().__init__()
        self._hands = hands
        self.leap_s = 0.0

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        self._hands.ahead_s, self.leap_s = self._hands.ahead_s + self.leap_s, 0.0
        return await super().embed(texts)


@asynccontextmanager
async def engine_on(
    url: str, hands: Hands, embedder: ScriptedEmbedder, index: MemoryIndex, **settings: Any
) -> AsyncIterator[Engine]:
    """One of several engines on a database, put together as the server does it."""
    chosen = Settings(lease_s=LEASE_S, lease_renew_s=0.1, index_flush_interval_s=0.05, **settings)
    journal = await open_journal(
        Path("/nonexistent"), url=url, shared=True, lease_s=LEASE_S, clock_us=hands.clock.now_us
    )
    models = Models(embedder)
    space, embedding = await record_space(journal, embedder, chosen)
    parts = engine_parts(chosen, journal, index, models, embedding, Metrics(), hands.clock)
    engine = Engine(parts, space)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        await journal.close()


async def say(engine: Engine, name: str, content: str) -> None:
    item = NewObservation(content=content, digest=content.encode().ljust(16)[:16])
    await engine.observe_batch("comedy", name, "", 1, [item], AckLevel.STORED)


async def found(engine: Engine, name: str, text: str) -> set[str]:
    answer = await engine.recall("comedy", name, Query(text=text, reinforce=False))
    return {one.fragment.content for one in answer.recollections}


def memory(name: str) -> NewMemory:
    return NewMemory("comedy", name, MemoryKind.LONG_TERM, Policy())


async def test_nothing_in_ram_is_served_once_the_lease_is_over_by_the_local_clock(url: str) -> None:
    hands, index = Hands(), MemoryIndex()
    embedder = Leaping(hands)
    lost: list[float] = []
    async with engine_on(url, hands, embedder, index) as engine:
        engine.ownership.on_loss(lambda: lost.append(hands.ahead_s))
        await engine.memories.create(memory("joy"))
        await say(engine, "joy", "words")
        assert await found(engine, "joy", "words") == {"words"}
        hands.ahead_s += LEASE_S * 0.89
        assert await found(engine, "joy", "words") == {"words"}, "before the margin"
        hands.ahead_s += LEASE_S * 0.02
        with pytest.raises(LeaseLost):
            await found(engine, "joy", "words")
        assert (await engine.memories.get("comedy", "joy")).name == "joy", "what the journal answers needs no lease"
        await until(lambda: _answers(engine))
        assert len(lost) == 1
        embedder.leap_s = LEASE_S
        with pytest.raises(LeaseLost):  # it ran out while the answer was made
            await found(engine, "joy", "words")
        await until(lambda: _answers(engine))
        assert (await engine.memories.get("comedy", "joy")).epoch == 3


async def _answers(engine: Engine) -> bool:
    try:
        return await found(engine, "joy", "words") == {"words"}
    except EngineError:
        return False


async def test_a_memory_that_leaves_ram_is_anothers_to_take_and_one_that_is_used_is_not(url: str) -> None:
    hands, index = Hands(), MemoryIndex()
    async with (
        engine_on(url, hands, ScriptedEmbedder(), index, active_memories_max=1) as one,
        engine_on(url, hands, ScriptedEmbedder(), index) as two,
    ):
        for name in ("a", "b"):
            await one.memories.create(memory(name))
            await say(one, name, f"words of {name}")
        with pytest.raises(OwnedElsewhere):
            await say(two, "b", "mine")
        await until(lambda: _said(two, "a"))
        assert await found(two, "a", "words") == {"words of a", "words of two"}
        with pytest.raises(OwnedElsewhere):
            await found(one, "a", "words")


async def _said(engine: Engine, name: str) -> bool:
    try:
        await say(engine, name, "words of two")
    except OwnedElsewhere:
        return False
    return True


@pytest.mark.parametrize("write", ["create", "claim", "save"])
async def test_an_operation_of_which_a_commit_goes_unanswered_is_done(
    url: str, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease goes with the session, and with the lease its claim: no operation stays claimed and not done."""
    async with engine_on(url, Hands(), ScriptedEmbedder(), MemoryIndex()) as engine:
        await until(lambda: _leads(engine))
        assert isinstance(engine._journal, SqlJournal)
        number, database, store = engine.ownership.number, engine._journal._database, engine._storage.operations
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
        asked = Operation(engine._runtime.ids.next(), "reindex", "", "", '{"embed": false}')
        if write == "claim":
            await store.create(asked)
        else:
            asked = await engine.reindexing.start(embed=False)
        async with asyncio.timeout(30):
            assert (await engine.operations.finished(asked.id)).state is OperationState.SUCCEEDED
        assert not cut
        assert engine.ownership.number != number


async def test_the_index_is_written_by_one_engine_and_followed_by_the_others(url: str) -> None:
    """Where vectors are not in RAM the overlay lets go of what another process has brought into the index."""
    hands, index = Hands(), MemoryIndex()
    async with (
        engine_on(url, hands, ScriptedEmbedder(), index, dense_in_memory_max=0, index_overlay_s=0.0) as one,
        engine_on(url, hands, ScriptedEmbedder(), index, dense_in_memory_max=0, index_overlay_s=0.0) as two,
    ):
        await until(lambda: _leads(one))
        await two.memories.create(memory("joy"))
        session = await two.open_observe("comedy", "joy", "p")
        items = [NewObservation(content=f"words {n}", digest=bytes([n] * 16)) for n in range(20)]
        await session.submit(1, items)
        await asyncio.wait_for(session.reached(AckLevel.INDEXED, 20), 60)
        session.close()
        uid = (await two.memories.get("comedy", "joy")).uid
        assert await index.count(uid) == 20
        actor = two._registry.peek(uid)
        assert actor is not None
        await until(lambda: _settled(actor))
        assert not two.ownership.leads


async def _leads(engine: Engine) -> bool:
    return engine.ownership.leads


async def _settled(actor: Any) -> bool:
    return not actor.working.fresh
