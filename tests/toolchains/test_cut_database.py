"""A server whose PostgreSQL fails: connections are cut, during COMMIT and elsewhere, or it takes no write."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import memstream
from memstream_server.adapters.journal.store import open_journal
from memstream_server.ports.journal.errors import OutcomeUnknown
from tests.journal.samples import Now, record, transition
from tests.server.conftest import QUICK, WITH_INDEX, check_log, started
from tests.server.listing import contents, observed_once
from tests.server.producing import PATIENT, Producer, words
from tests.server.test_storage import Operator, check_reads, operated, two_memories
from tests.support.relay import Relay
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.toolchains.postgres import Cluster

pytestmark = pytest.mark.toolchain

COMMIT = (b"READ COMMITTED", b"COMMIT\0")
"""The first and the last request of a writer's transaction; readers begin theirs differently."""
CUTS = 20


def url_through(relay: Relay, url: str) -> str:
    """Returns the URL of the same database through the relay."""
    database = url.partition("?")[0].rpartition("/")[2]
    return f"postgresql://memstream@{relay.address}/{database}?sslmode=disable"


def relay_to(cluster: Cluster, draw: random.Random | None = None) -> Relay:
    return Relay(f"unix:{cluster.folder}/.s.PGSQL.5432", draw)


@pytest.mark.parametrize("done", [False, True])
async def test_an_unanswered_commit_is_unknown_and_read_again(postgres: Cluster, done: bool) -> None:
    async with relay_to(postgres) as relay:
        url = url_through(relay, postgres.database())
        journal = await open_journal(Path("/nonexistent"), url=url, clock_us=Now())
        await journal.create_memory(record(), ())
        await journal.own_memory("u1")
        relay.trap, relay.trap_done = COMMIT, done
        with pytest.raises(OutcomeUnknown):
            await journal.commit(transition(1))
        assert relay.sprung == 1
        revision = (await journal.load_memory("u1", "m", 0)).record.revision
        assert revision == (2 if done else 1)
        await journal.commit(transition(revision))
        await journal.close()


def set_read_only(cluster: Cluster, value: str) -> None:
    """As providers do when a disk is nearly full; for the sessions that are open, too."""
    cluster.execute("postgres", f"ALTER SYSTEM SET default_transaction_read_only = {value}")
    cluster.execute("postgres", "SELECT pg_reload_conf()")


@contextlib.asynccontextmanager
async def operated_on(
    cluster: Cluster, tmp_path: Path, url: str = "", **more: float
) -> AsyncIterator[tuple[Operator, memstream.Client]]:
    settings = QUICK | {"journal_url": url or cluster.database()} | more
    async with operated(lambda **own: ServerProcess(tmp_path / "data").configure(**(settings | own))) as both:
        await both[0].wait_for("")
        yield both


async def sees_no_writing(operator: Operator, cause: str) -> bool:
    """Reads may have ended with the lease, which is a write."""
    degraded, writing, _, *rest = await operator.sees()
    return cause in degraded and (writing, rest) == (2, [503, 503, 0.0])


async def test_a_read_only_database_is_seen_while_nobody_writes(postgres: Cluster, tmp_path: Path) -> None:
    async with operated_on(postgres, tmp_path) as (operator, client):
        warm, cold = await two_memories(client)
        try:
            set_read_only(postgres, "on")
            await until(lambda: sees_no_writing(operator, "read-only"))
        finally:
            set_read_only(postgres, "off")
        await operator.wait_for("")
        await check_reads(warm, cold, cause="")
        await warm.observe_batch(["said afterwards"])


async def test_an_absent_database_is_seen_while_nobody_writes(postgres: Cluster, tmp_path: Path) -> None:
    async with operated_on(postgres, tmp_path) as (operator, client):
        warm, cold = await two_memories(client)
        await asyncio.to_thread(postgres.stop)
        try:
            await until(lambda: sees_no_writing(operator, "cannot be reached"))
        finally:
            await asyncio.to_thread(postgres.start)
        await operator.wait_for("")
        await check_reads(warm, cold, cause="")


BRAKE = """
    CREATE TABLE brake AS SELECT 1;
    CREATE FUNCTION wait_for_brake() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        WHILE EXISTS (SELECT FROM brake) LOOP PERFORM pg_sleep(0.05); END LOOP;
        RETURN NULL;
    END $$;
    CREATE TRIGGER slow AFTER INSERT ON fragments FOR EACH STATEMENT EXECUTE FUNCTION wait_for_brake()
"""
"""An insertion of fragments neither fails nor returns while the table `brake` has a row."""


async def test_a_slow_database_is_seen_and_reads_go_on(postgres: Cluster, tmp_path: Path) -> None:
    """Those of a memory in RAM: another one is taken by a write. The lease's renewal waits behind the write, too."""
    url = postgres.database()
    async with operated_on(postgres, tmp_path, url, lease_s=120.0) as (operator, client):
        warm, _ = await two_memories(client)
        await asyncio.to_thread(postgres.execute, url, BRAKE)
        waiting = asyncio.create_task(warm.observe_batch(["said meanwhile"], timeout_s=600))
        try:
            await operator.wait_for("more than 5 s")
            await check_reads(warm, cause="more than 5 s")
            assert not waiting.done()
        finally:
            await asyncio.to_thread(postgres.execute, url, "DELETE FROM brake")
        await waiting
        await operator.wait_for("")
        assert await contents(warm) == ["warm has room", "said meanwhile"]


async def test_producers_survive_unanswered_commits(postgres: Cluster, tmp_path: Path) -> None:
    """Every third cut is at a random time; the others are during COMMIT, before or after it took effect."""
    draw = random.Random(11)
    async with relay_to(postgres, draw) as relay:
        settings = WITH_INDEX | {"journal_url": url_through(relay, postgres.database())}
        server = ServerProcess(tmp_path / "data").configure(**settings)
        try:
            await started(server)
            async with memstream.connect(server.address, retry=PATIENT) as client:
                memory = await client.create_memory("cut/joy")
                producers = [Producer(memory, f"p{number}", random.Random(number)) for number in range(3)]
                talking = [asyncio.create_task(one.run()) for one in producers]
                for cut in range(CUTS):
                    if cut % 3 == 2:
                        await asyncio.sleep(draw.uniform(0, 0.1))
                        relay.cut()
                    else:
                        sprung = relay.sprung
                        relay.trap_done = cut % 3 == 1
                        relay.trap = COMMIT
                        await until(lambda sprung=sprung: _has_sprung(relay, sprung))  # type: ignore[misc]  # bound at once
                    before = [one.ledger.received for one in producers]
                    await until(lambda before=before: _any_advanced(producers, before))  # type: ignore[misc]  # bound at once
                for task in talking:
                    assert not task.done(), f"a producer gave up: {task.exception()!r}"
                    task.cancel()
                await asyncio.gather(*talking, return_exceptions=True)
                for one in producers:
                    await one.finish()
                said = sorted(words(one.name, n) for one in producers for n in range(1, one.ledger.received + 1))
                assert sorted(await contents(memory)) == said
                assert await observed_once(memory) == len(said)
                print(f"{CUTS} cuts, {relay.sprung} of them in COMMIT, {len(said)} observations, none lost or doubled")
        finally:
            await asyncio.to_thread(server.kill)
        check_log(server)


async def _has_sprung(relay: Relay, before: int) -> bool:
    return relay.sprung > before


async def _any_advanced(producers: list[Producer], received: list[int]) -> bool:
    return any(one.ledger.received > before for one, before in zip(producers, received, strict=True))
