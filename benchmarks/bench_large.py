"""One large memory: recalls whose vectors are in RAM, and such that are searched in Milvus Lite; what fragments weigh.

    python benchmarks/bench_large.py [--full | --tiny] [--rounds N] [--json FILE]

100,000 fragments in one memory (20,000 without --full). The server is started anew over the filled journal, once with
the defaults, which hold the vectors of such a memory in RAM, and once told to hold none of so many. Beside it, in turns
with it: echo + numpy scan + BM25 of the same fragments, and a search of a bare Milvus Lite that holds the same vectors.
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
from recalls import COLUMNS, P50, P99, Parts, Recalling, Texts, fill, measure_lite
from report import PAUSES, Report, Size
from served import Served

import memstream

COUNT = {Size.TINY: 60, Size.SHORT: 20_000, Size.FULL: 100_000}
IN_MEMORY_MAX = 10
"""Vectors of a memory that a server may hold that is to search the index."""
SETTINGS: dict[str, Any] = {"index_flush_interval_s": 2}
QUERIES = {Size.TINY: 3, Size.SHORT: 50, Size.FULL: 200}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 3}
PREFIX = "large/agent"
SETTLED_S = 1.0
SMALL = 10
"""Fragments of another memory, asked first, so that waking the large one up is no server's first recall."""
RESIDENT, WOKEN = "RSS bytes", "first answer ms"
IN_RAM, IN_INDEX = "vectors in RAM", "vectors in the index"
WAYS: dict[str, dict[str, Any]] = {IN_RAM: {}, IN_INDEX: {"dense_in_memory_max": IN_MEMORY_MAX}}
LITE, PARTS, ECHO = "bare Milvus Lite search", "echo + numpy scan + BM25", "bare echo's event loop"
BYTES = "bytes of its vector and text"


def rows(way: str) -> tuple[str, str, str, str]:
    """Names of the rows of one way: recalls, the event loop, the same while the memory is activated, RAM."""
    return f"memstream, {way}", f"event loop, {way}", f"event loop, waking up, {way}", f"RAM of a fragment, {way}"


async def measure(report: Report, size: Size, rounds: int) -> dict[str, dict[str, float]]:
    """Fill, start anew each way, and all rounds; the steps of a recall."""
    steps: dict[str, dict[str, float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with Served(scratch / "data", **SETTINGS) as server:
            async with memstream.connect(server.address) as client:
                texts = await fill(client, PREFIX, [COUNT[size], SMALL])
        vectors = texts.vectors()
        report.add(BYTES, **{RESIDENT: (vectors[0].nbytes + sum(map(len, texts.held[0]))) / COUNT[size]})
        echo = stack.enter_context(EchoServer(scratch))
        lite = await stack.enter_async_context(milvus_lite(scratch / "lite"))
        await lite.fill(vectors)
        for way, settings in WAYS.items():
            with Served(scratch / "data", **SETTINGS, **settings) as server:
                async with memstream.connect(server.address) as client, Recalling(server, client, PREFIX) as recalling:
                    parts = Parts(echo, texts, await woken(report, way, server, recalling, texts))
                    for _ in range(rounds):
                        asked = texts.questions(QUERIES[size], 1)
                        steps[way] = await one_round(report, way, server, recalling, asked)
                        await parts.measure(report, PARTS, asked)
                        report.pause(ECHO, parts.pause())
                        await measure_lite(report, LITE, lite, texts, asked)
    return steps


async def woken(report: Report, way: str, server: Served, recalling: Recalling, texts: Texts) -> memstream.Answer:
    """The first answer of a server that was started anew."""
    _, _, waking, held = rows(way)
    await recalling.answer(1, texts.question(1))
    await asyncio.sleep(SETTLED_S)
    before, since = server.resident_mb()[0], time.monotonic()
    began = time.perf_counter()
    answer = await recalling.answer(0, texts.question(0))
    took = time.perf_counter() - began
    report.pause(waking, server.pause(since))
    resident = (server.resident_mb()[0] - before) / len(texts.held[0]) * 1e6
    report.add(held, **{RESIDENT: resident, WOKEN: took * 1e3})
    return answer


async def one_round(
    report: Report, way: str, server: Served, recalling: Recalling, asked: list[tuple[int, str]]
) -> dict[str, float]:
    """Recalls, and the event loop meanwhile."""
    ours, loop, _, _ = rows(way)
    since = time.monotonic()
    steps = await recalling.measure(report, ours, asked)
    report.pause(loop, server.pause(since))
    return steps


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report((*COLUMNS, RESIDENT, WOKEN, *PAUSES))
    report.more["fragments"] = COUNT[size]
    report.more["steps of a recall, ms"] = asyncio.run(measure(report, size, rounds or ROUNDS[size]))
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of large memories."""
    return [one for way in WAYS for one in claims_of(report, way)]


def claims_of(report: Report, way: str) -> list[Claim]:
    """What is said of one way."""
    said = f"one memory of {report.more['fragments']:,}, {way}"
    ours, loop, waking, held = rows(way)
    return [
        claim(report, f"recall p50, {said}", ours, P50, PARTS, at_most(1.5)),
        claim(report, f"recall p99, {said}", ours, P99, PARTS, at_most(2.5)),
        claim(report, f"recall p50 beside the index, {said}", ours, P50, LITE, at_most(2)),
        pause(report, f"event loop's longest pause, {said}", loop, ECHO),
        pause(report, f"event loop's longest pause, activation, {said}", waking, ECHO),
        claim(report, f"RSS per fragment, {said}", held, RESIDENT, BYTES),
    ]


if __name__ == "__main__":
    standalone(__doc__, run, claims)
