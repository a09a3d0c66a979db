"""How long a recall takes through the SDK, when nothing else happens and while 500 observations arrive every second.

    python benchmarks/bench_recall.py [--full] [--rounds N] [--json FILE]

100 memories hold 1,000, 10,000 and (with --full) 100,000 fragments together; queries go to them at random, one at a
time, with the defaults: ten fragments and the working memory, reinforcing. Beside them, in turns with them: a bare
gRPC echo of the same question and answer, an exact numpy scan and a Milvus Lite search of the same vectors (one of its
64 partitions, as memstream searches a memory too large for RAM).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from bare import EchoServer, scanned
from report import Report, options, percentile
from served import Served
from texts import Talk

import memstream
from memstream.codec import query_to_wire
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.adapters.milvus.collection import MilvusCollection, Timeouts
from memstream_server.adapters.milvus.lite import LiteProcess
from memstream_server.adapters.milvus.naming import collection_name
from memstream_server.adapters.models.hashing import MODEL, HashingEmbedder
from memstream_server.ports.index import Point
from memstream_server.ports.journal import Space

MEMORIES = 100
SHORT, FULL = (1_000, 10_000), (1_000, 10_000, 100_000)
"""Fragments in all memories together."""
QUERIES_SHORT, QUERIES_FULL = 200, 1_000
ARRIVING = 500
"""Observations a second, each to the next memory in turn."""
TICK_S = 0.02
LIMIT = 10
PARTITIONS = 64
FLUSH_INTERVAL_S = 2.0
COLUMNS = ("p50 ms", "p99 ms", "max ms", "arrived/s", "server CPU ms")


@dataclass
class Filled:
    """Memories with their streams open, and what was put into them."""

    memories: list[memstream.Memory]
    observing: list[memstream.ObserveStream]
    recalling: list[memstream.RecallStream]
    texts: list[list[str]]
    asked: random.Random = field(default_factory=lambda: random.Random(7))
    talk: Talk = field(default_factory=lambda: Talk(2))

    def question(self) -> tuple[memstream.RecallStream, str]:
        """A memory and four words of something it holds."""
        place = self.asked.randrange(len(self.memories))
        return self.recalling[place], self.talk.question(self.asked.choice(self.texts[place]))


@contextlib.asynccontextmanager
async def filled(client: memstream.Client, total: int) -> AsyncIterator[Filled]:
    """New memories that hold `total` fragments, all of them indexed."""
    talk = Talk()
    memories = [await client.create_memory(f"recall-{total}/agent-{number}") for number in range(MEMORIES)]
    texts = [talk.observations(total // MEMORIES) for _ in memories]
    async with contextlib.AsyncExitStack() as stack:
        observing = [
            await stack.enter_async_context(memory.observe("bench", ack_level=memstream.AckLevel.INDEXED))
            for memory in memories
        ]
        for stream, observations in zip(observing, texts, strict=True):
            for one in observations:
                await stream.send(one)
        await asyncio.gather(*(stream.flush() for stream in observing))
        recalling = [await stack.enter_async_context(memory.recall()) for memory in memories]
        yield Filled(memories, observing, recalling, [[str(one.body) for one in each] for each in texts])


async def ask(held: Filled, count: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of each query, one at a time, and the mean milliseconds of each step as the server tells them."""
    seconds: list[float] = []
    steps: defaultdict[str, float] = defaultdict(float)
    for _ in range(count):
        stream, text = held.question()
        began = time.perf_counter()
        answer = await stream.query(text)
        seconds.append(time.perf_counter() - began)
        for step, spent in answer.timings.items():
            steps[step] += spent / count * 1e3
    return seconds, dict(steps)


async def arrive(held: Filled, sent: list[int]) -> None:
    """Until cancelled. `sent` gets the number that went out."""
    loop, talk = asyncio.get_running_loop(), Talk(3)
    began, number = loop.time(), 0
    while True:
        due = int((loop.time() - began) * ARRIVING)
        while number < due:
            await held.observing[number % MEMORIES].send(talk.sentence(), speaker="Ada", session="live")
            number += 1
        sent[0] = number
        await asyncio.sleep(TICK_S)


async def measure_server(report: Report, server: Served, held: Filled, label: str, count: int) -> dict[str, float]:
    """Both rows of memstream for one size; the steps of an idle recall."""
    before = server.cpu()
    seconds, steps = await ask(held, count)
    _enter(report, f"{label}: memstream idle", seconds, server.cpu().since(before).server)
    sent = [0]
    arriving = asyncio.create_task(arrive(held, sent))
    await asyncio.sleep(1.0)
    first, began, before = sum(one.stored for one in held.observing), time.perf_counter(), server.cpu()
    seconds, _ = await ask(held, count)
    arrived = (sum(one.stored for one in held.observing) - first) / (time.perf_counter() - began)
    _enter(report, f"{label}: memstream, {ARRIVING}/s arrive", seconds, server.cpu().since(before).server)
    report.add(f"{label}: memstream, {ARRIVING}/s arrive", **{"arrived/s": arrived})
    arriving.cancel()
    await asyncio.gather(arriving, return_exceptions=True)
    await asyncio.gather(*(stream.flush() for stream in held.observing))
    return steps


