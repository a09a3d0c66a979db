"""Many memories, a tenth of them active: RAM of an active memory, and recall latency of active and inactive ones.

    python benchmarks/bench_many.py [--full | --tiny] [--rounds N] [--json FILE] [--strict]

10,000 memories (1,000 without --full) of ten fragments each; the server keeps a tenth of them in RAM. It is restarted
over the filled journal, so that it holds only what it has read. Questions go to active memories, then to inactive ones,
which are first read from the journal. Rounds alternate with the bare counterparts: echo + numpy scan + BM25 of the same
memory, and a search of a Milvus Lite with the same vectors in the same number of partitions.

Then each call of a small memory on a server with 1,000, 10,000 and (full) 100,000 memories, beside the same on a server
with few: holding.py. With --strict an aim that is missed fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from pathlib import Path

from bare import start_milvus_lite
from claims import Claim, at_most, make_claim, make_pause_claim, run_standalone
from echo import EchoServer
from holding import make_holding_claims, measure_holding
from recalls import COLUMNS, P50, P99, BareParts, RecallClient, Texts, fill_memories, measure_lite
from report import PAUSES, Report, Size
from served import BenchServer

import memstream

MEMORIES = {Size.TINY: 20, Size.SHORT: 1_000, Size.FULL: 10_000}
EACH = 10
"""Fragments per memory."""
ACTIVE_SHARE = 10
QUERIES = {Size.TINY: 2, Size.SHORT: 100, Size.FULL: 500}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 3}
PREFIX = "many/agent"
RESIDENT = "RSS KB"
ACTIVE, INACTIVE, LITE = "memstream, active memories", "memstream, inactive memories", "bare Milvus Lite search"
ECHO, LOOP, PARTS = "event loop of the bare echo", "event loop of memstream", "echo + numpy scan + BM25"
HELD, BYTES = "RSS per active memory", "bytes of its vectors and texts"


async def activate_memories(recalling: RecallClient, texts: Texts, active: int) -> None:
    """Make the first `active` memories the most recently used."""
    for place in range(active):
        await recalling.answer(place, texts.draw_question(place))


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """Fill, restart, and run all rounds."""
    memories, count = MEMORIES[size], QUERIES[size]
    active = memories // ACTIVE_SHARE
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with BenchServer(scratch / "data", index_flush_interval_s=2) as server:
            async with memstream.connect(server.address) as client:
                texts = await fill_memories(client, PREFIX, [EACH] * memories)
        echo = stack.enter_context(EchoServer(scratch))
        lite = await stack.enter_async_context(start_milvus_lite(scratch / "lite"))
        await lite.fill_collection(texts.vectors())
        server = stack.enter_context(BenchServer(scratch / "data", active_memories_max=active))
        client = await stack.enter_async_context(memstream.connect(server.address))
        recalling = await stack.enter_async_context(RecallClient(server, client, PREFIX))
        parts = BareParts(echo, texts, await recalling.answer(0, texts.draw_question(0)))
        before, _ = server.resident_mb()
        await activate_memories(recalling, texts, active)
        report.add_round(HELD, **{RESIDENT: (server.resident_mb()[0] - before) / active * 1e3})
        bare = sum(vectors.nbytes for vectors in parts.vectors) + sum(
            len(text) for held in texts.sentences for text in held
        )
        report.add_round(BYTES, **{RESIDENT: bare / memories / 1e3})
        others = itertools.cycle(range(active, memories))  # evicted long before their next turn
        for _ in range(rounds):
            await activate_memories(recalling, texts, active)
            asked = texts.draw_questions(count, active)
            await recalling.measure(report, ACTIVE, asked)
            await parts.measure(report, PARTS, asked)
            cold = [(place, texts.draw_question(place)) for place in itertools.islice(others, count)]
            since = time.monotonic()
            await recalling.measure_unary(report, INACTIVE, cold)
            report.add_pause(LOOP, server.longest_pause(since))
            await measure_lite(report, LITE, lite, texts, cold)
            report.add_pause(ECHO, parts.longest_pause())


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((*COLUMNS, RESIDENT, *PAUSES))
    report.more |= {"memories": MEMORIES[size], "size": size}
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    asyncio.run(measure_holding(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about many memories."""
    suffix = f"{report.more['memories']:,} memories, 10 % active"
    return [
        make_claim(report, f"recall p50 of an active memory, {suffix}", ACTIVE, P50, PARTS, at_most(1.5)),
        make_claim(report, f"recall p99 of an active memory, {suffix}", ACTIVE, P99, PARTS, at_most(2.5)),
        make_claim(report, f"recall p50 of an inactive memory, {suffix}", INACTIVE, P50, LITE, at_most(2)),
        make_claim(report, f"recall p99 of an inactive memory, {suffix}", INACTIVE, P99, LITE),
        make_pause_claim(report, f"longest event-loop pause, inactive memories recalled, {suffix}", LOOP, ECHO),
        make_claim(report, f"RSS per active memory of {EACH}, {suffix}", HELD, RESIDENT, BYTES),
        *make_holding_claims(report, report.more["size"]),
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
