"""Throughput and latency by calls in flight: recalls and lone observations with 1, 8, 32 and 64 workers.

    python benchmarks/bench_in_flight.py [--full | --tiny] [--rounds N] [--json FILE]

Recalls go to 64 memories of 100 fragments, over streams opened before the clock starts; each worker has memories of its
own and waits for its answer before it asks the next one. Lone observations are unary calls until *stored*, over 200
memories. Texts are drawn before the clock starts. Every round measures all numbers of workers in turn, so that other
work on the machine affects all of them.

*turns* is the number of answers to all workers between a question and its own answer, divided by the number of
workers: 1 means that nobody overtakes. Unlike p99 it does not depend on pauses of the machine, which hold up all calls
in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from claims import Claim, at_least, at_most, make_claim, run_standalone
from recalls import P50, P99, RecallClient, fill_memories
from report import COMPUTING, PAUSE, Report, Size, percentile
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
DRAWN = 20
"""Questions to each memory."""
RATE_MAX = 4_000
"""Observations per second that are drawn before a series."""
Call = Callable[[], Awaitable[object]]
RECALL, OBSERVE = "recall", "lone observation"
RATE, SERVER, TURNS = "calls /s", "server µs", "p99 turns"
RECALLED, RECEIVED = "in-flight/recalled", "in-flight/observed"


def row_name(kind: str, workers: int) -> str:
    """The row of one kind of call with that many in flight."""
    return f"{kind}, {workers} in flight"


def best_row(kind: str) -> str:
    """The row with the highest rate of each round."""
    return f"{kind}, best rate of the round"


async def measure_series(
    report: Report, server: BenchServer, row: str, calls: Sequence[Call], series_s: float
) -> float:
    """Add a row for these calls, each repeated by its own worker during `series_s`. Returns the rate per second."""
    seconds: list[float] = []
    turns: list[int] = []
    before, began, since = server.cpu_used(), time.perf_counter(), time.monotonic()

    async def work(call: Call) -> None:
        while (start := time.perf_counter()) < began + series_s:
            earlier = len(seconds)
            await call()
            seconds.append(time.perf_counter() - start)
            turns.append(len(seconds) - earlier)

    await asyncio.gather(*map(work, calls))
    rate = len(seconds) / (time.perf_counter() - began)
    figures = {P50: percentile(seconds, 0.5) * 1e3, P99: percentile(seconds, 0.99) * 1e3, RATE: rate}
    figures |= {TURNS: percentile(turns, 0.99) / len(calls)}
    report.add_round(row, **figures, **{SERVER: server.cpu_used().since(before).server / len(seconds) * 1e6})
    report.add_pause(row, await asyncio.to_thread(server.longest_pause, since))
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
        asked = [[recalled.draw_question(place) for _ in range(DRAWN)] for place in range(MEMORIES[size])]
        for place, questions in enumerate(asked):
            await recalling.answer(place, questions[0])
        memories = [client.memory(f"{RECEIVED}-{place}") for place in range(OBSERVED[size])]

        def make_calls(kind: str, workers: int) -> list[Call]:
            if kind == RECALL:
                return _make_recalls(recalling, asked, workers)
            return _make_observes(memories, observed.talk.make_observations(int(SERIES_S[size] * RATE_MAX)), workers)

        for _ in range(rounds):
            for kind in (RECALL, OBSERVE):
                rates = [
                    await measure_series(
                        report, server, row_name(kind, workers), make_calls(kind, workers), SERIES_S[size]
                    )
                    for workers in WORKERS
                ]
                report.add_round(best_row(kind), **{RATE: max(rates)})


def _share(count: int, worker: int, workers: int) -> range:
    """The worker's own places out of `count`; of more workers than places, some have the same."""
    return range(worker % count, count, workers)


def _make_recalls(recalling: RecallClient, asked: Sequence[Sequence[str]], workers: int) -> list[Call]:
    def make_call(worker: int) -> Call:
        places = _share(len(asked), worker, workers)
        questions = itertools.cycle([(place, asked[place][number]) for number in range(DRAWN) for place in places])
        return lambda: recalling.answer(*next(questions))

    return [make_call(worker) for worker in range(workers)]


def _make_observes(
    memories: Sequence[memstream.Memory], observations: Sequence[memstream.Observation], workers: int
) -> list[Call]:
    new = iter(observations)

    def make_call(worker: int) -> Call:
        own = itertools.cycle([memories[place] for place in _share(len(memories), worker, workers)])
        return lambda: next(own).observe_batch([next(new)])

    return [make_call(worker) for worker in range(workers)]


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((RATE, P50, P99, TURNS, SERVER, PAUSE, COMPUTING))
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about the largest number of calls in flight."""
    claims = []
    for kind, least, most in ((RECALL, at_least(0.95), at_most(1.5)), (OBSERVE, None, None)):
        row = row_name(kind, WORKERS[-1])
        claims.append(make_claim(report, f"{row}, vs the best rate of the round", row, RATE, best_row(kind), least))
        claims.append(make_claim(report, f"{row}, p99 vs p50", row, P99, row, most, P50))
        alone, turns = row_name(kind, WORKERS[0]), f"{row}, answers to all until its own, per worker"
        claims.append(make_claim(report, turns, row, TURNS, alone, at_most(1.5)))
    return claims


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
