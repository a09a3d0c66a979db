"""How fast a memory is exported and imported through the SDK, beside a copy of the same journal file.

    python benchmarks/bench_transfer.py [--full | --tiny] [--rounds N] [--json FILE]

One memory of 10,000 (`--full`: 100,000) fragments, hashing. The copy is SQLite's own online backup of the journal, made
durable: what `memstream backup` does. It moves the same fragments with everything else of the store, and no other
server, schema or model could read them from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import tempfile
import time
from pathlib import Path

from claims import CPU, Claim, claim, standalone
from report import Report, Size, own_cpu_s
from served import Served
from texts import Talk

import memstream
from memstream import MemoryKind

COUNT = {Size.TINY: 50, Size.SHORT: 10_000, Size.FULL: 100_000}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 1}
BATCH = 1_000
RATE = "fragments /s"
COPY = "copy of the SQLite file"
COLUMNS = (RATE, "seconds", "MB", CPU)


async def filled(client: memstream.Client, count: int) -> None:
    memory = await client.create_memory("bench/joy", kind=MemoryKind.LONG_TERM)
    talk = Talk()
    for _ in range(0, count, BATCH):
        await memory.observe_batch(talk.observations(min(count, BATCH)))


async def exported(client: memstream.Client, file: Path, vectors: bool) -> None:
    with file.open("wb") as out:
        async for part in client.export("bench", "joy", include_vectors=vectors):
            out.write(part.lines)


async def imported(client: memstream.Client, file: Path, name: str) -> None:
    ended = await client.finished(await client.import_("bench", file, memory=name))
    assert ended.state is memstream.OperationState.SUCCEEDED, ended


def copied(journal: Path, target: Path) -> None:
    with contextlib.closing(sqlite3.connect(journal)) as old, contextlib.closing(sqlite3.connect(target)) as new:
        old.backup(new)
    with target.open("rb") as file:
        os.fsync(file.fileno())


async def measure(report: Report, count: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with Served(scratch / "data") as server:
            async with memstream.connect(server.address) as client:
                await filled(client, count)
                journal = scratch / "data" / "journal.db"
                for number in range(rounds):
                    copy = scratch / f"{number}.db"
                    own, began = own_cpu_s(), time.perf_counter()
                    await asyncio.to_thread(copied, journal, copy)
                    seconds = time.perf_counter() - began
                    _enter(report, COPY, count, seconds, copy, own_cpu_s() - own)
                    for vectors in (False, True):
                        what = " with vectors" if vectors else ""
                        file = scratch / f"{number}-{vectors}.jsonl"
                        before, began = server.cpu(), time.perf_counter()
                        await exported(client, file, vectors)
                        seconds, used = time.perf_counter() - began, server.cpu().since(before).server
                        _enter(report, f"export{what}", count, seconds, file, used)
                        name = f"copy-{number}-{vectors}"
                        before, began = server.cpu(), time.perf_counter()
                        await imported(client, file, name)
                        seconds, used = time.perf_counter() - began, server.cpu().since(before).server
                        _enter(report, f"import{what}", count, seconds, file, used)
                        await client.delete_memory(f"bench/{name}")


def _enter(report: Report, row: str, count: int, seconds: float, file: Path, cpu_s: float) -> None:
    figures = {
        RATE: count / seconds,
        "seconds": seconds,
        "MB": file.stat().st_size / 1e6,
        CPU: cpu_s / count * 1e6,
    }
    report.add(row, **figures)


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report(COLUMNS)
    asyncio.run(measure(report, COUNT[size], rounds or ROUNDS[size]))
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of export and import."""
    rows = ("export", "import", "export with vectors", "import with vectors")
    return [claim(report, row, row, RATE, COPY) for row in rows]


if __name__ == "__main__":
    standalone(__doc__, run, claims)
