"""How long it takes until an erased fragment is in no file, beside SQLite writing the same journal anew.

    python benchmarks/bench_erase.py [--full | --tiny] [--rounds N] [--json FILE]

10,000 (--full: 50,000) fragments in one long-term memory, indexed; then ten are erased while another memory observes
and the first one is recalled from. The other side is a bare VACUUM INTO of the same journal, made durable: an erasure
writes all of it anew, and Milvus Lite's files too. Beside it the longest that an observation and a recall had to wait
meanwhile.
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

from claims import Claim, claim, standalone
from recalls import settle
from report import Report, Size
from served import Served

import memstream
from memstream import MemoryKind

COUNT = {Size.TINY: 50, Size.SHORT: 10_000, Size.FULL: 50_000}
ROUNDS = {Size.TINY: 1, Size.SHORT: 1, Size.FULL: 3}
BATCH = 500
ERASED = 10
ERASURE, VACUUM = "erasure of ten fragments", "bare VACUUM INTO of the journal"
OBSERVE, RECALL = "longest observe meanwhile", "longest recall meanwhile"
SECONDS = "time s"


async def filled(memory: memstream.Memory, count: int) -> list[str]:
    """All ids, once everything is in the index."""
    ids: list[str] = []
    for start in range(0, count, BATCH):
        places = range(start, min(start + BATCH, count))
        texts = [f"note {place}: the ferry number {place} leaves harbour" for place in places]
        ids += [outcome.fragment_id for outcome in (await memory.observe_batch(texts)).outcomes]
    await settle(memory)
    return ids


async def longest(call: Callable[[], Awaitable[object]], done: asyncio.Event) -> float:
    """The longest of calls made one after the other until then, in seconds."""
    worst = 0.0
    while not done.is_set():
        begun = time.perf_counter()
        await call()
        worst = max(worst, time.perf_counter() - begun)
    return worst


def written_anew(journal: Path, target: Path) -> float:
    """Seconds of a VACUUM INTO, until it is on the disk."""
    began = time.perf_counter()
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as opened:
        opened.execute("VACUUM INTO ?", (str(target),))
    with target.open("rb") as file:
        os.fsync(file.fileno())
    target.unlink()
    return time.perf_counter() - began


async def measure(report: Report, count: int, rounds: int) -> None:
    """Ten fewer fragments each round."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with Served(scratch / "data", index_flush_interval_s=2) as server:
            async with memstream.connect(server.address, timeout_s=600) as client:
                memory = await client.create_memory("bench/full", kind=MemoryKind.LONG_TERM)
                other = await client.create_memory("bench/other", kind=MemoryKind.LONG_TERM)
                ids = await filled(memory, count)
                for number in range(rounds):
                    report.add(VACUUM, **{SECONDS: written_anew(scratch / "data" / "journal.db", scratch / "anew.db")})
                    done = asyncio.Event()
                    waits = [
                        asyncio.create_task(longest(lambda: other.observe_batch(["a line"]), done)),
                        asyncio.create_task(longest(lambda: memory.recall_once("ferry number 17"), done)),
                    ]
                    begun = time.perf_counter()
                    chosen = ids[number * ERASED : (number + 1) * ERASED]
                    await client.finished(await memory.erase_fragments(chosen))
                    report.add(ERASURE, **{SECONDS: time.perf_counter() - begun})
                    done.set()
                    observed, recalled = await asyncio.gather(*waits)
                    report.add(OBSERVE, **{SECONDS: observed})
                    report.add(RECALL, **{SECONDS: recalled})


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report((SECONDS,))
    report.more["fragments"] = COUNT[size]
    asyncio.run(measure(report, COUNT[size], rounds or ROUNDS[size]))
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of erasing."""
    said = f"{report.more['fragments']:,} stay"
    return [claim(report, f"{row}, {said}", row, SECONDS, VACUUM) for row in (ERASURE, OBSERVE, RECALL)]


if __name__ == "__main__":
    standalone(__doc__, run, claims)
