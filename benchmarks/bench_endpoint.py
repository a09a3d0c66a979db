"""What an embedding endpoint that takes its time leaves of the speed, when many memories need it.

    python benchmarks/bench_endpoint.py [--full | --tiny] [--rounds N] [--json FILE]

The server takes its vectors from an OpenAI-compatible endpoint that answers 50 ms after each request, whatever it
holds, with the default of four requests at once. Recalls one at a time, when nothing else happens and while 500
observations a second arrive at 100 memories in turn; then observations until they are stored, one at a time. Beside it
a bare client of the same endpoint that asks for one text a request, four at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path

from arriving import PER_S, RATE, arriving
from claims import Claim, claim, standalone
from endpoint import LATENCY_S, MODEL, endpoint, one_by_one
from recalls import COLUMNS, P50, P99, Recalling, enter, fill
from report import Report, Size
from served import Served
from texts import Talk

import memstream

MEMORIES = {Size.TINY: 4, Size.SHORT: 100, Size.FULL: 100}
EACH = 10
"""Fragments of a memory before."""
QUERIES = {Size.TINY: 3, Size.SHORT: 50, Size.FULL: 100}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 3}
AT_ONCE = 4
PREFIX = "endpoint/agent"
STORED = "stored /s"
IDLE, LOADED, LOAD = "recalls, idle", f"recalls, {RATE}/s arrive", f"{RATE}/s arrive"
STORES = f"observe until stored, {RATE}/s arrive"
BARE = "bare client, one text a request"


async def measure(report: Report, size: Size, rounds: int) -> None:
    """All rounds."""
    count = QUERIES[size]
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(endpoint())
        model = {"embedding": "openai", "embedding_model": MODEL, "embedding_base_url": url}
        server = stack.enter_context(Served(scratch / "data", **model, embedding_concurrency=AT_ONCE))
        client = await stack.enter_async_context(memstream.connect(server.address))
        texts = await fill(client, PREFIX, [EACH] * MEMORIES[size])
        recalling = await stack.enter_async_context(Recalling(server, client, PREFIX))
        stream = await stack.enter_async_context(client.memory(f"{PREFIX}-0").observe("asker"))
        talk = Talk(5)
        for _ in range(rounds):
            await recalling.measure(report, IDLE, texts.questions(count))
            async with arriving(server.address, PREFIX, MEMORIES[size]) as arrived:
                seconds, _ = await recalling.ask(texts.questions(count))
                enter(report, LOADED, seconds)
                enter(report, STORES, [await _stored(stream, talk.sentence()) for _ in range(count)])
            report.add(LOAD, **{STORED: arrived[PER_S]})
            per_s, seconds = await one_by_one(url, [text for _, text in texts.questions(count)], AT_ONCE)
            enter(report, BARE, seconds)
            report.add(BARE, **{STORED: per_s})


async def _stored(stream: memstream.ObserveStream, sentence: str) -> float:
    began = time.perf_counter()
    await (await stream.send(sentence))
    return time.perf_counter() - began


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report((*COLUMNS, STORED))
    asyncio.run(measure(report, size, rounds or ROUNDS[size]))
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of a slow endpoint."""
    said = f"an embedding endpoint of {LATENCY_S * 1e3:.0f} ms"
    return [
        claim(report, f"stored, {RATE}/s arrive, {said}", LOAD, STORED, BARE),
        claim(report, f"recall p50, idle, {said}", IDLE, P50, BARE),
        claim(report, f"recall p50, {RATE}/s arrive, {said}", LOADED, P50, BARE),
        claim(report, f"recall p99, {RATE}/s arrive, {said}", LOADED, P99, BARE),
        claim(report, f"observe until stored p50, {RATE}/s arrive, {said}", STORES, P50, BARE),
    ]


if __name__ == "__main__":
    standalone(__doc__, run, claims)
