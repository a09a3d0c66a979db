"""Warm recall of one memory by its size: 1,000 to 100,000 fragments on one server.

    python benchmarks/bench_sizes.py [--full | --tiny] [--rounds N] [--json FILE]

One memory of each size (10,000 at most without --full), in a server with its defaults. A round asks the memories in
turn. The figures are p50 of a recall and the server's CPU per recall, work after the answer included, vs the smallest
memory of 1,000. RSS per fragment is the growth of the server when a memory is activated.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

from claims import Claim, at_most, make_claim, run_standalone
from recalls import COLUMNS, P50, RecallClient, Texts, fill_memories
from report import Report, Size
from served import BenchServer

import memstream

SIZES = {Size.TINY: (20, 40), Size.SHORT: (1_000, 10_000), Size.FULL: (1_000, 10_000, 30_000, 100_000)}
QUERIES = {Size.TINY: 3, Size.SHORT: 100, Size.FULL: 200}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 5}
RESIDENT, SERVER = "RSS bytes", "server µs"
PREFIX = "sizes/agent"
SETTLED_S = 1.0
"""Work after the last answers ends, and RSS is read, after this time."""
AIMS = {10_000: 2.5, 100_000: 8.0}
"""Times the recall of the memory of 1,000."""
RESIDENT_MAX = 1_536
"""Bytes per fragment of the largest memory."""


def row_name(count: int) -> str:
    """The row of the memory of that size."""
    return f"memory of {count:,}"


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """Fill, restart, activate each memory, and ask all of them in each round."""
    counts = SIZES[size]
    with tempfile.TemporaryDirectory() as scratch:
        with BenchServer(Path(scratch) / "data", index_flush_interval_s=2) as server:
            async with memstream.connect(server.address) as client:
                texts = await fill_memories(client, PREFIX, counts)
        async with contextlib.AsyncExitStack() as stack:
            server = stack.enter_context(BenchServer(Path(scratch) / "data", index_flush_interval_s=2))
            client = await stack.enter_async_context(memstream.connect(server.address))
            recalling = await stack.enter_async_context(RecallClient(server, client, PREFIX))
            for place, count in enumerate(counts):
                await activate(report, server, recalling, texts, place, count)
            for _ in range(rounds):
                for place, count in enumerate(counts):
                    asked = [(place, texts.draw_question(place)) for _ in range(QUERIES[size])]
                    await recalling.measure(report, row_name(count), asked)


async def activate(
    report: Report, server: BenchServer, recalling: RecallClient, texts: Texts, place: int, count: int
) -> None:
    """The first answers of a memory, and the growth of the server."""
    before = server.resident_mb()[0]
    for _ in range(3):
        await recalling.answer(place, texts.draw_question(place))
    await asyncio.sleep(SETTLED_S)
    report.add_round(f"RSS, {row_name(count)}", **{RESIDENT: (server.resident_mb()[0] - before) / count * 1e6})


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((*COLUMNS, RESIDENT))
    report.more["sizes"] = list(SIZES[size])
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about every size but the smallest, and about the RAM of the largest."""
    smallest, *others = report.more["sizes"]
    claims = []
    for count in others:
        aim = at_most(AIMS[count]) if count in AIMS else None
        ours, theirs = row_name(count), row_name(smallest)
        claims.append(make_claim(report, f"recall p50, {ours} vs {smallest:,}", ours, P50, theirs, aim))
        claims.append(make_claim(report, f"server CPU of a recall, {ours} vs {smallest:,}", ours, SERVER, theirs, aim))
    largest, least = f"RSS, {row_name(others[-1])}", f"RSS, {row_name(smallest)}"
    aim = at_most(RESIDENT_MAX, "bytes") if others[-1] >= 100_000 else None
    return [*claims, make_claim(report, f"RSS per fragment, {row_name(others[-1])}", largest, RESIDENT, least, aim)]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
