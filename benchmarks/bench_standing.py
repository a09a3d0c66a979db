"""What standing queries cost, beside asking the same questions once a second.

    python benchmarks/bench_standing.py [--full | --tiny] [--rounds N] [--json FILE]

Observations arrive at a steady rate in one memory that already holds some. Meanwhile, in turns: nobody asks anything;
32 standing queries stand; 32 queries are asked once a second each and their answers compared, which is what a client
does without standing queries. Of each the server's CPU in a second. `stored to told` is the time from the
acknowledgement that a fragment is stored until a standing query that it answers has told it: the server ranks at most
once a second, so half a second is what waiting for the next ranking takes by itself.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from claims import Claim, at_most, claim, standalone
from report import Report, Size, percentile
from served import Served
from texts import Talk

import memstream

HELD = {Size.TINY: 20, Size.SHORT: 2_000, Size.FULL: 10_000}
"""Fragments that are there before."""
SECONDS = {Size.TINY: 0.3, Size.SHORT: 6.0, Size.FULL: 20.0}
"""Of each turn."""
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 5}
QUERIES = 32
ARRIVING = 100
"""Observations a second."""
EVERY_S = 1.0
"""Between two askings of one query, and at the least between two rankings of a standing one."""
NOBODY, STAND, ASK = "nobody asks", f"{QUERIES} standing queries", f"{QUERIES} queries once a second"
TOLD, WAITED = "stored to told", "half of the pause between rankings"
COLUMNS = ("server CPU ms/s", "stored/s", "changes/s", "p50 ms", "p99 ms")


@asynccontextmanager
async def running(work: list[Awaitable[None]]) -> AsyncIterator[None]:
    """These tasks, until the block is left; what one raises is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


class Turns:
    """One memory, who tells it, and who asks."""

    def __init__(self, server: Served, teller: memstream.Memory, asker: memstream.Memory, seconds: float) -> None:
        self._server = server
        self._teller = teller
        self._asker = asker
        self._seconds = seconds
        self._talk = Talk(7)
        self._questions = [self._talk.question(self._talk.sentence()) for _ in range(QUERIES)]
        self._changes = 0

    async def turn(
        self, report: Report, label: str, ask: Callable[[AsyncExitStack], Awaitable[list[Awaitable[None]]]]
    ) -> None:
        """Observations arrive and somebody asks, or nobody."""
        async with AsyncExitStack() as stack:
            stream = await stack.enter_async_context(self._teller.observe("teller"))
            work = await ask(stack)
            await stack.enter_async_context(running([self._arrive(stream), *work]))
            await asyncio.sleep(min(1.0, self._seconds / 2))
            self._changes, stored, before, began = 0, stream.stored, self._server.cpu(), time.perf_counter()
            await asyncio.sleep(self._seconds)
            took = time.perf_counter() - began
            figures = {
                "server CPU ms/s": self._server.cpu().since(before).server / took * 1e3,
                "stored/s": (stream.stored - stored) / took,
                "changes/s": self._changes / took,
            }
        report.add(label, **figures)

    async def nobody(self, _: AsyncExitStack) -> list[Awaitable[None]]:
        """Only the observations."""
        return []

    async def standing(self, stack: AsyncExitStack) -> list[Awaitable[None]]:
        """Each question stands."""
        recalls = await stack.enter_async_context(self._asker.recall())
        held = [await stack.enter_async_context(recalls.subscribe(one, limit=5)) for one in self._questions]
        return [self._follow(each) for each in held]

    async def asking(self, stack: AsyncExitStack) -> list[Awaitable[None]]:
        """Each question is asked again and again."""
        recalls = await stack.enter_async_context(self._asker.recall())
        return [self._ask(recalls, one, number / QUERIES) for number, one in enumerate(self._questions)]

    async def told(self, word: str, count: int) -> list[float]:
        """Seconds from *stored* until a standing query for the word tells it, one observation after another."""
        seconds = []
        async with self._asker.recall() as recalls, recalls.subscribe(word, limit=2 * count) as standing:
            await anext(standing)
            for number in range(count):
                text = f"{word} {number} {self._talk.sentence()}"
                await self._teller.observe_batch([text])
                stored = time.perf_counter()
                while text not in [hit.fragment.content for hit in (await anext(standing)).entered]:
                    pass
                seconds.append(time.perf_counter() - stored)
                await asyncio.sleep(0.13 * (number % 8))
        return seconds

    async def _arrive(self, stream: memstream.ObserveStream) -> None:
        began, number = time.perf_counter(), 0
        while True:
            await stream.send(self._talk.sentence())
            number += 1
            await asyncio.sleep(max(0.0, began + number / ARRIVING - time.perf_counter()))

    async def _follow(self, standing: memstream.StandingQuery) -> None:
        async for _ in standing:
            self._changes += 1

    async def _ask(self, recalls: memstream.RecallStream, question: str, start_s: float) -> None:
        before: list[str] = []
        await asyncio.sleep(start_s * EVERY_S)
        while True:
            answer = await recalls.query(question, limit=5, reinforce=False, omit_working_memory=True)
            now = [hit.fragment.etag for hit in answer]
            self._changes += now != before
            before = now
            await asyncio.sleep(EVERY_S)


async def measure(report: Report, size: Size, rounds: int) -> None:
    """All turns, interleaved."""
    with tempfile.TemporaryDirectory() as directory, Served(Path(directory) / "data") as server:
        async with memstream.connect(server.address) as client, memstream.connect(server.address) as other:
            memory = await client.create_memory("standing/probed")
            async with memory.observe("before") as stream:
                for one in Talk().observations(HELD[size]):
                    await stream.send(one)
            turns = Turns(server, memory, other.memory(memory.path), SECONDS[size])
            for number in range(rounds):
                await turns.turn(report, NOBODY, turns.nobody)
                await turns.turn(report, STAND, turns.standing)
                await turns.turn(report, ASK, turns.asking)
                told = await turns.told(f"beacon{number}", 2 if size is Size.TINY else 16)
                p50, p99 = percentile(told, 0.5), percentile(told, 0.99)
                report.add(TOLD, **{"p50 ms": p50 * 1e3, "p99 ms": p99 * 1e3})
                report.add(WAITED, **{"p50 ms": EVERY_S / 2 * 1e3, "p99 ms": EVERY_S * 1e3})


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report(COLUMNS)
    asyncio.run(measure(report, size, rounds or ROUNDS[size]))
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of standing queries."""
    return [
        claim(report, f"server CPU with {STAND}, {ARRIVING}/s arrive", STAND, "server CPU ms/s", ASK, at_most(1)),
        claim(report, f"stored meanwhile, {STAND}", STAND, "stored/s", NOBODY),
        claim(report, "stored to told by a standing query, p50", TOLD, "p50 ms", WAITED),
    ]


if __name__ == "__main__":
    standalone(__doc__, run, claims)
