"""Servers on one PostgreSQL database, with or without a Milvus, and a continuous load on them."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import memstream
from tests.server.conftest import WITH_INDEX, started
from tests.server.listing import contents, observed_once
from tests.server.producing import PATIENT, Producer, words
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until
from tests.toolchains.milvus import MilvusServer
from tests.toolchains.postgres import Cluster

LEASE: dict[str, str | float] = {"lease_s": 600.0, "lease_renew_s": 0.5}
"""So long that it never expires in a test: a memory moves only when its owner's lock is gone."""
SHORT: dict[str, str | float] = {"lease_s": 3.0, "lease_renew_s": 0.5}

DEADLINE_S = 25.0
"""Of single calls; a restart must not make them fail. A machine may stop each process for seconds."""


class Fleet:
    """Several servers on one database."""

    def __init__(self, folder: Path, cluster: Cluster, milvus: MilvusServer | None) -> None:
        self.cluster = cluster
        self.url = cluster.database()
        self.made: list[ServerProcess] = []
        self._folder = folder
        self._stores = {"journal_url": self.url, "milvus_uri": "" if milvus is None else milvus.uri}

    def make(self, **settings: str | float) -> ServerProcess:
        """Returns another server, not yet started; it keeps its address."""
        chosen = WITH_INDEX | LEASE | self._stores | settings
        self.made.append(ServerProcess(self._folder / f"data{len(self.made)}", free_address(), **chosen))
        return self.made[-1]

    async def start(self, count: int, **settings: str | float) -> list[ServerProcess]:
        """Starts `count` servers concurrently."""
        return list(await asyncio.gather(*(started(self.make(**settings)) for _ in range(count))))

    def owner(self, name: str) -> str:
        """Returns the address of the server that owns a memory; empty if none does."""
        rows = self.cluster.execute(
            self.url, "SELECT p.address FROM memories m JOIN processes p ON p.number = m.owner WHERE m.name = %s", name
        )
        return str(rows[0][0]) if rows else ""

    def analyze(self) -> None:
        """Collects statistics, which autovacuum would do within a minute: without them PostgreSQL scans all fragments
        for each row of the outbox."""
        self.cluster.execute(self.url, "ANALYZE")

    def epoch(self, name: str) -> int:
        """Returns how often the memory was taken."""
        return int(self.cluster.execute(self.url, "SELECT epoch FROM memories WHERE name = %s", name)[0][0])


@asynccontextmanager
async def connect_clients(*servers: ServerProcess) -> AsyncIterator[list[memstream.Client]]:
    """Connects one client to each server."""
    made = [memstream.connect(server.address, retry=PATIENT) for server in servers]
    try:
        yield made
    finally:
        for client in made:
            await client.close()


class Load:
    """A load of producers and callers on some memories with a ledger: `start`, cause faults, `finish`."""

    def __init__(self, client: memstream.Client, seed: int) -> None:
        self._client = client
        self._draw = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._acknowledged: Counter[str] = Counter()
        self.memories: list[memstream.Memory] = []
        self.producers: list[Producer] = []
        self.calls = 0
        self.failed: list[str] = []
        """Calls with a deadline of DEADLINE_S that failed."""

    async def start(self, memories: int = 3, producers: int = 2) -> None:
        """Creates the memories, and starts producers and callers."""
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
        await self.wait_for_progress()

    async def wait_for_progress(self) -> None:
        """Waits until every producer and caller has made progress."""
        before, calls = [one.ledger.stored for one in self.producers], self.calls

        async def further() -> bool:
            for task in self._tasks:
                assert not task.done(), f"a task failed: {task.exception()!r}"
            beyond = all(one.ledger.stored > was for one, was in zip(self.producers, before, strict=True))
            return beyond and self.calls > calls + len(self.memories)

        await until(further)

    async def finish(self) -> str:
        """Stops the load, asserts that everything acknowledged is stored once, and returns a summary."""
        for task in self._tasks:
            assert not task.done(), f"a task failed: {task.exception()!r}"
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for producer in self.producers:
            await producer.finish()
        total = lost = doubled = 0
        for memory in self.memories:
            mine = [one for one in self.producers if one.memory is memory]
            said = Counter(words(one.name, n) for one in mine for n in range(1, one.ledger.received + 1))
            own = {text: count for text, count in self._acknowledged.items() if text.startswith(f"{memory.name} ")}
            said += Counter(own)
            kept = Counter(await contents(memory))
            unsure = Counter(text for text in kept if text.startswith(f"{memory.name} called")) - said
            kept -= unsure  # the answer was lost with the call, or the call was cancelled at the end
            total, lost, doubled = total + said.total(), lost + (said - kept).total(), doubled + (kept - said).total()
            assert await observed_once(memory) == said.total() + unsure.total()
        assert (lost, doubled) == (0, 0)
        return f"{total} observations acknowledged, none lost or doubled; {self.calls} calls, {len(self.failed)} failed"

    async def _call(self, memory: memstream.Memory) -> None:
        """Sends batches and reads with unary calls."""
        number = 0
        while True:
            number += 1
            text = f"{memory.name} called {number}"
            try:
                await memory.observe_batch([text], timeout_s=DEADLINE_S)
                self._acknowledged[text] += 1
                await memory.recall_once(text, limit=3, reinforce=False, timeout_s=DEADLINE_S)
                self.calls += 2
            except memstream.MemstreamError as error:
                self.failed.append(f"{memory.name}, call {number}: {error!r}")
            await asyncio.sleep(0.1)

    async def _ask(self, memory: memstream.Memory) -> None:
        """Sends queries on a stream."""
        async with memory.recall() as recalls:
            while True:
                try:
                    await recalls.query("weather", limit=3, reinforce=False, timeout_s=DEADLINE_S)
                    self.calls += 1
                except memstream.MemstreamError as error:
                    self.failed.append(f"{memory.name}, query: {error!r}")
                await asyncio.sleep(0.1)
