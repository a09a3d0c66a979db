"""Time until an erased fragment is in no file, vs SQLite rewriting the same journal.

    python benchmarks/bench_erase.py [--full | --tiny] [--rounds N] [--json FILE]

10,000 (--full: 50,000) fragments in one long-term memory, indexed. Ten are erased while another memory observes and the
first one serves recalls. The other side is a bare VACUUM INTO of the same journal, made durable: an erasure that
rewrote the whole journal would cost at least that. The longest observe and recall meanwhile are shown as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from claims import Claim, make_claim, run_standalone
from recalls import wait_until_indexed
from report import Report, Size
from served import BenchServer

import memstream
from memstream import MemoryKind

COUNT = {Size.TINY: 50, Size.SHORT: 10_000, Size.FULL: 50_000}
ROUNDS = {Size.TINY: 1, Size.SHORT: 1, Size.FULL: 3}
BATCH = 500
ERASED = 10
ERASURE, VACUUM = "erase ten fragments", "bare VACUUM INTO of the journal"
OBSERVE, RECALL = "longest observe during the erasure", "longest recall during the erasure"
SECONDS = "time s"


async def fill_memory(memory: memstream.Memory, count: int) -> list[str]:
    """Returns all ids, once everything is in the index."""
    ids: list[str] = []
    for start in range(0, count, BATCH):
        places = range(start, min(start + BATCH, count))
        texts = [f"note {place}: the ferry number {place} leaves harbour" for place in places]
        ids += [outcome.fragment_id for outcome in (await memory.observe_batch(texts)).outcomes]
    await wait_until_indexed(memory)
    return ids


async def time_longest(call: Callable[[], Awaitable[object]], done: asyncio.Event) -> float:
    """The longest of consecutive calls until `done` is set, in seconds."""
    worst = 0.0
    while not done.is_set():
        begun = time.perf_counter()
        await call()
        worst = max(worst, time.perf_counter() - begun)
    return worst


def time_vacuum(journal: Path, target: Path) -> float:
    """Seconds of a VACUUM INTO until it is on disk."""
    began = time.perf_counter()
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as opened:
        opened.execute("VACUUM INTO ?", (str(target),))
    with target.open("rb") as file:
        os.fsync(file.fileno())
    target.unlink()
    return time.perf_counter() - began


async def measure_rounds(report: Report, count: int, rounds: int) -> None:
    """Run all rounds; each erases ten fragments."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with BenchServer(scratch / "data", index_flush_interval_s=2, index_from_fragments=0) as server:
            async with memstream.connect(server.address, timeout_s=600) as client:
                memory = await client.create_memory("bench/full", kind=MemoryKind.LONG_TERM)
                other = await client.create_memory("bench/other", kind=MemoryKind.LONG_TERM)
                ids = await fill_memory(memory, count)
                for number in range(rounds):
                    report.add_round(
                        VACUUM, **{SECONDS: time_vacuum(scratch / "data" / "journal.db", scratch / "anew.db")}
                    )
                    done = asyncio.Event()
                    waits = [
                        asyncio.create_task(time_longest(lambda: other.observe_batch(["a line"]), done)),
                        asyncio.create_task(time_longest(lambda: memory.recall_once("ferry number 17"), done)),
                    ]
                    begun = time.perf_counter()
                    chosen = ids[number * ERASED : (number + 1) * ERASED]
                    await client.finished(await memory.erase_fragments(chosen))
                    report.add_round(ERASURE, **{SECONDS: time.perf_counter() - begun})
                    done.set()
                    observed, recalled = await asyncio.gather(*waits)
                    report.add_round(OBSERVE, **{SECONDS: observed})
                    report.add_round(RECALL, **{SECONDS: recalled})


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((SECONDS,))
    report.more["fragments"] = COUNT[size]
    asyncio.run(measure_rounds(report, COUNT[size], rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about erasure."""
    suffix = f"{report.more['fragments']:,} remaining"
    return [make_claim(report, f"{row}, {suffix}", row, SECONDS, VACUUM) for row in (ERASURE, OBSERVE, RECALL)]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
