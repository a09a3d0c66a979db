"""Export and import rates through the SDK, vs a copy of the same journal file.

    python benchmarks/bench_transfer.py [--full | --tiny] [--rounds N] [--json FILE]

One memory of 10,000 (`--full`: 100,000) fragments, hashing. The copy is SQLite's own online backup of the journal, made
durable, as `memstream backup` does. It copies the same fragments with everything else in the store, in a form that no
other server, schema or model can read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import tempfile
import time
from pathlib import Path

from claims import CPU, Claim, make_claim, run_standalone
from report import Report, Size, own_cpu_s
from served import BenchServer
from texts import SentenceSource

import memstream
from memstream import MemoryKind

COUNT = {Size.TINY: 50, Size.SHORT: 10_000, Size.FULL: 100_000}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 1}
BATCH = 1_000
RATE = "fragments /s"
COPY = "copy of the SQLite file"
COLUMNS = (RATE, "seconds", "MB", CPU)


async def fill_memory(client: memstream.Client, count: int) -> None:
    memory = await client.create_memory("bench/joy", kind=MemoryKind.LONG_TERM)
    talk = SentenceSource()
    for _ in range(0, count, BATCH):
        await memory.observe_batch(talk.make_observations(min(count, BATCH)))


async def export_memory(client: memstream.Client, file: Path, vectors: bool) -> None:
    with file.open("wb") as out:
        async for part in client.export("bench", "joy", include_vectors=vectors):
            out.write(part.lines)


async def import_memory(client: memstream.Client, file: Path, name: str) -> None:
    ended = await client.finished(await client.import_("bench", file, memory=name))
    assert ended.state is memstream.OperationState.SUCCEEDED, ended


def copy_journal(journal: Path, target: Path) -> None:
    with contextlib.closing(sqlite3.connect(journal)) as old, contextlib.closing(sqlite3.connect(target)) as new:
        old.backup(new)
    with target.open("rb") as file:
        os.fsync(file.fileno())


async def measure_rounds(report: Report, count: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with BenchServer(scratch / "data") as server:
            async with memstream.connect(server.address) as client:
                await fill_memory(client, count)
                journal = scratch / "data" / "journal.db"
                for number in range(rounds):
                    copy = scratch / f"{number}.db"
                    own, began = own_cpu_s(), time.perf_counter()
                    await asyncio.to_thread(copy_journal, journal, copy)
                    seconds = time.perf_counter() - began
                    _add_row(report, COPY, count, seconds, copy, own_cpu_s() - own)
                    for vectors in (False, True):
                        what = " with vectors" if vectors else ""
                        file = scratch / f"{number}-{vectors}.jsonl"
                        before, began = server.cpu_used(), time.perf_counter()
                        await export_memory(client, file, vectors)
                        seconds, used = time.perf_counter() - began, server.cpu_used().since(before).server
                        _add_row(report, f"export{what}", count, seconds, file, used)
                        name = f"copy-{number}-{vectors}"
                        before, began = server.cpu_used(), time.perf_counter()
                        await import_memory(client, file, name)
                        seconds, used = time.perf_counter() - began, server.cpu_used().since(before).server
                        _add_row(report, f"import{what}", count, seconds, file, used)
                        await client.delete_memory(f"bench/{name}")


def _add_row(report: Report, row: str, count: int, seconds: float, file: Path, cpu_s: float) -> None:
    figures = {
        RATE: count / seconds,
        "seconds": seconds,
        "MB": file.stat().st_size / 1e6,
        CPU: cpu_s / count * 1e6,
    }
    report.add_round(row, **figures)


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report(COLUMNS)
    asyncio.run(measure_rounds(report, COUNT[size], rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about export and import."""
    rows = ("export", "import", "export with vectors", "import with vectors")
    return [make_claim(report, row, row, RATE, COPY) for row in rows]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
