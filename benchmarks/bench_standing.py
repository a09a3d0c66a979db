"""Cost of standing queries, vs asking the same questions once a second.

    python benchmarks/bench_standing.py [--full | --tiny] [--rounds N] [--json FILE]

Observations arrive at a steady rate in a memory that already holds some. Rounds alternate between no queries, 32
standing queries, and 32 queries asked once a second with their answers compared, as a client without standing queries
does. The figure is the server's CPU per second. `stored to delivered` is the time from the acknowledgement that a
fragment is stored until a standing query delivers it. The server ranks at most once a second, so waiting for the next
ranking alone takes half a second on average.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from claims import Claim, at_most, make_claim, run_standalone
from report import Report, Size, percentile
from served import BenchServer
from texts import SentenceSource

import memstream

HELD = {Size.TINY: 20, Size.SHORT: 2_000, Size.FULL: 10_000}
"""Fragments in the memory at the start."""
SECONDS = {Size.TINY: 0.3, Size.SHORT: 6.0, Size.FULL: 20.0}
"""Seconds of each measurement."""
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 5}
QUERIES = 32
ARRIVING = 100
"""Observations per second."""
EVERY_S = 1.0
"""Interval of polling, and the minimum interval between two rankings of a standing query."""
NO_QUERIES, STANDING, POLLING = "no queries", f"{QUERIES} standing queries", f"{QUERIES} queries once a second"
DELIVERED, WAITED = "stored to delivered", "half of the ranking interval"
COLUMNS = ("server CPU ms/s", "stored/s", "changes/s", "p50 ms", "p99 ms")


@asynccontextmanager
async def run_tasks(work: list[Awaitable[None]]) -> AsyncIterator[None]:
    """Run these coroutines during the block; raises the first error of any of them."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


class StandingBench:
    """One memory, a client that writes to it, and a client that queries it."""

    def __init__(self, server: BenchServer, writer: memstream.Memory, reader: memstream.Memory, seconds: float) -> None:
        self._server = server
        self._writer = writer
        self._reader = reader
        self._seconds = seconds
        self._talk = SentenceSource(7)
        self._questions = [self._talk.draw_question(self._talk.make_sentence()) for _ in range(QUERIES)]
        self._changes = 0

    async def measure_turn(
        self, report: Report, label: str, ask: Callable[[AsyncExitStack], Awaitable[list[Awaitable[None]]]]
    ) -> None:
        """Measure one configuration while observations arrive."""
        async with AsyncExitStack() as stack:
            stream = await stack.enter_async_context(self._writer.observe("teller"))
            work = await ask(stack)
            await stack.enter_async_context(run_tasks([self._send_steadily(stream), *work]))
            await asyncio.sleep(min(1.0, self._seconds / 2))
            self._changes, stored, before, began = 0, stream.stored, self._server.cpu_used(), time.perf_counter()
            await asyncio.sleep(self._seconds)
            took = time.perf_counter() - began
            figures = {
                "server CPU ms/s": self._server.cpu_used().since(before).server / took * 1e3,
                "stored/s": (stream.stored - stored) / took,
                "changes/s": self._changes / took,
            }
        report.add_round(label, **figures)

    async def ask_nothing(self, _: AsyncExitStack) -> list[Awaitable[None]]:
        """Observations only."""
        return []

    async def open_standing(self, stack: AsyncExitStack) -> list[Awaitable[None]]:
        """Open each question as a standing query."""
        recalls = await stack.enter_async_context(self._reader.recall())
        held = [await stack.enter_async_context(recalls.subscribe(one, limit=5)) for one in self._questions]
        return [self._count_changes(each) for each in held]

    async def poll_queries(self, stack: AsyncExitStack) -> list[Awaitable[None]]:
        """Ask each question once a second."""
        recalls = await stack.enter_async_context(self._reader.recall())
        return [self._poll_query(recalls, one, number / QUERIES) for number, one in enumerate(self._questions)]

    async def time_deliveries(self, word: str, count: int) -> list[float]:
        """Seconds from *stored* until a standing query for the word delivers it, one observation after another."""
        seconds = []
        async with self._reader.recall() as recalls, recalls.subscribe(word, limit=2 * count) as standing:
            await anext(standing)
            for number in range(count):
                text = f"{word} {number} {self._talk.make_sentence()}"
                await self._writer.observe_batch([text])
                stored = time.perf_counter()
                while text not in [hit.fragment.content for hit in (await anext(standing)).entered]:
                    pass
                seconds.append(time.perf_counter() - stored)
                await asyncio.sleep(0.13 * (number % 8))
        return seconds

    async def _send_steadily(self, stream: memstream.ObserveStream) -> None:
        began, number = time.perf_counter(), 0
        while True:
            await stream.send(self._talk.make_sentence())
            number += 1
            await asyncio.sleep(max(0.0, began + number / ARRIVING - time.perf_counter()))

    async def _count_changes(self, standing: memstream.StandingQuery) -> None:
        async for _ in standing:
            self._changes += 1

    async def _poll_query(self, recalls: memstream.RecallStream, question: str, start_s: float) -> None:
        before: list[str] = []
        await asyncio.sleep(start_s * EVERY_S)
        while True:
            answer = await recalls.query(question, limit=5, reinforce=False, omit_working_memory=True)
            now = [hit.fragment.etag for hit in answer]
            self._changes += now != before
            before = now
            await asyncio.sleep(EVERY_S)


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """All configurations, interleaved."""
    with tempfile.TemporaryDirectory() as directory, BenchServer(Path(directory) / "data") as server:
        async with memstream.connect(server.address) as client, memstream.connect(server.address) as other:
            memory = await client.create_memory("standing/probed")
            async with memory.observe("before") as stream:
                for one in SentenceSource().make_observations(HELD[size]):
                    await stream.send(one)
            turns = StandingBench(server, memory, other.memory(memory.path), SECONDS[size])
            for number in range(rounds):
                await turns.measure_turn(report, NO_QUERIES, turns.ask_nothing)
                await turns.measure_turn(report, STANDING, turns.open_standing)
                await turns.measure_turn(report, POLLING, turns.poll_queries)
                delivery_s = await turns.time_deliveries(f"beacon{number}", 2 if size is Size.TINY else 16)
                p50, p99 = percentile(delivery_s, 0.5), percentile(delivery_s, 0.99)
                report.add_round(DELIVERED, **{"p50 ms": p50 * 1e3, "p99 ms": p99 * 1e3})
                report.add_round(WAITED, **{"p50 ms": EVERY_S / 2 * 1e3, "p99 ms": EVERY_S * 1e3})


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report(COLUMNS)
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about standing queries."""
    return [
        make_claim(
            report, f"server CPU with {STANDING}, {ARRIVING} writes/s", STANDING, "server CPU ms/s", POLLING, at_most(1)
        ),
        make_claim(report, f"stored during the round, {STANDING}", STANDING, "stored/s", NO_QUERIES),
        make_claim(report, "stored to delivered by a standing query, p50", DELIVERED, "p50 ms", WAITED),
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
