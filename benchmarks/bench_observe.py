"""How many observations a second become received, stored and indexed, through the SDK.

    python benchmarks/bench_observe.py [--full | --tiny] [--rounds N] [--json FILE]

One stream into one memory, and eight streams into eight. The clock runs until the last observation is *received*
(durable), *stored* (decided, every recall sees it) and indexed (the outbox is empty, Milvus Lite has flushed). Then
single observations, one after another. Beside them, in turns with them, what cannot be avoided: a bare gRPC echo of
the same messages, a bare grouped SQLite commit of the same rows, embedding, tokenising and stemming, and (once) a
Milvus Lite that is given the same vectors. Client, server and Milvus Lite share the machine: the CPU of each is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bare import committed, database, milvus_lite
from claims import CPU, Claim, at_least, at_most, claim, pause, standalone
from echo import EchoServer
from probe import Pause
from report import PAUSES, Report, Size, own_cpu_s, percentile
from served import Cpu, Served
from texts import Talk

import memstream
from memstream.codec import observation_to_wire
from memstream.observe import BATCH_MAX
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.adapters.models.hashing import HashingEmbedder

COUNT = {Size.TINY: 800, Size.SHORT: 16_000, Size.FULL: 100_000}
"""Observations a round, shared by its streams."""
ALONE = {Size.TINY: 5, Size.SHORT: 200, Size.FULL: 1_000}
"""Observations sent one after another."""
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 3}
STREAMS = (1, 8)
GROUP = 512
"""Rows of one bare commit."""
EMBEDDED = 128
"""Texts embedded at once: a message's."""
FLUSH_INTERVAL_S = {Size.TINY: 0.2, Size.SHORT: 2.0, Size.FULL: 2.0}
"""Instead of the default 15, so that the end of a round is not spent on waiting for the clock."""
COLUMNS = ("received /s", "stored /s", "indexed /s", "p50 ms", CPU, "client µs", "server µs", "lite µs", *PAUSES)
RECEIVED, STORED, INDEXED = "received /s", "stored /s", "indexed /s"
COMMIT, FULL_COMMIT = "grouped SQLite commit of observations", "grouped SQLite commit with vectors"
EMBEDDING, ANALYSING, LITE = "embedding", "tokenising and stemming", "bare Milvus Lite"
LONE, LONE_COMMIT, LONE_ECHO, LONE_SUM = "a lone observation", "bare commit with fsync", "bare echo", "echo + commit"


@dataclass(frozen=True)
class Round:
    """Seconds from the first send, CPU of each process, and the longest pause of the server's event loop."""

    received_s: float
    stored_s: float
    indexed_s: float
    client_s: float
    server: Cpu
    pause: Pause


@dataclass(frozen=True)
class Material:
    """The same observations for all."""

    observations: list[memstream.Observation]
    texts: list[str]
    rows: list[tuple[bytes, bytes | None]]

    @classmethod
    def of(cls, count: int) -> Material:
        """`count` of them, with their messages and vectors as bytes."""
        observations = Talk().observations(count)
        texts = [str(one.body) for one in observations]
        wire = [observation_to_wire(one).SerializeToString() for one in observations]
        vectors = [vector.tobytes() for vector in HashingEmbedder().vectors(texts)]
        return cls(observations, texts, list(zip(wire, vectors, strict=True)))


async def observe(server: Served, streams: Sequence[Sequence[memstream.Observation]], name: str) -> Round:
    """One round: every stream into a new memory of its own."""
    async with memstream.connect(server.address) as client:
        memories = [await client.create_memory(f"bench/{name}-{number}") for number in range(len(streams))]
        async with contextlib.AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(memory.observe("bench", ack_level=memstream.AckLevel.INDEXED))
                for memory in memories
            ]
            since, before, client_before, began = time.monotonic(), server.cpu(), own_cpu_s(), time.perf_counter()
            sending = [asyncio.create_task(_send(stream, each)) for stream, each in zip(opened, streams, strict=True)]
            counts = [len(each) for each in streams]
            await _until(lambda: all(one.received >= n for one, n in zip(opened, counts, strict=True)), sending)
            received = time.perf_counter()
            await _until(lambda: all(one.stored >= n for one, n in zip(opened, counts, strict=True)), sending)
            stored = time.perf_counter()
            await asyncio.gather(*(stream.flush() for stream in opened))
            indexed = time.perf_counter()
            used, longest = server.cpu().since(before), server.pause(since)
    return Round(received - began, stored - began, indexed - began, own_cpu_s() - client_before, used, longest)


async def _send(stream: memstream.ObserveStream, observations: Sequence[memstream.Observation]) -> None:
    for one in observations:
        await stream.send(one)


