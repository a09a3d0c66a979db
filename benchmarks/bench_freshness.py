"""How soon what was acknowledged is recalled on another connection, when nothing else happens and under write load.

    python benchmarks/bench_freshness.py [--full | --tiny] [--rounds N] [--json FILE]

One observation at a time goes into a memory that already holds some. The moment its *stored* acknowledgement arrives, a
recall on another connection asks for it: `stored to recalled` is the time until that answer, `missed` counts answers
without it, which there must not be. Under load, 500 observations a second arrive in the same memory through a third
connection, or eight streams write into eight other memories as fast as they can. Beside it, with as many rows: a bare
Milvus Lite, from an acknowledged upsert until a search finds the row, with and without a flush between them.
Exits with 1 when a recall missed what was stored.
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
from bare import milvus_lite
from claims import Claim, at_most, claim, standalone
from report import Report, Size, percentile
from served import Served
from texts import Talk

import memstream
from memstream.codec import observation_to_wire
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1 import stream_service_pb2_grpc
from memstream_server.adapters.milvus.collection import MilvusCollection, Timeouts
from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.ports.index import Point

HELD = {Size.TINY: 20, Size.SHORT: 2_000, Size.FULL: 20_000}
"""Fragments, or rows, that are there before."""
TRIALS = {Size.TINY: 2, Size.SHORT: 100, Size.FULL: 500}
ROUNDS = {Size.TINY: 1, Size.SHORT: 1, Size.FULL: 3}
WARM_S = {Size.TINY: 0.1, Size.SHORT: 1.0, Size.FULL: 1.0}
"""How long a load is under way before it counts."""
ARRIVING = 500
"""Observations a second into the same memory."""
STREAMS = 8
"""Into as many other memories, without a pause."""
TICK_S = 0.02
ROWS_LOADED = 50
"""Rows of one upsert of the load on the bare Milvus Lite."""
WAIT_MAX_S = 60.0
PROBED_MAX_S = 10.0
"""A series ends after so long: where the machine is too small for the load, each observation waits behind a backlog."""
COLUMNS = ("p50 ms", "p99 ms", "max ms", "missed", "arrived/s")


@dataclass
class Times:
    """Seconds by step, and answers without what was stored."""

    steps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    missed: int = 0

    def enter(self, report: Report, label: str, arrived: float | None = None) -> None:
        """A row for every step."""
        for step, seconds in self.steps.items():
            figures = {"p50 ms": percentile(seconds, 0.5), "p99 ms": percentile(seconds, 0.99), "max ms": max(seconds)}
            told = {name: value * 1e3 for name, value in figures.items()}
            if step.endswith(("recalled", "found")):
                told["missed"] = self.missed
            if arrived is not None:
                told["arrived/s"] = arrived
            report.add(f"{label}: {step}", **told)


class Writer:
    """An Observe stream read message by message, so that the moment of each level is known."""

    def __init__(self, call: Any, sequence: int) -> None:
        self._call = call
        self._sequence = sequence

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, address: str, memory: memstream.Memory) -> AsyncIterator[Writer]:
        """On a connection of its own."""
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = stream_service_pb2_grpc.StreamServiceStub(channel).Observe()
            opening = pb.ObserveOpen(namespace=memory.namespace, memory=memory.name, producer="probe")
            await call.write(pb.ObserveRequest(open=opening))
            opened = (await call.read()).opened
            yield cls(call, opened.received)
            call.cancel()

    async def write(self, text: str) -> tuple[float, float, float, int, int]:
        """When it was sent, received and stored, and the revisions that the last two acknowledgements told."""
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


async def probe(writer: Writer, recall: memstream.RecallStream, names: Iterator[int], count: int) -> Times:
    """`count` observations, one after another, or as many as there is time for."""
    times, talk, pauses, until = Times(), Talk(5), random.Random(5), time.monotonic() + PROBED_MAX_S
    for _ in range(count):
        if time.monotonic() > until:
            break
        name = next(names)
        text = f"beacon{name} {talk.sentence()}"
        sent, received, stored, _, revision = await writer.write(text)
        while text not in await _contents(recall, f"beacon{name}", revision if pauses.random() < 0.5 else 0):
            times.missed += 1
        recalled = time.perf_counter()
        times.steps["sent to received"].append(received - sent)
        times.steps["received to stored"].append(stored - received)
        times.steps["stored to recalled"].append(recalled - stored)
        await asyncio.sleep(pauses.random() * 0.02)
    return times


async def probe_received(address: str, memory: memstream.Memory, names: Iterator[int], count: int) -> Times:
    """Without waiting for *stored*: `min_revision` one above what the *received* acknowledgement told.

    That is the revision that stores it, where nobody else writes.
    """
    times, talk = Times(), Talk(6)
    async with (
        memstream.connect(address) as client,
        client.memory(memory.path).recall() as recall,
        memory.observe("quick", ack_level=memstream.AckLevel.RECEIVED) as stream,
    ):
        for _ in range(count):
            name = next(names)
            text = f"beacon{name} {talk.sentence()}"
            before = stream.revision
            sent = await stream.send(text)
            await stream.flush()
            received = time.perf_counter()
            found = await _contents(recall, f"beacon{name}", before + 1)
            times.steps["received to recalled"].append(time.perf_counter() - received)
            times.missed += text not in found
            await sent
    return times


async def _contents(recall: memstream.RecallStream, text: str, revision: int) -> list[str]:
    answer = await recall.query(text, min_revision=revision, reinforce=False, timeout_s=WAIT_MAX_S)
    return [one.fragment.content for one in answer]


@contextlib.asynccontextmanager
async def arriving(client: memstream.Client, memory: memstream.Memory) -> AsyncIterator[Callable[[], int]]:
    """500 a second into the same memory; tells how many are stored."""
    loop, talk = asyncio.get_running_loop(), Talk(3)

    async def send(stream: memstream.ObserveStream) -> None:
        began, number = loop.time(), 0
        while True:
            while number < int((loop.time() - began) * ARRIVING):
                await stream.send(talk.sentence(), speaker="Ada", session="live")
                number += 1
            await asyncio.sleep(TICK_S)

    async with client.memory(memory.path).observe("load") as stream, _running(send(stream)):
        yield lambda: stream.stored


@contextlib.asynccontextmanager
async def flooding(client: memstream.Client, memory: memstream.Memory) -> AsyncIterator[Callable[[], int]]:
    """Eight streams into eight other memories, as fast as they are let."""
    talk = Talk(4)

    async def send(stream: memstream.ObserveStream) -> None:
        while True:
            await stream.send(talk.sentence(), speaker="Ada", session="live")

    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for number in range(STREAMS):
            other = await client.create_memory(f"{memory.namespace}/other-{number}", exist_ok=True)
            streams.append(await stack.enter_async_context(other.observe("load")))
        async with contextlib.AsyncExitStack() as sending:
            for stream in streams:
                await sending.enter_async_context(_running(send(stream)))
            yield lambda: sum(stream.stored for stream in streams)


@contextlib.asynccontextmanager
async def _running(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def measure_server(report: Report, address: str, size: Size, rounds: int) -> int:
    """All rows of memstream; how many recalls missed."""
    held, trials, missed, names = HELD[size], TRIALS[size], 0, itertools.count(1)
    loads = {f"{ARRIVING}/s arrive": arriving}
    if size is not Size.TINY:  # what is on its way when this one ends takes long to be stored
        loads[f"{STREAMS} full streams"] = flooding
    async with (
        memstream.connect(address) as client,
        memstream.connect(address) as reader,
        memstream.connect(address) as loader,
    ):
        memory = await client.create_memory("fresh/probed")
        async with memory.observe("before") as stream:
            for one in Talk().observations(held):
                await stream.send(one)
        async with Writer.open(address, memory) as writer, reader.memory(memory.path).recall() as recall:
            await probe(writer, recall, names, min(trials, 20))
            for _ in range(rounds):
                times = await probe(writer, recall, names, trials)
                times.enter(report, "memstream idle")
                missed += times.missed
                for label, load in loads.items():
                    async with load(loader, memory) as stored:
                        await asyncio.sleep(WARM_S[size])
                        first, began = stored(), time.perf_counter()
                        times = await probe(writer, recall, names, trials)
                        arrived = (stored() - first) / (time.perf_counter() - began)
                    times.enter(report, f"memstream, {label}", arrived)
                    missed += times.missed
        alone = await client.create_memory("fresh/alone")
        times = await probe_received(address, alone, names, trials)
        times.enter(report, "memstream idle, min_revision")
        return missed + times.missed


async def measure_lite(report: Report, scratch: Path, held: int, trials: int) -> None:
    """A Milvus Lite of its own, with as many rows, and with as many arriving."""
    async with milvus_lite(scratch) as lite:
        await asyncio.to_thread(_lite_rows, report, lite.collection, held, trials)


def _lite_rows(report: Report, collection: MilvusCollection, held: int, trials: int) -> None:
    vectors = HashingEmbedder().vectors([str(one.body) for one in Talk().observations(held)])
    collection.upsert([Point("memory", f"old-{number}", vector) for number, vector in enumerate(vectors)])
    collection.flush()
    for flushed in (False, True):
        how = "upsert, flush" if flushed else "upsert"
        _found(collection, trials, flushed, f"{how}-idle").enter(report, f"bare Milvus Lite idle, {how}")
        with _loaded(collection, f"{how}-load") as arrived:
            times = _found(collection, trials, flushed, how)
            times.enter(report, f"bare Milvus Lite, {ARRIVING}/s arrive, {how}", arrived())


def _found(collection: MilvusCollection, trials: int, flushed: bool, mark: str) -> Times:
    times, until = Times(), time.monotonic() + PROBED_MAX_S
    texts = [f"beacon{mark}{number} {Talk(number).sentence()}" for number in range(trials)]
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
def _loaded(collection: MilvusCollection, mark: str) -> Iterator[Callable[[], float]]:
    """500 rows a second from another thread, if it takes them; tells how many a second it took."""
    ended, rows, began = threading.Event(), [0], time.perf_counter()
    talk = Talk(3)

    def load() -> None:
        embedder = HashingEmbedder()
        while not ended.wait(max(0.0, rows[0] / ARRIVING - (time.perf_counter() - began))):
            vectors = embedder.vectors([talk.sentence() for _ in range(ROWS_LOADED)])
            collection.upsert([Point("memory", f"{mark}-{rows[0] + at}", vector) for at, vector in enumerate(vectors)])
            rows[0] += ROWS_LOADED

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield lambda: rows[0] / (time.perf_counter() - began)
    finally:
        ended.set()
        thread.join()


async def measure(report: Report, size: Size, rounds: int) -> int:
    """Both sides; how many recalls missed."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with Served(scratch / "data") as server:
            missed = await measure_server(report, server.address, size, rounds)
        await measure_lite(report, scratch / "lite", HELD[size], TRIALS[size])
    return missed


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report(COLUMNS)
    report.more["missed"] = asyncio.run(measure(report, size, rounds or ROUNDS[size]))
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of reading one's own writes."""
    told: list[Claim] = []
    for load, said in ((" idle", "idle"), (f", {ARRIVING}/s arrive", f"{ARRIVING}/s arrive")):
        ours, bare = (
            f"memstream{load}: stored to recalled",
            f"bare Milvus Lite{load}, upsert, flush: acknowledged to found",
        )
        told += [
            claim(report, f"stored to recalled p50, {said}", ours, "p50 ms", bare),
            claim(report, f"recalls without what was stored, {said}", ours, "missed", bare, at_most(0, "missed")),
        ]
    return told


if __name__ == "__main__":
    sys.exit(bool(standalone(__doc__, run, claims).more["missed"]))
