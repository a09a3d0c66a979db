"""Throughput and latency with a slow embedding endpoint that many memories share.

    python benchmarks/bench_endpoint.py [--full | --tiny] [--rounds N] [--json FILE]

The server gets its vectors from an OpenAI-compatible endpoint that answers 50 ms after each request of any size, with
the default of four concurrent requests. The benchmark measures recalls one at a time, idle and while 500 observations a
second arrive at 100 memories in turn, then observations until *stored*, one at a time. The other side is a bare client
of the same endpoint that sends one text per request, four concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

from arriving import PER_S, RATE, send_steadily
from claims import Claim, make_claim, run_standalone
from endpoint import LATENCY_S, MODEL, embed_one_by_one, run_endpoint
from recalls import COLUMNS, P50, P99, RecallClient, add_times, fill_memories
from report import Report, Size
from served import BenchServer
from texts import SentenceSource

import memstream

MEMORIES = {Size.TINY: 4, Size.SHORT: 100, Size.FULL: 100}
EACH = 10
"""Fragments per memory at the start."""
QUERIES = {Size.TINY: 3, Size.SHORT: 50, Size.FULL: 100}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 3}
AT_ONCE = 4
PREFIX = "endpoint/agent"
STORED = "stored /s"
IDLE, LOADED, LOAD = "recalls, idle", f"recalls, {RATE} writes/s", f"{RATE} writes/s"
STORES = f"observe until stored, {RATE} writes/s"
BARE = "bare client, one text a request"


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """Run all rounds."""
    count = QUERIES[size]
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(run_endpoint())
        model = {"embedding": "openai", "embedding_model": MODEL, "embedding_base_url": url}
        settings: dict[str, Any] = {**model, "embedding_concurrency": AT_ONCE}
        server = stack.enter_context(BenchServer(scratch / "data", **settings))
        client = await stack.enter_async_context(memstream.connect(server.address))
        texts = await fill_memories(client, PREFIX, [EACH] * MEMORIES[size])
        recalling = await stack.enter_async_context(RecallClient(server, client, PREFIX))
        stream = await stack.enter_async_context(client.memory(f"{PREFIX}-0").observe("asker"))
        talk = SentenceSource(5)
        for _ in range(rounds):
            await recalling.measure(report, IDLE, texts.draw_questions(count))
            async with send_steadily(server.address, PREFIX, MEMORIES[size]) as arrived:
                seconds, _ = await recalling.ask(texts.draw_questions(count))
                add_times(report, LOADED, seconds)
                add_times(report, STORES, [await _stored(stream, talk.make_sentence()) for _ in range(count)])
            report.add_round(LOAD, **{STORED: arrived[PER_S]})
            per_s, seconds = await embed_one_by_one(url, [text for _, text in texts.draw_questions(count)], AT_ONCE)
            add_times(report, BARE, seconds)
            report.add_round(BARE, **{STORED: per_s})


async def _stored(stream: memstream.ObserveStream, sentence: str) -> float:
    began = time.perf_counter()
    await (await stream.send(sentence))
    return time.perf_counter() - began


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((*COLUMNS, STORED))
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about a slow endpoint."""
    suffix = f"{LATENCY_S * 1e3:.0f} ms embedding endpoint"
    return [
        make_claim(report, f"stored, {RATE} writes/s, {suffix}", LOAD, STORED, BARE),
        make_claim(report, f"recall p50, idle, {suffix}", IDLE, P50, BARE),
        make_claim(report, f"recall p50, {RATE} writes/s, {suffix}", LOADED, P50, BARE),
        make_claim(report, f"recall p99, {RATE} writes/s, {suffix}", LOADED, P99, BARE),
        make_claim(report, f"observe until stored p50, {RATE} writes/s, {suffix}", STORES, P50, BARE),
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
