"""What a server needs: bytes on disk and in RAM per fragment and per memory, CPU seconds per million calls.

    python benchmarks/bench_costs.py [--full | --tiny] [--rounds N] [--json FILE]

Two servers: one has a single memory, the other has many of twelve fragments. Disk is the journal's file after a
checkpoint, RAM the growth of the process while the memories enter it after a restart, CPU user and system time of the
server's process for what IN_FLIGHT callers do at a time. A turn is a recall and a batch of three observations, both
unary and until *stored*. Other work on the machine makes CPU figures larger, by cache misses, and never smaller.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench_disk import SMALL, fill_large, fill_many, measure_parts
from claims import Claim, at_most, make_claim, run_standalone
from report import Report, Size
from served import BenchServer
from texts import SentenceSource

import memstream

LARGE = {Size.TINY: 200, Size.SHORT: 10_000, Size.FULL: 100_000}
MANY = {Size.TINY: 10, Size.SHORT: 1_000, Size.FULL: 10_000}
CALLS = {Size.TINY: 20, Size.SHORT: 1_000, Size.FULL: 10_000}
STREAMED = {Size.TINY: 100, Size.SHORT: 10_000, Size.FULL: 50_000}
IN_FLIGHT = 16
WARM = 8
"""Memories of the calls to active ones."""
BYTES, CPU = "bytes", "CPU s"
DISK_FRAGMENT, DISK_MEMORY = "disk per fragment", f"disk per memory of {SMALL}"
RAM_FRAGMENT, RAM_MEMORY = "RAM per fragment", f"RAM per memory of {SMALL}"
OBSERVATIONS, RECALLS = "a million observations on a stream", "a million recalls, memory in RAM"
TURNS, COLD_TURNS = "a million turns, memory in RAM", "a million turns, memory not in RAM"
AIMS = {TURNS: 4_000, COLD_TURNS: 8_000}

Call = Callable[[int], Awaitable[object]]


def disk_bytes(data: Path) -> int:
    """Size of a stopped server's journal."""
    return sum(measure_parts(data / "journal.db").values())


def measure_empty(scratch: Path) -> int:
    """Bytes on disk of a server without memories."""
    with BenchServer(scratch / "empty", probed=False):
        pass
    return disk_bytes(scratch / "empty")


async def measure_large(report: Report, scratch: Path, count: int, empty: int) -> None:
    """Disk and RAM of the fragments of one memory."""
    data = scratch / "large"
    with BenchServer(data, probed=False) as server:
        async with memstream.connect(server.address) as client:
            await fill_large(client, count)
    report.add_round(DISK_FRAGMENT, **{BYTES: (disk_bytes(data) - empty) / count})
    with BenchServer(data, probed=False) as server:
        async with memstream.connect(server.address) as client:
            await client.create_memory("disk/none")
            await client.memory("disk/none").recall_once("warm")
            before, _ = server.resident_mb()
            await client.memory("disk/large").recall_once("warm")
            after, _ = server.resident_mb()
    report.add_round(RAM_FRAGMENT, **{BYTES: (after - before) * 1e6 / count})


async def measure_many(report: Report, scratch: Path, size: Size, empty: int) -> None:
    """Disk and RAM of small memories, and the CPU of calls to them."""
    data, count = scratch / "many", MANY[size]
    with BenchServer(data, probed=False) as server:
        async with memstream.connect(server.address) as client:
            await fill_many(client, count)
    report.add_round(DISK_MEMORY, **{BYTES: (disk_bytes(data) - empty) / count})
    with BenchServer(data, probed=False, active_memories_max=count) as server:
        async with memstream.connect(server.address) as client:
            await client.memory("disk/user-0").recall_once("warm")
            before, _ = server.resident_mb()
            for place in range(1, count):
                await client.memory(f"disk/user-{place}").recall_once("warm")
            after, _ = server.resident_mb()
            report.add_round(RAM_MEMORY, **{BYTES: (after - before) * 1e6 / max(1, count - 1)})
            await measure_calls(report, server, client, size)
    with BenchServer(data, probed=False, active_memories_max=max(2, count // 10)) as server:
        async with memstream.connect(server.address) as client:
            talk, places = SentenceSource(4), itertools.cycle(range(count))
            turn = make_turn(client, talk, lambda _: next(places))
            await measure_cpu(report, server, COLD_TURNS, turn, CALLS[size])


async def measure_calls(report: Report, server: BenchServer, client: memstream.Client, size: Size) -> None:
    """The CPU of calls to memories in RAM."""
    talk = SentenceSource(3)
    flood = talk.make_observations(STREAMED[size])
    before = server.cpu_used().server
    async with client.memory("disk/user-0").observe("flood") as stream:
        for one in flood:
            await stream.send(one)
    used = server.cpu_used().server - before
    report.add_round(OBSERVATIONS, **{CPU: used / len(flood) * 1e6})

    async def recall(number: int) -> None:
        await client.memory(f"disk/user-{1 + number % WARM}").recall_once(talk.make_sentence())

    await measure_cpu(report, server, RECALLS, recall, CALLS[size])
    await measure_cpu(report, server, TURNS, make_turn(client, talk, lambda number: 1 + number % WARM), CALLS[size])


def make_turn(client: memstream.Client, talk: SentenceSource, place_of: Callable[[int], int]) -> Call:
    """A turn in the memory that `place_of` chooses for the number of a call."""

    async def take_turn(number: int) -> None:
        memory = client.memory(f"disk/user-{place_of(number)}")
        await memory.recall_once(talk.make_sentence())
        await memory.observe_batch(talk.make_observations(3))

    return take_turn


async def measure_cpu(report: Report, server: BenchServer, row: str, call: Call, count: int) -> None:
    """Add the server's CPU of `count` calls, IN_FLIGHT at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await call(number)

    before = server.cpu_used().server
    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    report.add_round(row, **{CPU: (server.cpu_used().server - before) / count * 1e6})


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """Run all rounds."""
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            scratch = Path(directory)
            empty = measure_empty(scratch)
            await measure_large(report, scratch, LARGE[size], empty)
            await measure_many(report, scratch, size, empty)


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((BYTES, CPU))
    report.more["size"] = size
    asyncio.run(measure_rounds(report, size, rounds or 1))
    return report


def make_claims(report: Report) -> list[Claim]:
    """The figures; aims only for turns, and not in miniature."""
    aims = {} if report.more["size"] == Size.TINY else AIMS
    return [
        make_claim(report, row, row, column, row, at_most(aims[row], "s") if row in aims else None)
        for row in report.rows
        for column in (BYTES, CPU)
        if report.round_values(row, column)
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
