"""One memory too large for RAM: recalls whose vectors are searched in Milvus Lite, and what its fragments weigh.

    python benchmarks/bench_large.py [--full | --tiny] [--rounds N] [--json FILE]

100,000 fragments in one memory (20,000 without --full, and the server told to hold only 1,000 vectors of a memory). The
server is started anew over the filled journal. Beside it, in turns with it: echo + numpy scan + BM25 of the same
fragments, and a search of a bare Milvus Lite that holds the same vectors.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

from bare import milvus_lite
from claims import Claim, at_most, claim, pause, standalone
from echo import EchoServer
from recalls import COLUMNS, P50, P99, Parts, Recalling, fill, measure_lite
from report import PAUSES, Report, Size
from served import Served

import memstream

COUNT = {Size.TINY: 60, Size.SHORT: 20_000, Size.FULL: 100_000}
IN_MEMORY_MAX = {Size.TINY: 10, Size.SHORT: 1_000, Size.FULL: 20_000}
"""The last one is the default."""
QUERIES = {Size.TINY: 3, Size.SHORT: 50, Size.FULL: 200}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 5}
PREFIX = "large/agent"
SETTLED_S = 1.0
SMALL = 10
"""Fragments of another memory, asked first, so that waking the large one up is no server's first recall."""
RESIDENT, WOKEN = "RSS bytes", "first answer ms"
OURS, LITE, PARTS = "memstream", "bare Milvus Lite search", "echo + numpy scan + BM25"
LOOP, WAKING, ECHO = "memstream's event loop", "memstream's event loop, waking up", "bare echo's event loop"
HELD, BYTES = "RAM of a fragment", "bytes of its vector and text"


async def measure(report: Report, size: Size, rounds: int) -> dict[str, float]:
    """Fill, start anew, and all rounds; the steps of a recall."""
    count, queries, steps = COUNT[size], QUERIES[size], dict[str, float]()
    settings: dict[str, Any] = {"index_flush_interval_s": 2, "dense_in_memory_max": IN_MEMORY_MAX[size]}
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with Served(scratch / "data", **settings) as server:
            async with memstream.connect(server.address) as client:
                texts = await fill(client, PREFIX, [count, SMALL])
        echo = stack.enter_context(EchoServer(scratch))
        server = stack.enter_context(Served(scratch / "data", **settings))
        client = await stack.enter_async_context(memstream.connect(server.address))
        recalling = await stack.enter_async_context(Recalling(server, client, PREFIX))
        await recalling.answer(1, texts.question(1))
        await asyncio.sleep(SETTLED_S)
        before, since = server.resident_mb()[0], time.monotonic()
        began = time.perf_counter()
        answer = await recalling.answer(0, texts.question(0))
        woken = time.perf_counter() - began
        report.pause(WAKING, server.pause(since))
        report.add(HELD, **{RESIDENT: (server.resident_mb()[0] - before) / count * 1e6, WOKEN: woken * 1e3})
        parts = Parts(echo, texts, answer)
        bare = parts.vectors[0].nbytes + sum(map(len, texts.held[0]))
        report.add(BYTES, **{RESIDENT: bare / count})
        lite = await stack.enter_async_context(milvus_lite(scratch / "lite"))
        await lite.fill(parts.vectors)
        for _ in range(rounds):
            asked, since = texts.questions(queries, 1), time.monotonic()
            steps = await recalling.measure(report, OURS, asked)
            report.pause(LOOP, server.pause(since))
            await parts.measure(report, PARTS, asked)
            report.pause(ECHO, parts.pause())
            await measure_lite(report, LITE, lite, texts, asked)
    return steps


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report((*COLUMNS, RESIDENT, WOKEN, *PAUSES))
    report.more["fragments"] = COUNT[size]
    report.more["steps of a recall, ms"] = asyncio.run(measure(report, size, rounds or ROUNDS[size]))
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of large memories."""
    said = f"one memory of {report.more['fragments']:,}"
    return [
        claim(report, f"recall p50, {said}", OURS, P50, PARTS, at_most(1.5)),
        claim(report, f"recall p99, {said}", OURS, P99, PARTS, at_most(2.5)),
        claim(report, f"recall p50 beside the index, {said}", OURS, P50, LITE, at_most(2)),
        pause(report, f"event loop's longest pause, {said}", LOOP, ECHO),
        pause(report, f"event loop's longest pause, activation, {said}", WAKING, ECHO),
        claim(report, f"RSS per fragment, {said}", HELD, RESIDENT, BYTES),
    ]


if __name__ == "__main__":
    standalone(__doc__, run, claims)
