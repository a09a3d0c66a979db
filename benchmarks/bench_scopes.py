"""A recall over several memories, compared with a recall of one and with a call for each.

    python benchmarks/bench_scopes.py [--full | --tiny] [--rounds N] [--json FILE]

Each memory has FRAGMENTS fragments. Ways: one memory, three and ten by one call, three by three calls at once. A round
times unary recalls, one after another: BLOCK of one way, then the same questions by the next one, so that other work on
the machine meets all ways. CPU is user and system time of the server's process. A round asks its questions by each way
before it times them: the first recall of a fragment computes its words and its vector, and one memory has fewer
fragments. Every recall is an access of what it returns. Except with --tiny the program fails if a claim misses its aim.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from claims import Claim, at_most, make_claim, run_standalone
from report import Report, Size, percentile
from served import BenchServer
from texts import SentenceSource

import memstream

FRAGMENTS = {Size.TINY: 50, Size.SHORT: 1_000, Size.FULL: 1_000}
RECALLS = {Size.TINY: 5, Size.SHORT: 100, Size.FULL: 400}
MEMORIES = 10
BATCH = 250
BLOCK = 10
"""Questions of one way in a row."""
P50, CPU = "p50 in ms", "CPU in ms"
ONE, THREE, TEN, CALLS = "one memory", "three in one call", "ten in one call", "three calls at once"

Ask = Callable[[str], Awaitable[object]]


async def fill_memories(client: memstream.Client, count: int) -> list[memstream.Memory]:
    """Memories with sentences in sessions of 20."""
    memories = []
    for number in range(MEMORIES):
        memory = await client.create_memory(f"bench/scope-{number}")
        source = SentenceSource(number + 1)
        observations = [
            memstream.Observation(source.make_sentence(), session=f"s{place // 20}") for place in range(count)
        ]
        for start in range(0, count, BATCH):
            await memory.observe_batch(observations[start : start + BATCH])
        memories.append(memory)
    return memories


async def measure_ways(report: Report, server: BenchServer, size: Size, rounds: int) -> None:
    """One row for each way."""
    async with memstream.connect(server.address) as client:
        memories = await fill_memories(client, FRAGMENTS[size])
        paths = [memory.path for memory in memories]
        ways: dict[str, Ask] = {
            ONE: memories[0].recall_once,
            THREE: lambda text: client.recall_once(paths[:3], text),
            TEN: lambda text: client.recall_once(paths, text),
            CALLS: lambda text: asyncio.gather(*(memory.recall_once(text) for memory in memories[:3])),
        }
        source = SentenceSource(99)
        for _ in range(rounds):
            questions = [" ".join(source.make_sentence().split()[:8]) for _ in range(RECALLS[size])]
            for ask in ways.values():
                for text in questions:
                    await ask(text)
            took: dict[str, list[float]] = {name: [] for name in ways}
            cpu_s = dict.fromkeys(ways, 0.0)
            for start in range(0, len(questions), BLOCK):
                for name, ask in ways.items():
                    before = server.cpu_used().total
                    for text in questions[start : start + BLOCK]:
                        began = time.perf_counter()
                        await ask(text)
                        took[name].append(1_000 * (time.perf_counter() - began))
                    cpu_s[name] += server.cpu_used().total - before
            for name in ways:
                cpu_ms = 1_000 * cpu_s[name] / len(questions)
                report.add_round(name, **{P50: percentile(took[name], 0.5), CPU: cpu_ms})


def run(size: Size, rounds: int | None) -> Report:
    """Measure."""
    report = Report((P50, CPU))
    with tempfile.TemporaryDirectory() as scratch, BenchServer(Path(scratch) / "data", probed=False) as server:
        asyncio.run(measure_ways(report, server, size, rounds or 5))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Three memories at most 2 times one, ten at most 5 times."""
    return [
        make_claim(report, f"{row}, {column}", row, column, other, bound)
        for row, other, bound in (
            (THREE, ONE, at_most(2)),
            (TEN, ONE, at_most(5)),
            (THREE, CALLS, None),
        )
        for column in (CPU, P50)
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run, make_claims, strict=True)
