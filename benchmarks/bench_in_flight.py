"""Throughput and latency by calls in flight: recalls and lone observations with 1, 8, 32 and 64 workers.

    python benchmarks/bench_in_flight.py [--full | --tiny] [--rounds N] [--json FILE]

Recalls go to 64 memories of 100 fragments, over streams opened before the clock starts; each worker waits for its
answer before it asks the next memory. Lone observations are unary calls until *stored*, over 200 memories. Every round
measures all numbers of workers in turn, so that other work on the machine affects all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from claims import Claim, at_least, at_most, make_claim, run_standalone
from recalls import P50, P99, RecallClient, Texts, fill_memories
from report import Report, Size, percentile
from served import BenchServer

import memstream

WORKERS = (1, 8, 32, 64)
MEMORIES = {Size.TINY: 4, Size.SHORT: 64, Size.FULL: 64}
"""At most the number of streams that the server allows on a connection."""
EACH = {Size.TINY: 10, Size.SHORT: 100, Size.FULL: 100}
OBSERVED = {Size.TINY: 4, Size.SHORT: 200, Size.FULL: 200}
"""Memories that receive lone observations."""
SERIES_S = {Size.TINY: 0.1, Size.SHORT: 1.5, Size.FULL: 5.0}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 5}
RECALL, OBSERVE = "recall", "lone observation"
RATE, SERVER = "calls /s", "server µs"
RECALLED, RECEIVED = "in-flight/recalled", "in-flight/observed"


def row_name(kind: str, workers: int) -> str:
    """The row of one kind of call with that many in flight."""
    return f"{kind}, {workers} in flight"


def best_row(kind: str) -> str:
    """The row with the highest rate of each round."""
    return f"{kind}, best rate of the round"


async def measure_series(
    report: Report, server: BenchServer, row: str, call: Callable[[], Awaitable[object]], workers: int, series_s: float
) -> float:
    """Add a row for calls of this many workers during `series_s`. Returns the rate per second."""
    seconds: list[float] = []
    before, began = server.cpu_used(), time.perf_counter()

    async def work() -> None:
        while (start := time.perf_counter()) < began + series_s:
            await call()
            seconds.append(time.perf_counter() - start)

    await asyncio.gather(*(work() for _ in range(workers)))
    rate = len(seconds) / (time.perf_counter() - began)
    figures = {P50: percentile(seconds, 0.5) * 1e3, P99: percentile(seconds, 0.99) * 1e3, RATE: rate}
    report.add_round(row, **figures, **{SERVER: server.cpu_used().since(before).server / len(seconds) * 1e6})
    return rate


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """Fill the memories, open the streams, and run all rounds."""
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(BenchServer(scratch / "data", index_flush_interval_s=2))
        client = await stack.enter_async_context(memstream.connect(server.address))
        recalled = await fill_memories(client, RECALLED, [EACH[size]] * MEMORIES[size])
        observed = await fill_memories(client, RECEIVED, [1] * OBSERVED[size])
        recalling = await stack.enter_async_context(RecallClient(server, client, RECALLED))
        for place in range(MEMORIES[size]):
            await recalling.answer(place, recalled.draw_question(place))
        calls = {
            RECALL: _next_recall(recalling, recalled, MEMORIES[size]),
            OBSERVE: _next_observation(client, observed, OBSERVED[size]),
        }
        for _ in range(rounds):
            for kind, call in calls.items():
                rates = [
                    await measure_series(report, server, row_name(kind, workers), call, workers, SERIES_S[size])
                    for workers in WORKERS
                ]
                report.add_round(best_row(kind), **{RATE: max(rates)})


def _next_recall(recalling: RecallClient, texts: Texts, count: int) -> Callable[[], Awaitable[object]]:
    places = itertools.cycle(range(count))

    async def ask() -> None:
        place = next(places)
        await recalling.answer(place, texts.draw_question(place))

    return ask


def _next_observation(client: memstream.Client, texts: Texts, count: int) -> Callable[[], Awaitable[object]]:
    memories = itertools.cycle([client.memory(f"{RECEIVED}-{place}") for place in range(count)])

    async def observe() -> None:
        await next(memories).observe_batch(texts.talk.make_observations(1))

    return observe


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((RATE, P50, P99, SERVER))
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about the largest number of calls in flight."""
    claims = []
    for kind, least, most in ((RECALL, at_least(0.95), at_most(1.5)), (OBSERVE, None, None)):
        row = row_name(kind, WORKERS[-1])
        claims.append(make_claim(report, f"{row}, vs the best rate of the round", row, RATE, best_row(kind), least))
        claims.append(make_claim(report, f"{row}, p99 vs p50", row, P99, row, most, P50))
    return claims


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