async def _until(reached: Callable[[], bool], sending: Sequence[asyncio.Task[None]]) -> None:
    while not reached():
        for task in sending:
            if task.done():
                task.result()
        await asyncio.sleep(0.005)


def _messages(observations: Sequence[memstream.Observation]) -> list[pb.ObserveRequest]:
    wire = [observation_to_wire(one) for one in observations]
    return [
        pb.ObserveRequest(
            batch=pb.ObservationBatch(first_sequence=start + 1, observations=wire[start : start + BATCH_MAX])
        )
        for start in range(0, len(wire), BATCH_MAX)
    ]


def _split(observations: Sequence[memstream.Observation], parts: int) -> list[Sequence[memstream.Observation]]:
    each = len(observations) // parts
    return [observations[number * each : (number + 1) * each] for number in range(parts)]


def measure_parts(report: Report, material: Material, file: Path) -> None:
    """What needs no other process: two commits, the vectors and the stems."""
    count = len(material.texts)

    def commit(rows: Sequence[tuple[bytes, bytes | None]]) -> None:
        with database(file) as opened:
            committed(opened, rows, GROUP)

    def embed() -> None:
        embedder = HashingEmbedder()
        for start in range(0, count, EMBEDDED):
            embedder.vectors(material.texts[start : start + EMBEDDED])

    def analyse() -> None:
        analyzer = SnowballAnalyzer()
        for text in material.texts:
            analyzer.terms(text)

    parts: dict[str, tuple[str, Callable[[], None]]] = {
        COMMIT: (RECEIVED, lambda: commit([(observation, None) for observation, _ in material.rows])),
        FULL_COMMIT: (STORED, lambda: commit(material.rows)),
        EMBEDDING: (STORED, embed),
        ANALYSING: (STORED, analyse),
    }
    for row, (column, work) in parts.items():
        before, began = own_cpu_s(), time.perf_counter()
        work()
        seconds, used = time.perf_counter() - began, own_cpu_s() - before
        report.add(row, **{column: count / seconds, CPU: used / count * 1e6})


async def measure_lite(report: Report, material: Material, directory: Path) -> None:
    """A Milvus Lite that is given the same vectors, durably."""
    vectors = HashingEmbedder().vectors(material.texts)
    async with milvus_lite(directory) as lite:
        before, own = lite.cpu_s(), own_cpu_s()
        seconds = await lite.fill([vectors])
        used = lite.cpu_s() - before
        figures = {INDEXED: len(vectors) / seconds, CPU: (used + own_cpu_s() - own) / len(vectors) * 1e6}
        report.add(LITE, **figures, **{"lite µs": used / len(vectors) * 1e6})


async def measure_echo(report: Report, echo: EchoServer, parts: Sequence[Sequence[memstream.Observation]]) -> None:
    """The messages of these streams and back."""
    messages, total = [_messages(part) for part in parts], sum(map(len, parts))
    since, before, own = time.monotonic(), echo.cpu_s(), own_cpu_s()
    seconds = await echo.observe(messages)
    figures = {
        RECEIVED: total / seconds,
        CPU: (echo.cpu_s() - before + own_cpu_s() - own) / total * 1e6,
    }
    report.add(_echo(len(parts)), **figures)
    report.pause(_echo_loop(len(parts)), echo.pause(since))


def _sum(report: Report, streams: int) -> None:
    """The rate if all parts came one after another, and their CPU."""
    rows = {_echo(streams): RECEIVED, COMMIT: RECEIVED, FULL_COMMIT: STORED, EMBEDDING: STORED, ANALYSING: STORED}
    apart = sum(1 / report.values(row, column)[-1] for row, column in rows.items())
    cpu_us = sum(report.values(row, CPU)[-1] for row in rows)
    report.add(_parts(streams), **{STORED: 1 / apart, CPU: cpu_us})
    with_lite = apart + 1 / report.values(LITE, INDEXED)[-1]
    report.add(_all_parts(streams), **{INDEXED: 1 / with_lite, CPU: cpu_us + report.values(LITE, CPU)[-1]})


