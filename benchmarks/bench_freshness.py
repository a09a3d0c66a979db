"""Read-your-writes latency on another connection, idle and under write load.

    python benchmarks/bench_freshness.py [--full | --tiny] [--rounds N] [--json FILE]

One observation at a time goes into a memory that already holds some. When its *stored* acknowledgement arrives, a
recall on another connection asks for it: `stored to recalled` is the time until that answer, `missed` counts answers
without it and must be zero. Under load, 500 observations a second arrive in the same memory through a third connection,
or eight streams write into eight other memories at full speed. The other side, with as many rows, is a bare Milvus
Lite: from an acknowledged upsert until a search finds the row, with and without a flush in between. Exits with 1 when a
recall missed a stored fragment.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from bare import start_milvus_lite
from claims import Claim, at_most, make_claim, run_standalone
from report import Report, Size, percentile
from served import BenchServer
from texts import SentenceSource

import memstream
from memstream.codec import observation_to_wire
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1 import stream_service_pb2_grpc
from memstream_server.adapters.milvus.collection import MilvusCollection, Timeouts
from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.ports.index import Point

HELD = {Size.TINY: 20, Size.SHORT: 2_000, Size.FULL: 20_000}
"""Fragments, or rows, at the start."""
TRIALS = {Size.TINY: 2, Size.SHORT: 100, Size.FULL: 500}
ROUNDS = {Size.TINY: 1, Size.SHORT: 1, Size.FULL: 3}
WARM_S = {Size.TINY: 0.1, Size.SHORT: 1.0, Size.FULL: 1.0}
"""Seconds of load before measuring."""
ARRIVING = 500
"""Observations per second into the same memory."""
STREAMS = 8
"""Streams into as many other memories, without a pause."""
TICK_S = 0.02
ROWS_LOADED = 50
"""Rows per upsert of the load on the bare Milvus Lite."""
WAIT_MAX_S = 60.0
PROBED_MAX_S = 10.0
"""Longest duration of a series: where the machine is too small for the load, each observation waits behind a backlog.
"""
COLUMNS = ("p50 ms", "p99 ms", "max ms", "missed", "arrived/s")


@dataclass
class Times:
    """Seconds by step, and the number of answers without the stored fragment."""

    steps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    missed: int = 0

    def add_rows(self, report: Report, label: str, arrived: float | None = None) -> None:
        """Add a row for every step."""
        for step, seconds in self.steps.items():
            figures = {"p50 ms": percentile(seconds, 0.5), "p99 ms": percentile(seconds, 0.99), "max ms": max(seconds)}
            columns = {name: value * 1e3 for name, value in figures.items()}
            if step.endswith(("recalled", "found")):
                columns["missed"] = self.missed
            if arrived is not None:
                columns["arrived/s"] = arrived
            report.add_round(f"{label}: {step}", **columns)


class Writer:
    """An Observe stream read message by message, so that the time of each level is known."""

    def __init__(self, call: Any, sequence: int) -> None:
        self._call = call
        self._sequence = sequence

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, address: str, memory: memstream.Memory) -> AsyncIterator[Writer]:
        """Open on a separate connection."""
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = stream_service_pb2_grpc.StreamServiceStub(channel).Observe()
            opening = pb.ObserveOpen(namespace=memory.namespace, memory=memory.name, producer="probe")
            await call.write(pb.ObserveRequest(open=opening))
            opened = (await call.read()).opened
            yield cls(call, opened.received)
            call.cancel()

    async def write(self, text: str) -> tuple[float, float, float, int, int]:
        """Returns when it was sent, received and stored, and the revisions of the last two acknowledgements."""
        self._sequence += 1
        batch = pb.ObservationBatch(first_sequence=self._sequence, observations=[observation_to_wire(text)])
        sent = time.perf_counter()
        await self._call.write(pb.ObserveRequest(batch=batch))
        received, known = 0.0, 0
        while True:
            ack = (await self._call.read()).ack
            now = time.perf_counter()
            if not received and ack.received >= self._sequence:
                received, known = now, ack.revision
            if ack.stored >= self._sequence:
                return sent, received, now, known, ack.revision


async def probe_stored(writer: Writer, recall: memstream.RecallStream, names: Iterator[int], count: int) -> Times:
    """Time up to `count` observations, one after another, within PROBED_MAX_S."""
    times, talk, pauses, until = Times(), SentenceSource(5), random.Random(5), time.monotonic() + PROBED_MAX_S
    for _ in range(count):
        if time.monotonic() > until:
            break
        name = next(names)
        text = f"beacon{name} {talk.make_sentence()}"
        sent, received, stored, _, revision = await writer.write(text)
        while text not in await _recall_contents(recall, f"beacon{name}", revision if pauses.random() < 0.5 else 0):
            times.missed += 1
        recalled = time.perf_counter()
        times.steps["sent to received"].append(received - sent)
        times.steps["received to stored"].append(stored - received)
        times.steps["stored to recalled"].append(recalled - stored)
        await asyncio.sleep(pauses.random() * 0.02)
    return times


async def probe_received(address: str, memory: memstream.Memory, names: Iterator[int], count: int) -> Times:
    """Recall without waiting for *stored*: `min_revision` is one above the *received* acknowledgement's revision.

    That is the revision that stores the observation, as long as nobody else writes.
    """
    times, talk = Times(), SentenceSource(6)
    async with (
        memstream.connect(address) as client,
        client.memory(memory.path).recall() as recall,
        memory.observe("quick", ack_level=memstream.AckLevel.RECEIVED) as stream,
    ):
        for _ in range(count):
            name = next(names)
            text = f"beacon{name} {talk.make_sentence()}"
            before = stream.revision
            sent = await stream.send(text)
            await stream.flush()
            received = time.perf_counter()
            found = await _recall_contents(recall, f"beacon{name}", before + 1)
            times.steps["received to recalled"].append(time.perf_counter() - received)
            times.missed += text not in found
            await sent
    return times


async def _recall_contents(recall: memstream.RecallStream, text: str, revision: int) -> list[str]:
    answer = await recall.query(text, min_revision=revision, reinforce=False, timeout_s=WAIT_MAX_S)
    return [one.fragment.content for one in answer]


@contextlib.asynccontextmanager
async def send_steadily(client: memstream.Client, memory: memstream.Memory) -> AsyncIterator[Callable[[], int]]:
    """Send 500 a second into the same memory; yields a function that returns the number stored."""
    loop, talk = asyncio.get_running_loop(), SentenceSource(3)

    async def send(stream: memstream.ObserveStream) -> None:
        began, number = loop.time(), 0
        while True:
            while number < int((loop.time() - began) * ARRIVING):
                await stream.send(talk.make_sentence(), speaker="Ada", session="live")
                number += 1
            await asyncio.sleep(TICK_S)

    async with client.memory(memory.path).observe("load") as stream, _run_task(send(stream)):
        yield lambda: stream.stored


@contextlib.asynccontextmanager
async def run_flood(client: memstream.Client, memory: memstream.Memory) -> AsyncIterator[Callable[[], int]]:
    """Write with eight streams into eight other memories at full speed; yields the number stored, as above."""
    talk = SentenceSource(4)

    async def send(stream: memstream.ObserveStream) -> None:
        while True:
            await stream.send(talk.make_sentence(), speaker="Ada", session="live")

    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for number in range(STREAMS):
            other = await client.create_memory(f"{memory.namespace}/other-{number}", exist_ok=True)
            streams.append(await stack.enter_async_context(other.observe("load")))
        async with contextlib.AsyncExitStack() as sending:
            for stream in streams:
                await sending.enter_async_context(_run_task(send(stream)))
            yield lambda: sum(stream.stored for stream in streams)


@contextlib.asynccontextmanager
async def _run_task(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def measure_server(report: Report, address: str, size: Size, rounds: int) -> int:
    """Add all rows of memstream. Returns how many recalls missed."""
    held, trials, missed, names = HELD[size], TRIALS[size], 0, itertools.count(1)
    loads = {f"{ARRIVING} writes/s": send_steadily}
    if size is not Size.TINY:  # storing what is in flight at its end takes long
        loads[f"{STREAMS} full streams"] = run_flood
    async with (
        memstream.connect(address) as client,
        memstream.connect(address) as reader,
        memstream.connect(address) as loader,
    ):
        memory = await client.create_memory("fresh/probed")
        async with memory.observe("before") as stream:
            for one in SentenceSource().make_observations(held):
                await stream.send(one)
        async with Writer.open(address, memory) as writer, reader.memory(memory.path).recall() as recall:
            await probe_stored(writer, recall, names, min(trials, 20))
            for _ in range(rounds):
                times = await probe_stored(writer, recall, names, trials)
                times.add_rows(report, "memstream idle")
                missed += times.missed
                for label, load in loads.items():
                    async with load(loader, memory) as stored:
                        await asyncio.sleep(WARM_S[size])
                        first, began = stored(), time.perf_counter()
                        times = await probe_stored(writer, recall, names, trials)
                        arrived = (stored() - first) / (time.perf_counter() - began)
                    times.add_rows(report, f"memstream, {label}", arrived)
                    missed += times.missed
        alone = await client.create_memory("fresh/alone")
        times = await probe_received(address, alone, names, trials)
        times.add_rows(report, "memstream idle, min_revision")
        return missed + times.missed


async def measure_lite(report: Report, scratch: Path, held: int, trials: int) -> None:
    """Add the rows of a separate Milvus Lite with as many rows, idle and under the same load."""
    async with start_milvus_lite(scratch) as lite:
        await asyncio.to_thread(_add_lite_rows, report, lite.collection, held, trials)


def _add_lite_rows(report: Report, collection: MilvusCollection, held: int, trials: int) -> None:
    vectors = HashingEmbedder().vectors([str(one.body) for one in SentenceSource().make_observations(held)])
    collection.upsert([Point("memory", f"old-{number}", vector) for number, vector in enumerate(vectors)])
    collection.flush()
    for flushed in (False, True):
        how = "upsert, flush" if flushed else "upsert"
        _time_searches(collection, trials, flushed, f"{how}-idle").add_rows(report, f"bare Milvus Lite idle, {how}")
        with _upsert_steadily(collection, f"{how}-load") as arrived:
            times = _time_searches(collection, trials, flushed, how)
            times.add_rows(report, f"bare Milvus Lite, {ARRIVING} writes/s, {how}", arrived())


def _time_searches(collection: MilvusCollection, trials: int, flushed: bool, mark: str) -> Times:
    times, until = Times(), time.monotonic() + PROBED_MAX_S
    texts = [f"beacon{mark}{number} {SentenceSource(number).make_sentence()}" for number in range(trials)]
    for number, vector in enumerate(HashingEmbedder().vectors(texts)):
        if time.monotonic() > until:
            break
        fragment, began = f"{mark}-{number}", time.perf_counter()
        collection.upsert([Point("memory", fragment, vector)])
        acknowledged = time.perf_counter()
        if flushed:
            collection.flush()
        while fragment not in collection.search("memory", vector, 10, Timeouts().search_s)[0]:
            times.missed += 1
        times.steps["sent to acknowledged"].append(acknowledged - began)
        times.steps["acknowledged to found"].append(time.perf_counter() - acknowledged)
    return times


@contextlib.contextmanager
def _upsert_steadily(collection: MilvusCollection, mark: str) -> Iterator[Callable[[], float]]:
    """Upsert up to 500 rows a second from another thread; yields a function that returns the actual rate."""
    ended, rows, began = threading.Event(), [0], time.perf_counter()
    talk = SentenceSource(3)

    def load() -> None:
        embedder = HashingEmbedder()
        while not ended.wait(max(0.0, rows[0] / ARRIVING - (time.perf_counter() - began))):
            vectors = embedder.vectors([talk.make_sentence() for _ in range(ROWS_LOADED)])
            collection.upsert([Point("memory", f"{mark}-{rows[0] + at}", vector) for at, vector in enumerate(vectors)])
            rows[0] += ROWS_LOADED

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield lambda: rows[0] / (time.perf_counter() - began)
    finally:
        ended.set()
        thread.join()


async def measure_rounds(report: Report, size: Size, rounds: int) -> int:
    """Measure both sides. Returns how many recalls missed."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with BenchServer(scratch / "data") as server:
            missed = await measure_server(report, server.address, size, rounds)
        await measure_lite(report, scratch / "lite", HELD[size], TRIALS[size])
    return missed


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report(COLUMNS)
    report.more["missed"] = asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about reading one's own writes."""
    claims: list[Claim] = []
    for load, suffix in ((" idle", "idle"), (f", {ARRIVING} writes/s", f"{ARRIVING} writes/s")):
        ours, bare = (
            f"memstream{load}: stored to recalled",
            f"bare Milvus Lite{load}, upsert, flush: acknowledged to found",
        )
        claims += [
            make_claim(report, f"stored to recalled p50, {suffix}", ours, "p50 ms", bare),
            make_claim(
                report, f"recalls that missed a stored fragment, {suffix}", ours, "missed", bare, at_most(0, "missed")
            ),
        ]
    return claims


if __name__ == "__main__":
    sys.exit(bool(run_standalone(__doc__, run_benchmark, make_claims).more["missed"]))
