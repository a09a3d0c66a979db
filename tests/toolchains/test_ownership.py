"""Who owns a memory, on PostgreSQL: what is taken, what is refused, and when a lease counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from memstream_server.adapters.journal.database.postgres import LEADING, process_lock_key
from memstream_server.adapters.journal.processes import SqlProcesses
from memstream_server.adapters.journal.store import SqlJournal, open_journal
from memstream_server.ports.journal.errors import OutcomeUnknown, StaleWrite, Unreadable
from memstream_server.ports.journal.writing import Access, Accesses
from memstream_server.ports.processes import Owner
from tests.journal.samples import MODEL, Now, receipt, record, transition
from tests.support.waiting import until
from tests.toolchains.postgres import Cluster

pytestmark = pytest.mark.toolchain

LEASE_S = 600.0


@pytest.fixture
def url(postgres: Cluster) -> str:
    return postgres.database()


@dataclass(frozen=True, slots=True)
class Server:
    """The journal of one process."""

    journal: SqlJournal
    processes: SqlProcesses
    number: int


@asynccontextmanager
async def join_processes(url: str, count: int, lease_s: float = LEASE_S) -> AsyncIterator[list[Server]]:
    """Joins `count` processes to a database with the memory u1."""
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
    """Ends the writing session of a process from the database's side."""
    lock_key = process_lock_key(str(server.number))
    where = f"locktype = 'advisory' AND granted AND (classid::bigint << 32 | objid::bigint) = {lock_key}"
    assert cluster.execute(url, f"SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE {where}") == [(True,)]


# ---- taking


async def test_a_free_memory_is_taken_but_not_an_owned_one(url: str) -> None:
    async with join_processes(url, 2) as (one, two):
        assert await one.processes.take_memory("u1", one.number) == 1
        assert await one.processes.take_memory("u1", one.number) == 2, "its owner may take it again"
        assert await two.processes.take_memory("u1", two.number) == Owner(one.number, "host:0")
        assert await two.processes.find_owner("comedy", "joy", two.number) == Owner(one.number, "host:0")
        assert await one.processes.find_owner("comedy", "joy", one.number) is None
        assert await two.processes.owned_by_others(two.number) == {"u1"}
        await two.processes.release_memory("u1", two.number)
        assert await two.processes.take_memory("u1", two.number) == Owner(one.number, "host:0"), (
            "only its owner can release"
        )
        await one.processes.release_memory("u1", one.number)
        assert await two.processes.take_memory("u1", two.number) == 3
        with pytest.raises(StaleWrite):
            await two.processes.take_memory("nobody", two.number)


async def test_a_memory_is_taken_after_its_owners_lease_expired(postgres: Cluster, url: str) -> None:
    async with join_processes(url, 2) as (one, two):
        await one.processes.take_memory("u1", one.number)
        postgres.execute(url, "UPDATE processes SET lease_until_us = 1 WHERE number = %s", one.number)
        assert await two.processes.list_living(two.number) == frozenset()
        assert await one.processes.renew(one.number, "host:0", LEASE_S) is None, "a lease that ran out is not renewed"
        assert await two.processes.take_memory("u1", two.number) == 2


async def test_a_memory_is_taken_after_its_owners_session_ended(postgres: Cluster, url: str) -> None:
    async with join_processes(url, 2) as (one, two):
        await one.processes.take_memory("u1", one.number)
        assert one.processes.is_connected()
        end_writer(postgres, url, one)
        assert await two.processes.take_memory("u1", two.number) == 2
        await until(lambda: _is_disconnected(one))  # known without a query
        with pytest.raises(StaleWrite):
            await one.journal.open_producer("u1", 1, "p")
        assert not one.processes.is_connected(), "the lease belongs to the former session"


async def _is_disconnected(server: Server) -> bool:
    return not server.processes.is_connected()


async def test_exactly_one_of_many_takers_gets_a_memory(url: str) -> None:
    async with join_processes(url, 3) as servers:
        for number in range(10):
            uid = f"w{number}"
            await servers[0].journal.create_memory(record(uid, f"name{number}"), ())
            taken = await asyncio.gather(*(one.processes.take_memory(uid, one.number) for one in servers))
            assert [epoch for epoch in taken if isinstance(epoch, int)] == [1]


async def test_leaving_releases_all_memories(postgres: Cluster, url: str) -> None:
    async with join_processes(url, 2) as (one, two):
        await one.processes.take_memory("u1", one.number)
        await one.processes.leave(one.number)
        assert postgres.execute(url, "SELECT owner FROM memories") == [(None,)]
        assert await two.processes.take_memory("u1", two.number) == 2


async def test_rejoining_releases_all_memories(url: str) -> None:
    async with join_processes(url, 2) as (one, two):
        await one.processes.take_memory("u1", one.number)
        assert await one.processes.join("host:0", LEASE_S) > two.number
        assert await two.processes.take_memory("u1", two.number) == 2


async def test_one_process_leads_until_its_session_ends(postgres: Cluster, url: str) -> None:
    async with join_processes(url, 2) as (one, two):

        async def leads(server: Server) -> bool:
            renewal = await server.processes.renew(server.number, "", LEASE_S)
            return renewal is not None and renewal.leads

        assert [await leads(one), await leads(two), await leads(one), await leads(two)] == [True, False, True, False]
        held = f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = {LEADING} AND granted"
        assert postgres.execute(url, held) == [(1,)]
        end_writer(postgres, url, one)
        assert await leads(two)