async def measure_echo(report: Report, echo: EchoServer, held: Filled, label: str, count: int) -> None:
    """The same question, and an answer of the same size."""
    stream, text = held.question()
    answer = await stream.query(text)
    size = sum(len(hit.fragment.content) + 250 for hit in answer)
    size += sum(len(one.content) + 150 for one in answer.working_memory)
    response = pb.RecallResponse(done=pb.RecallDone(query_id="1", degraded="x" * size))
    seconds = await echo.recall(pb.RecallRequest(query=query_to_wire("1", text)), response, count)
    _enter(report, f"{label}: bare echo", seconds)


def measure_scan(report: Report, vectors: Sequence[npt.NDArray[np.float32]], label: str, count: int) -> None:
    """One memory's vectors, exactly, in this process."""
    queries = HashingEmbedder().vectors([Talk(4).sentence() for _ in range(count)])
    seconds = [scanned(vectors[n % len(vectors)], queries[n : n + 1], LIMIT)[0] for n in range(count)]
    _enter(report, f"{label}: bare numpy scan", seconds)


async def measure_lite(
    report: Report, scratch: Path, vectors: Sequence[npt.NDArray[np.float32]], label: str, count: int
) -> None:
    """One memory's vectors among all of them, in a Milvus Lite of its own."""
    space = Space(MODEL.name, MODEL.dimension, PARTITIONS)
    name = collection_name(space, "bench")
    child = await LiteProcess.start(scratch, name, start_timeout_s=60.0, lock_timeout_s=10.0, stop_timeout_s=30.0)
    collection = await asyncio.to_thread(MilvusCollection.connect, child.uri, "", name, space, Timeouts(), "Strong")
    try:
        seconds = await asyncio.to_thread(_searched, collection, vectors, count)
    finally:
        collection.close()
        await child.stop()
    _enter(report, f"{label}: bare Milvus Lite search", seconds)


def _searched(collection: MilvusCollection, vectors: Sequence[npt.NDArray[np.float32]], count: int) -> list[float]:
    collection.make()
    collection.upsert(
        [
            Point(f"memory-{place}", f"{place}-{number}", vector)
            for place, held in enumerate(vectors)
            for number, vector in enumerate(held)
        ]
    )
    collection.flush()
    queries = HashingEmbedder().vectors([Talk(4).sentence() for _ in range(count)])
    seconds = []
    for number, query in enumerate(queries):
        began = time.perf_counter()
        collection.search(f"memory-{number % len(vectors)}", query, LIMIT)
        seconds.append(time.perf_counter() - began)
    return seconds


def _enter(report: Report, row: str, seconds: Sequence[float], cpu_s: float | None = None) -> None:
    figures = {
        "p50 ms": percentile(seconds, 0.5) * 1e3,
        "p99 ms": percentile(seconds, 0.99) * 1e3,
        "max ms": max(seconds) * 1e3,
    }
    if cpu_s is not None:
        figures["server CPU ms"] = cpu_s / len(seconds) * 1e3
    report.add(row, **figures)


async def measure(report: Report, sizes: Sequence[int], count: int, rounds: int) -> dict[str, dict[str, float]]:
    """All sizes, one after another, each with all its rounds; the steps of an idle recall by size."""
    steps: dict[str, dict[str, float]] = {}
    for total in sizes:
        label = f"{total:,}"
        with tempfile.TemporaryDirectory() as directory:
            scratch = Path(directory)
            with (
                EchoServer(scratch) as echo,
                Served(scratch / "data", index_flush_interval_s=FLUSH_INTERVAL_S) as server,
            ):
                async with memstream.connect(server.address) as client, filled(client, total) as held:
                    vectors = [HashingEmbedder().vectors(texts) for texts in held.texts]
                    await ask(held, MEMORIES)
                    for number in range(rounds):
                        steps[label] = await measure_server(report, server, held, label, count)
                        await measure_echo(report, echo, held, label, count)
                        measure_scan(report, vectors, label, count)
                        if number == 0:  # filling it is most of its time
                            await measure_lite(report, scratch / "lite", vectors, label, count)
    return steps


def main() -> None:
    """Measure and print."""
    given = options(__doc__).parse_args()
    report = Report(COLUMNS)
    sizes, count = (FULL, QUERIES_FULL) if given.full else (SHORT, QUERIES_SHORT)
    steps = asyncio.run(measure(report, sizes, count, given.rounds or 3))
    report.show()
    for total in sizes:
        label = f"{total:,}"
        told = ", ".join(f"{step} {spent:.2f}" for step, spent in steps[label].items())
        print(f"{label}: ms inside the server, idle, by step: {told}")
        for other in ("bare echo", "bare numpy scan", "bare Milvus Lite search"):
            report.ratio(
                f"{label}: memstream idle / {other}", f"{label}: memstream idle", f"{label}: {other}", "p50 ms"
            )
    report.write(given.json, steps=steps)


if __name__ == "__main__":
    main()
