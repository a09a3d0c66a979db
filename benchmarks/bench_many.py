"""Many memories of which a tenth is active: what an active one costs, and how long the others take to answer.

    python benchmarks/bench_many.py [--full | --tiny] [--rounds N] [--json FILE]

10,000 memories (1,000 without --full) of ten fragments each; a server keeps a tenth of them in RAM. It is started anew
over the filled journal, so that what it holds is what it has read. Questions go to the active ones, then to others,
each of which has to be read from the journal first, in turns with their bare counterparts: echo + numpy scan + BM25 of
the same memory, and a search of a Milvus Lite that holds the same vectors in the same number of partitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from pathlib import Path

from bare import milvus_lite
from claims import Claim, at_most, claim, pause, standalone
from echo import EchoServer
from recalls import COLUMNS, P50, P99, Parts, Recalling, Texts, fill, measure_lite
from report import PAUSES, Report, Size
from served import Served

import memstream

MEMORIES = {Size.TINY: 20, Size.SHORT: 1_000, Size.FULL: 10_000}
EACH = 10
"""Fragments of a memory."""
ACTIVE_SHARE = 10
QUERIES = {Size.TINY: 2, Size.SHORT: 100, Size.FULL: 500}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 3}
PREFIX = "many/agent"
RESIDENT = "RSS KB"
ACTIVE, INACTIVE, LITE = "memstream, active memories", "memstream, inactive memories", "bare Milvus Lite search"
ECHO, LOOP, PARTS = "bare echo's event loop", "memstream's event loop", "echo + numpy scan + BM25"
HELD, BYTES = "RAM of an active memory", "bytes of its vectors and texts"


async def activate(recalling: Recalling, texts: Texts, active: int) -> None:
    """The first `active` memories are those used last."""
    for place in range(active):
        await recalling.answer(place, texts.question(place))


async def measure(report: Report, size: Size, rounds: int) -> None:
    """Fill, start anew, and all rounds."""
    memories, count = MEMORIES[size], QUERIES[size]
    active = memories // ACTIVE_SHARE
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with Served(scratch / "data", index_flush_interval_s=2) as server:
            async with memstream.connect(server.address) as client:
                texts = await fill(client, PREFIX, [EACH] * memories)
        echo = stack.enter_context(EchoServer(scratch))
        lite = await stack.enter_async_context(milvus_lite(scratch / "lite"))
        await lite.fill(texts.vectors())
        server = stack.enter_context(Served(scratch / "data", active_memories_max=active))
        client = await stack.enter_async_context(memstream.connect(server.address))
        recalling = await stack.enter_async_context(Recalling(server, client, PREFIX))
        parts = Parts(echo, texts, await recalling.answer(0, texts.question(0)))
        before, _ = server.resident_mb()
        await activate(recalling, texts, active)
        report.add(HELD, **{RESIDENT: (server.resident_mb()[0] - before) / active * 1e3})
        bare = sum(vectors.nbytes for vectors in parts.vectors) + sum(len(text) for held in texts.held for text in held)
        report.add(BYTES, **{RESIDENT: bare / memories / 1e3})
        others = itertools.cycle(range(active, memories))  # whose turn comes again have long been evicted
        for _ in range(rounds):
            await activate(recalling, texts, active)
            asked = texts.questions(count, active)
            await recalling.measure(report, ACTIVE, asked)
            await parts.measure(report, PARTS, asked)
            cold = [(place, texts.question(place)) for place in itertools.islice(others, count)]
            since = time.monotonic()
            await recalling.measure_once(report, INACTIVE, cold)
            report.pause(LOOP, server.pause(since))
            await measure_lite(report, LITE, lite, texts, cold)
            report.pause(ECHO, parts.pause())


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report((*COLUMNS, RESIDENT, *PAUSES))
    report.more["memories"] = MEMORIES[size]
    asyncio.run(measure(report, size, rounds or ROUNDS[size]))
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of many memories."""
    said = f"{report.more['memories']:,} memories, a tenth active"
    return [
        claim(report, f"recall p50 of an active one, {said}", ACTIVE, P50, PARTS, at_most(1.5)),
        claim(report, f"recall p99 of an active one, {said}", ACTIVE, P99, PARTS, at_most(2.5)),
        claim(report, f"recall p50 of an inactive one, {said}", INACTIVE, P50, LITE, at_most(2)),
        claim(report, f"recall p99 of an inactive one, {said}", INACTIVE, P99, LITE),
        pause(report, f"event loop's longest pause, inactive ones asked, {said}", LOOP, ECHO),
        claim(report, f"RSS per active memory of {EACH}, {said}", HELD, RESIDENT, BYTES),
    ]


if __name__ == "__main__":
    standalone(__doc__, run, claims)
