"""How long a memory that is not in RAM takes to answer: what waking it up costs.

    python benchmarks/bench_cold.py [--full | --tiny] [--rounds N] [--json FILE]

Two memories of 1,000 and two of 10,000 fragments, on a server that keeps one memory in RAM: asked in turns, each answer
is the first one of a memory just read from the journal. Beside it, in turns with it: the same memory asked again, the
same rows read bare from the same SQLite file, and a search of a Milvus Lite that holds the same vectors.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import tempfile
import time
from pathlib import Path

from bare import milvus_lite
from claims import Claim, at_most, claim, pause, standalone
from echo import EchoServer
from recalls import COLUMNS, P50, P99, Parts, Recalling, enter, fill, measure_lite
from report import PAUSES, Report, Size, own_cpu_s
from served import Served

import memstream

SIZES = {Size.TINY: (20,), Size.SHORT: (1_000, 10_000), Size.FULL: (1_000, 10_000)}
"""Fragments of a memory; there are two of each size."""
QUERIES = {Size.TINY: 2, Size.SHORT: 10, Size.FULL: 30}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 5}
PREFIX = "cold/agent"
ROWS = (
    "SELECT payload, access_count, access_time_us, terms FROM fragments WHERE key BETWEEN ? AND ? ORDER BY key",
    "SELECT key, vector FROM vectors WHERE key BETWEEN ? AND ? ORDER BY key",
)
"""What waking a memory up reads (adapters/journal/image.py), but for the few rows of its short-term side."""


def read(journal: Path, place: int) -> float:
    """Seconds to read all rows of that memory from the journal, on a connection of its own."""
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as opened:
        name = f"agent-{place}"
        (number,) = opened.execute("SELECT number FROM memories WHERE name = ?", (name,)).fetchone()
        began = time.perf_counter()
        for statement in ROWS:
            opened.execute(statement, (number << 32, (number + 1 << 32) - 1)).fetchall()
        return time.perf_counter() - began


async def measure(report: Report, size: Size, rounds: int) -> None:
    """All sizes in every round."""
    sizes, count = SIZES[size], QUERIES[size]
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        echo = stack.enter_context(EchoServer(scratch))
        server = stack.enter_context(Served(scratch / "data", index_flush_interval_s=2, active_memories_max=1))
        client = await stack.enter_async_context(memstream.connect(server.address))
        texts = await fill(client, PREFIX, [each for each in sizes for _ in range(2)])
        recalling = await stack.enter_async_context(Recalling(server, client, PREFIX))
        parts = Parts(echo, texts, await recalling.answer(0, texts.question(0)))
        lite = await stack.enter_async_context(milvus_lite(scratch / "lite"))
        await lite.fill(parts.vectors)
        for _ in range(rounds):
            for at, each in enumerate(sizes):
                turns = [(2 * at + turn % 2, texts.question(2 * at + turn % 2)) for turn in range(count)]
                await recalling.answer(*turns[1])
                since = time.monotonic()
                await recalling.measure(report, _cold(each), turns)
                report.pause(_loop(each), server.pause(since))
                warm = [(turns[-1][0], text) for _, text in turns]
                await recalling.measure(report, _warm(each), warm)
                own = own_cpu_s()
                seconds = [await asyncio.to_thread(read, scratch / "data" / "journal.db", place) for place, _ in turns]
                enter(report, _rows(each), seconds, own_cpu_s() - own)
                await measure_lite(report, _lite(each), lite, texts, turns)
                await parts.measure(report, _parts(each), turns)
                report.pause(_echo_loop(each), parts.pause())


def _cold(each: int) -> str:
    return f"memstream, cold, {each:,}"


def _warm(each: int) -> str:
    return f"memstream, warm, {each:,}"


def _rows(each: int) -> str:
    return f"the same rows read from SQLite, {each:,}"


def _lite(each: int) -> str:
    return f"bare Milvus Lite search, {each:,}"


def _parts(each: int) -> str:
    return f"echo + numpy scan + BM25, {each:,}"


def _loop(each: int) -> str:
    return f"memstream's event loop, cold, {each:,}"


def _echo_loop(each: int) -> str:
    return f"bare echo's event loop, {each:,}"


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report((*COLUMNS, *PAUSES))
    report.more["sizes"] = SIZES[size]
    asyncio.run(measure(report, size, rounds or ROUNDS[size]))
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of inactive memories."""
    told: list[Claim] = []
    for each in report.more["sizes"]:
        said = f"inactive memory of {each:,}"
        told += [
            claim(report, f"recall p50, activation included, {said}", _cold(each), P50, _lite(each), at_most(2)),
            claim(report, f"recall p99, activation included, {said}", _cold(each), P99, _lite(each)),
            claim(report, f"the same beside its rows, {said}", _cold(each), P50, _rows(each), at_most(150, "ms")),
            pause(report, f"event loop's longest pause, {said}", _loop(each), _echo_loop(each)),
        ]
    return told


if __name__ == "__main__":
    standalone(__doc__, run, claims)
