"""The events of one fragment (ListFragmentEvents) by the size of its memory: 2,000 to 200,000 fragments on one server.

    python benchmarks/bench_life.py [--full | --tiny] [--rounds N] [--json FILE]

Three changes of the first fragment lie in the first half, at the half and at the end of each log. A round asks the
memories in turn. The other side is the smallest memory.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from claims import CPU, Claim, at_most, make_claim, run_standalone
from report import Report, Size
from served import BenchServer

import memstream

SIZES = {Size.TINY: (20, 40), Size.SHORT: (2_000, 20_000), Size.FULL: (2_000, 20_000, 200_000)}
CALLS = {Size.TINY: 3, Size.SHORT: 100, Size.FULL: 100}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 5}
BATCH = 30
AT_ONCE = 16
"""Batches in flight while a memory is filled."""
P50 = "p50 ms"
AIM = 2.0
"""Times the smallest memory."""
CHANGES = 3
"""Of the fragment that is asked for."""


def row_name(count: int) -> str:
    """The row of the memory of that size."""
    return f"memory of {count:,}"


async def fill_memory(memory: memstream.Memory, count: int) -> str:
    """Returns the id of the first fragment."""
    first = (await memory.observe_batch(["The ferry leaves at noon."])).outcomes[0].fragment_id
    for part in range(CHANGES):
        for start in range(1 + part * count // CHANGES, (part + 1) * count // CHANGES, BATCH * AT_ONCE):
            end = min(start + BATCH * AT_ONCE, (part + 1) * count // CHANGES)
            batches = [
                [f"note {place}: ferry number {place} leaves" for place in range(low, min(low + BATCH, end))]
                for low in range(start, end, BATCH)
            ]
            await asyncio.gather(*map(memory.observe_batch, batches))
        await memory.update_fragment(first, importance=0.1 * part)
    return first


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """Fill all memories, then ask them in turn."""
    with tempfile.TemporaryDirectory() as scratch, BenchServer(Path(scratch) / "data") as server:
        async with memstream.connect(server.address) as client:
            asked = []
            for place, count in enumerate(SIZES[size]):
                memory = await client.create_memory(f"life/m-{place}")
                asked.append((row_name(count), memory, await fill_memory(memory, count)))
            for _ in range(rounds):
                for row, memory, id in asked:
                    before, took = server.cpu_used(), []
                    for _ in range(CALLS[size]):
                        began = time.perf_counter()
                        found = [event async for event in memory.fragment_events(id)]
                        took.append(time.perf_counter() - began)
                        changes = sum(event.type is memstream.EventType.UPDATED for event in found)
                        assert changes == CHANGES, found
                    used = server.cpu_used().since(before).total / CALLS[size]
                    report.add_round(row, **{P50: sorted(took)[len(took) // 2] * 1e3, CPU: used * 1e6})


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((P50, CPU))
    report.more["sizes"] = list(SIZES[size])
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about every size but the smallest."""
    smallest, *others = report.more["sizes"]
    return [
        make_claim(
            report,
            f"events of a fragment, {column}, {row_name(count)}",
            row_name(count),
            column,
            row_name(smallest),
            at_most(AIM),
        )
        for count in others
        for column in (P50, CPU)
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