async def measure_alone(report: Report, server: Served, echo: EchoServer, file: Path, count: int, name: str) -> None:
    """One observation at a time, until its acknowledgement; a commit and an echo of the same after each."""
    observations = Talk(8).observations(count)
    wire = [observation_to_wire(one) for one in observations]
    vector = HashingEmbedder().vectors(["one"])[0].tobytes()
    times: dict[str, list[float]] = {row: [] for row in (LONE, LONE_COMMIT, LONE_ECHO, LONE_SUM)}
    message = pb.ObserveRequest(batch=pb.ObservationBatch(first_sequence=1, observations=wire[:1]))
    own = 0.0
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(memstream.connect(server.address))
        memory = await client.create_memory(f"bench/{name}")
        stream = await stack.enter_async_context(memory.observe("bench", ack_level=memstream.AckLevel.RECEIVED))
        ask = await stack.enter_async_context(echo.echoing(message))
        opened = stack.enter_context(database(file))
        before = server.cpu()
        for one, sent in zip(observations, wire, strict=True):
            own_before, began = own_cpu_s(), time.perf_counter()
            await stream.send(one)
            await stream.flush()
            times[LONE].append(time.perf_counter() - began)
            own += own_cpu_s() - own_before
            times[LONE_COMMIT].append(committed(opened, [(sent.SerializeToString(), vector)], 1))
            times[LONE_ECHO].append(await ask())
            times[LONE_SUM].append(times[LONE_COMMIT][-1] + times[LONE_ECHO][-1])
        used = server.cpu().since(before)
    for row, seconds in times.items():
        report.add(row, **{"p50 ms": percentile(seconds, 0.5) * 1e3})
    report.add(LONE, **{CPU: (own + used.server) / count * 1e6, "server µs": used.server / count * 1e6})


def _ours(streams: int) -> str:
    return f"memstream, {_streams(streams)}"


def _loop(streams: int) -> str:
    return f"memstream's event loop, {_streams(streams)}"


def _echo_loop(streams: int) -> str:
    return f"bare echo's event loop, {_streams(streams)}"


def _echo(streams: int) -> str:
    return f"bare echo, {_streams(streams)}"


def _parts(streams: int) -> str:
    return f"echo + commits + embedding + stemming, {_streams(streams)}"


def _all_parts(streams: int) -> str:
    return f"these + bare Milvus Lite, {_streams(streams)}"


def _streams(count: int) -> str:
    return f"{count} stream{'s' if count > 1 else ''}"


def _enter(report: Report, streams: int, count: int, found: Round) -> None:
    figures = {
        RECEIVED: count / found.received_s,
        STORED: count / found.stored_s,
        INDEXED: count / found.indexed_s,
        CPU: (found.client_s + found.server.both) / count * 1e6,
        "client µs": found.client_s / count * 1e6,
        "server µs": found.server.server / count * 1e6,
        "lite µs": found.server.lite / count * 1e6,
    }
    report.add(_ours(streams), **figures)
    report.pause(_loop(streams), found.pause)


async def measure(report: Report, size: Size, rounds: int) -> None:
    """All rounds, each kind of measurement in its turn."""
    material = Material.of(COUNT[size])
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        await measure_lite(report, material, scratch / "lite")
        with (
            EchoServer(scratch) as echo,
            Served(scratch / "data", index_flush_interval_s=FLUSH_INTERVAL_S[size]) as server,
        ):
            await observe(server, [material.observations[:500]], "warm")
            for number in range(rounds):
                await asyncio.to_thread(measure_parts, report, material, scratch / f"bare-{number}.db")
                for streams in STREAMS:
                    parts = _split(material.observations, streams)
                    await measure_echo(report, echo, parts)
                    _sum(report, streams)
                    found = await observe(server, parts, f"{number}-{streams}")
                    _enter(report, streams, sum(map(len, parts)), found)
                await measure_alone(report, server, echo, scratch / "alone.db", ALONE[size], f"alone-{number}")


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report(COLUMNS)
    asyncio.run(measure(report, size, rounds or ROUNDS[size]))
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of observing."""
    told: list[Claim] = []
    for streams in STREAMS:
        ours, said = _ours(streams), _streams(streams)
        told += [
            claim(report, f"received, a burst, {said}", ours, RECEIVED, COMMIT),
            claim(report, f"received = stored, sustained, {said}", ours, STORED, COMMIT, at_least(0.5), RECEIVED),
            claim(report, f"received, a burst, beside echo, {said}", ours, RECEIVED, _echo(streams)),
            claim(report, f"stored, {said}", ours, STORED, _parts(streams)),
            claim(
                report,
                f"stored until the outbox is empty, {said}",
                ours,
                INDEXED,
                _all_parts(streams),
                at_least(3_000, "/s"),
            ),
            pause(report, f"event loop's longest pause, {said}", _loop(streams), _echo_loop(streams)),
        ]
    told += [
        claim(report, "a lone observation acknowledged, p50", LONE, "p50 ms", LONE_COMMIT, at_most(3)),
        claim(report, "a lone observation beside its parts, p50", LONE, "p50 ms", LONE_SUM),
    ]
    return told


if __name__ == "__main__":
    standalone(__doc__, run, claims)
