"""The whole server on a PostgreSQL journal and a real Milvus: scenarios, kill -9, and a database that goes away.

No vectors are kept in RAM (dense_bytes_max 0), so that every dense candidate comes from Milvus or is fresh.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import memstream
from tests.server.conftest import WITH_INDEX, MakeServer, check_log, path, started
from tests.server.listing import contents, indexed, observed_once
from tests.server.producing import PATIENT, Producer, words
from tests.server.test_crash import test_producers_survive_kills_of_the_server
from tests.server.test_scenarios import test_scenario
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until
from tests.toolchains.milvus import MilvusServer
from tests.toolchains.postgres import Cluster

# A fixture and tests of tests/server, which run with this module's servers.
__all__ = ["path", "test_producers_survive_kills_of_the_server", "test_scenario"]

pytestmark = pytest.mark.toolchain

SETTINGS: dict[str, str | float] = WITH_INDEX | {"dense_bytes_max": 0, "index_overlay_s": 30.0}
"""A Milvus server's searches lag behind its writes, unlike Lite's: the overlay stays."""


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, postgres: Cluster, milvus: MilvusServer
) -> Iterator[ServerProcess]:
    stores = {"journal_url": postgres.database(), "milvus_uri": milvus.uri}
    with ServerProcess(tmp_path_factory.mktemp("whole") / "data", **(SETTINGS | stores)) as server:
        yield server
        assert server.stop() == 0
    check_log(server)
    assert [each for each in server.data_dir.rglob("*") if each.is_file()] == [], "no memory is large enough for images"


@pytest.fixture
async def client(shared: ServerProcess) -> AsyncIterator[memstream.Client]:
    async with memstream.connect(shared.address) as connected:
        yield connected


@pytest.fixture
def make_server(tmp_path: Path, postgres: Cluster, milvus: MilvusServer) -> Iterator[MakeServer]:
    """Like make_server of tests/server, on an empty database."""
    made: list[ServerProcess] = []
    stores = {"journal_url": postgres.database(), "milvus_uri": milvus.uri}

    def make(name: str = "data", *, listen: str = "127.0.0.1:0", **settings: str | float) -> ServerProcess:
        made.append(ServerProcess(tmp_path / name, listen, **SETTINGS | settings | stores))
        return made[-1]

    yield make
    for server in made:
        server.kill()
    for server in made:
        check_log(server)


async def test_recall_finds_fragments_that_only_milvus_has(client: memstream.Client, path: str) -> None:
    """By a vector of the client, with no word in common."""
    memory = await client.create_memory(path, kind=memstream.MemoryKind.LONG_TERM)
    dimension = (await client.server_info()).embedding.dimension
    draw = random.Random(7)
    vectors = [[draw.gauss(0, 1) for _ in range(dimension)] for _ in range(30)]
    for number, vector in enumerate(vectors):
        await memory.observe_batch([memstream.Observation(f"word{number}", embedding=vector)])
    await until(lambda: indexed(client, memory))
    for number in (3, 17, 29):
        found = await memory.recall_once("nothing like it", embedding=vectors[number], limit=1, reinforce=False)
        assert [hit.fragment.content for hit in found] == [f"word{number}"]


async def test_producers_survive_restarts_of_the_database(make_server: MakeServer, postgres: Cluster) -> None:
    """An orderly restart and a crash during writes: nothing acknowledged is lost or duplicated."""
    server = await started(make_server(listen=free_address()))
    async with memstream.connect(server.address, retry=PATIENT) as client:
        memory = await client.create_memory("away/joy")
        producers = [Producer(memory, f"joy-{number}", random.Random(number)) for number in range(3)]
        talking = [asyncio.create_task(producer.run()) for producer in producers]
        for how in (signal.SIGINT, signal.SIGQUIT):
            await asyncio.sleep(0.7)
            await asyncio.to_thread(postgres.stop, how)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(postgres.start)
            before = [producer.ledger.received for producer in producers]
            await until(lambda before=before: _all_advanced(producers, before))  # type: ignore[misc]  # bound at once
        for task in talking:
            task.cancel()
        assert {type(end) for end in await asyncio.gather(*talking, return_exceptions=True)} == {asyncio.CancelledError}
        for producer in producers:
            await producer.finish()
        said = sorted(words(one.name, n) for one in producers for n in range(1, one.ledger.received + 1))
        assert sorted(await contents(memory)) == said
        assert await observed_once(memory) == len(said)
        await until(lambda: indexed(client, memory))


async def _all_advanced(producers: list[Producer], received: list[int]) -> bool:
    return all(one.ledger.received > before for one, before in zip(producers, received, strict=True))