async def test_received_observations_of_dead_owners_are_found(postgres: Cluster, url: str) -> None:
    async with join_processes(url, 2) as (one, two):
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


async def test_a_stale_owner_cannot_write(postgres: Cluster, url: str) -> None:
    async with join_processes(url, 2) as (one, two):
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
            with pytest.raises(StaleWrite):
                await write
        assert await two.journal.load_memory("u1", MODEL, 10) == before


@pytest.mark.parametrize("kept", [True, False])
async def test_a_write_waits_for_the_outcome_of_a_running_takeover(url: str, kept: bool) -> None:
    async with join_processes(url, 1) as (one,):
        await one.processes.take_memory("u1", one.number)
        await one.journal.open_producer("u1", 1, "p")
        with psycopg.connect(url) as taking:
            taking.execute("UPDATE memories SET epoch = epoch + 1 WHERE uid = 'u1'")
            writes = asyncio.gather(
                one.journal.receive(receipt(1, 2, 0)), one.journal.commit(transition(1)), return_exceptions=True
            )
            await until(lambda: _has_blocked_lock(url))
            (taking.commit if kept else taking.rollback)()
            results = await writes
        assert [type(result) for result in results] == ([StaleWrite] * 2 if kept else [type(None)] * 2)


async def _has_blocked_lock(url: str) -> bool:
    with psycopg.connect(url, autocommit=True) as look:
        return look.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() != (0,)


async def test_a_takeover_does_not_wait_for_a_stalled_transaction(url: str) -> None:
    async with join_processes(url, 1) as (one,):
        with psycopg.connect(url) as stopped:
            stopped.execute("UPDATE memories SET revision = revision + 1 WHERE uid = 'u1'")
            assert await one.processes.take_memory("u1", one.number) is None
            stopped.rollback()
        assert await one.processes.take_memory("u1", one.number) == 1


def allow_stalls(connection: Any) -> None:
    """The session does not end if this process stands still in a transaction for longer than a short lease."""
    connection.exec_driver_sql("SET idle_in_transaction_session_timeout = 0")


async def test_a_long_row_lock_fails_one_write_not_the_session(url: str) -> None:
    async with join_processes(url, 1, lease_s=1.0) as (one,):
        await one.journal._writer.submit(allow_stalls, 1, False)
        await one.processes.take_memory("u1", one.number)
        await one.journal.open_producer("u1", 1, "p")
        with psycopg.connect(url) as stopped:
            stopped.execute("UPDATE memories SET revision = revision + 1 WHERE uid = 'u1'")
            with pytest.raises(OutcomeUnknown, match="lock timeout"):
                await one.journal.receive(receipt(1, 2, 0))
            stopped.rollback()
        assert one.processes.is_connected()
        await one.journal.receive(receipt(1, 2, 0))


async def test_a_stalled_server_keeps_row_locks_only_until_lease_end(url: str) -> None:
    async with join_processes(url, 2, lease_s=4.0) as (one, two):
        await one.processes.take_memory("u1", one.number)
        going, inside = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop(connection: Any) -> None:
            connection.exec_driver_sql("UPDATE memories SET revision = revision + 1 WHERE uid = 'u1' AND epoch = 1")
            loop.call_soon_threadsafe(inside.set)
            asyncio.run_coroutine_threadsafe(going.wait(), loop).result(60)

        began_s = loop.time()
        stopped = asyncio.create_task(one.journal._writer.submit(stop, 1, False))
        await inside.wait()
        taken = await two.processes.take_memory("u1", two.number)
        if taken is None:
            taken = await until(lambda: two.processes.take_memory("u1", two.number))
        ended_s = loop.time()
        await until(lambda: _is_disconnected(one))  # the database has ended its session: else it would still be one's
        assert taken == 2
        assert ended_s - began_s >= 4.0, "no sooner"
        going.set()
        await asyncio.gather(stopped, return_exceptions=True)
        assert (await two.journal.load_memory("u1", MODEL, 0)).record.revision == 1


async def test_a_reconnecting_writer_ends_its_former_session(postgres: Cluster, url: str) -> None:
    """The database may not have noticed that the connection is gone: it would keep the locks for a minute."""
    async with join_processes(url, 1) as (one,):
        await one.processes.take_memory("u1", one.number)
        former = psycopg.connect(url, autocommit=True)
        waiting = asyncio.create_task(
            asyncio.to_thread(former.execute, f"SELECT pg_advisory_lock({process_lock_key(str(one.number))})".encode())
        )
        await until(lambda: _has_blocked_lock(url))
        end_writer(postgres, url, one)
        await waiting
        await one.journal.create_memory(record("u2", "two"), ())
        with pytest.raises(psycopg.OperationalError):
            former.execute("SELECT 1")


async def test_single_and_shared_servers_exclude_each_other(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(shared: bool, wait_s: float) -> SqlJournal:
        monkeypatch.setattr("memstream_server.adapters.journal.database.postgres.LOCK_WAIT_S", wait_s)
        return await open_journal(Path("/nonexistent"), url=url, shared=shared, clock_us=Now())

    for first, second in ((True, False), (False, True), (False, False)):
        journal = await opened(first, wait_s=60.0)  # PostgreSQL has to notice that the former one is closed
        with pytest.raises(Unreadable, match=r"in use by memstream pid \d+ on .*does not share it"):
            await opened(second, wait_s=0.3)
        await journal.close()
