"""Servers on one PostgreSQL database and one Milvus, and who talks to them without a pause."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import memstream
from tests.server.conftest import QUICK, started
from tests.server.listing import contents, observed_once
from tests.server.producing import PATIENT, Producer, words
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until
from tests.toolchains.milvus import MilvusServer
from tests.toolchains.postgres import Cluster

LEASE: dict[str, str | float] = {"lease_s": 600.0, "lease_renew_s": 0.5}
"""So long that it runs out on no machine: what moves a memory then is that its owner's lock is gone."""
SHORT: dict[str, str | float] = {"lease_s": 3.0, "lease_renew_s": 0.5}

DEADLINE_S = 6.0
"""Of single calls: what an SDK is given that must not notice a restart."""


class Fleet:
    """Servers on one database."""

    def __init__(self, folder: Path, cluster: Cluster, milvus: MilvusServer) -> None:
        self.cluster = cluster
        self.url = cluster.database()
        self.made: list[ServerProcess] = []
        self._folder = folder
        self._stores = {"journal_url": self.url, "milvus_uri": milvus.uri}

    def make(self, **settings: str | float) -> ServerProcess:
        """One more, not yet started; its address stays the same."""
        chosen = QUICK | LEASE | self._stores | settings
        self.made.append(ServerProcess(self._folder / f"data{len(self.made)}", free_address(), **chosen))
        return self.made[-1]

    async def start(self, count: int, **settings: str | float) -> list[ServerProcess]:
        """So many at once."""
        return list(await asyncio.gather(*(started(self.make(**settings)) for _ in range(count))))

    def owner(self, name: str) -> str:
        """Address of the server that owns a memory; empty when nobody does."""
        rows = self.cluster.execute(
            self.url, "SELECT p.address FROM memories m JOIN processes p ON p.number = m.owner WHERE m.name = %s", name
        )
        return str(rows[0][0]) if rows else ""

    def analyze(self) -> None:
        """What autovacuum does within a minute, and does not in these tests: without statistics PostgreSQL reads the
        outbox by going through all fragments for each row."""
        self.cluster.execute(self.url, "ANALYZE")

    def epoch(self, name: str) -> int:
        """How often the memory was taken."""
        return int(self.cluster.execute(self.url, "SELECT epoch FROM memories WHERE name = %s", name)[0][0])


@asynccontextmanager
async def clients(*servers: ServerProcess) -> AsyncIterator[list[memstream.Client]]:
    """One client for each."""
    made = [memstream.connect(server.address, retry=PATIENT) for server in servers]
    try:
        yield made
    finally:
        for client in made:
            await client.close()


class Talk:
    """Producers, callers and a ledger over some memories: `begin`, let something happen, `end`."""

    def __init__(self, client: memstream.Client, seed: int) -> None:
        self._client = client
        self._draw = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._said: Counter[str] = Counter()
        self.memories: list[memstream.Memory] = []
        self.producers: list[Producer] = []
        self.calls = 0
        self.failed: list[str] = []
        """Calls with a deadline of DEADLINE_S that did not succeed."""

    async def begin(self, memories: int = 3, producers: int = 2) -> None:
        """Everybody talks from here on."""
        for number in range(memories):
            memory = await self._client.create_memory(f"talk-{uuid.uuid4().hex[:8]}/m{number}")
            self.memories.append(memory)
            self.producers += [
                Producer(
                    memory,
                    f"{memory.name}-{n}",
                    random.Random(self._draw.random()),
                    burst_max=10,
                    pause_max_s=0.3,
                )
                for n in range(producers)
            ]
        self._tasks = [asyncio.create_task(one.run()) for one in self.producers]
        self._tasks += [asyncio.create_task(self._call(memory)) for memory in self.memories]
        self._tasks += [asyncio.create_task(self._ask(memory)) for memory in self.memories]
        await self.progress()

    async def progress(self) -> None:
        """Until everybody has come further."""
        before, calls = [one.ledger.stored for one in self.producers], self.calls

        async def further() -> bool:
            for task in self._tasks:
                assert not task.done(), f"somebody gave up: {task.exception()!r}"
            beyond = all(one.ledger.stored > was for one, was in zip(self.producers, before, strict=True))
            return beyond and self.calls > calls + len(self.memories)

        await until(further)

    async def end(self) -> str:
        """Everything acknowledged is there, once; how much that was."""
        for task in self._tasks:
            assert not task.done(), f"somebody gave up: {task.exception()!r}"
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for producer in self.producers:
            await producer.finish()
        total = lost = doubled = 0
        for memory in self.memories:
            mine = [one for one in self.producers if one.memory is memory]
            said = Counter(words(one.name, n) for one in mine for n in range(1, one.ledger.received + 1))
            said += Counter({text: count for text, count in self._said.items() if text.startswith(f"{memory.name} ")})
            kept = Counter(await contents(memory))
            unsure = Counter(text for text in kept if text.startswith(f"{memory.name} called")) - said
            kept -= unsure  # the answer was lost with the call, or the call was cancelled at the end
            total, lost, doubled = total + said.total(), lost + (said - kept).total(), doubled + (kept - said).total()
            assert await observed_once(memory) == said.total() + unsure.total()
        assert (lost, doubled) == (0, 0)
        return f"{total} observations acknowledged, none lost or doubled; {self.calls} calls, {len(self.failed)} failed"

    async def _call(self, memory: memstream.Memory) -> None:
        """Batches of a call each, and what reads."""
        number = 0
        while True:
            number += 1
            text = f"{memory.name} called {number}"
            try:
                await memory.observe_batch([text], timeout_s=DEADLINE_S)
                self._said[text] += 1
                await memory.recall_once(text, limit=3, reinforce=False, timeout_s=DEADLINE_S)
                self.calls += 2
            except memstream.MemstreamError as error:
                self.failed.append(f"{memory.name}, call {number}: {error!r}")
            await asyncio.sleep(0.1)

    async def _ask(self, memory: memstream.Memory) -> None:
        """Queries of a stream."""
        async with memory.recall() as recalls:
            while True:
                try:
                    await recalls.query("weather", limit=3, reinforce=False, timeout_s=DEADLINE_S)
                    self.calls += 1
                except memstream.MemstreamError as error:
                    self.failed.append(f"{memory.name}, query: {error!r}")
                await asyncio.sleep(0.1)
