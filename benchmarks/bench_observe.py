"""Observations per second until received, stored and indexed, through the SDK.

    python benchmarks/bench_observe.py [--full | --tiny] [--rounds N] [--json FILE]

One stream into one memory, and eight streams into eight. The clock runs until the last observation is *received*
(durable), *stored* (decided, visible to every recall) and *indexed* (the outbox is empty, Milvus Lite has flushed).
Then single observations, one after another. Rounds alternate with the unavoidable parts: a bare gRPC echo of the same
messages, a bare grouped SQLite commit of the same rows, embedding, tokenising and stemming, and (once) a Milvus Lite
that stores the same vectors. Client, server and Milvus Lite share the machine; the CPU of each is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bare import open_database, start_milvus_lite, time_commits
from claims import CPU, Claim, at_least, at_most, make_claim, make_pause_claim, run_standalone
from echo import EchoServer
from probe import Pause
from report import PAUSES, Report, Size, own_cpu_s, percentile
from served import BenchServer, Cpu
from texts import SentenceSource

import memstream
from memstream.codec import observation_to_wire
from memstream.observe import BATCH_MAX
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.adapters.models.hashing import HashingEmbedder

COUNT = {Size.TINY: 800, Size.SHORT: 16_000, Size.FULL: 100_000}
"""Observations per round, shared by its streams."""
SINGLE_COUNT = {Size.TINY: 5, Size.SHORT: 200, Size.FULL: 1_000}
"""Observations sent one after another."""
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 3}
STREAMS = (1, 8)
GROUP = 512
"""Rows per bare commit."""
EMBEDDED = 128
"""Texts embedded per call: one message's."""
FLUSH_INTERVAL_S = {Size.TINY: 0.2, Size.SHORT: 2.0, Size.FULL: 2.0}
"""Instead of the default 15, so that the end of a round does not wait for the timer."""
COLUMNS = ("received /s", "stored /s", "indexed /s", "p50 ms", CPU, "client µs", "server µs", "lite µs", *PAUSES)
RECEIVED, STORED, INDEXED = "received /s", "stored /s", "indexed /s"
COMMIT, FULL_COMMIT = "grouped SQLite commit of observations", "grouped SQLite commit with vectors"
EMBEDDING, ANALYSING, LITE = "embedding", "tokenising and stemming", "bare Milvus Lite"
SINGLE, SINGLE_COMMIT, SINGLE_ECHO, SINGLE_SUM = (
    "single observation",
    "bare commit with fsync",
    "bare echo",
    "echo + commit",
)


@dataclass(frozen=True)
class Round:
    """Seconds from the first send, CPU of each process, and the longest pause of the server's event loop."""

    received_s: float
    stored_s: float
    indexed_s: float
    client_s: float
    server: Cpu
    longest_pause: Pause


@dataclass(frozen=True)
class Material:
    """The same observations for all sides."""

    observations: list[memstream.Observation]
    texts: list[str]
    rows: list[tuple[bytes, bytes | None]]

    @classmethod
    def make(cls, count: int) -> Material:
        """`count` observations, with their messages and vectors as bytes."""
        observations = SentenceSource().make_observations(count)
        texts = [str(one.body) for one in observations]
        wire = [observation_to_wire(one).SerializeToString() for one in observations]
        vectors = [vector.tobytes() for vector in HashingEmbedder().vectors(texts)]
        return cls(observations, texts, list(zip(wire, vectors, strict=True)))


async def observe_round(server: BenchServer, streams: Sequence[Sequence[memstream.Observation]], name: str) -> Round:
    """One round: every stream writes into its own new memory."""
    async with memstream.connect(server.address) as client:
        memories = [await client.create_memory(f"bench/{name}-{number}") for number in range(len(streams))]
        async with contextlib.AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(memory.observe("bench", ack_level=memstream.AckLevel.INDEXED))
                for memory in memories
            ]
            since, before, client_before, began = time.monotonic(), server.cpu_used(), own_cpu_s(), time.perf_counter()
            sending = [
                asyncio.create_task(_send_all(stream, each)) for stream, each in zip(opened, streams, strict=True)
            ]
            counts = [len(each) for each in streams]
            await _wait_until(lambda: all(one.received >= n for one, n in zip(opened, counts, strict=True)), sending)
            received = time.perf_counter()
            await _wait_until(lambda: all(one.stored >= n for one, n in zip(opened, counts, strict=True)), sending)
            stored = time.perf_counter()
            await asyncio.gather(*(stream.flush() for stream in opened))
            indexed = time.perf_counter()
            used, longest = server.cpu_used().since(before), server.longest_pause(since)
    return Round(received - began, stored - began, indexed - began, own_cpu_s() - client_before, used, longest)


async def _send_all(stream: memstream.ObserveStream, observations: Sequence[memstream.Observation]) -> None:
    for one in observations:
        await stream.send(one)


async def _wait_until(reached: Callable[[], bool], sending: Sequence[asyncio.Task[None]]) -> None:
    while not reached():
        for task in sending:
            if task.done():
                task.result()
        await asyncio.sleep(0.005)


def _make_messages(observations: Sequence[memstream.Observation]) -> list[pb.ObserveRequest]:
    wire = [observation_to_wire(one) for one in observations]
    return [
        pb.ObserveRequest(
            batch=pb.ObservationBatch(first_sequence=start + 1, observations=wire[start : start + BATCH_MAX])
        )
        for start in range(0, len(wire), BATCH_MAX)
    ]


def _split_evenly(observations: Sequence[memstream.Observation], parts: int) -> list[Sequence[memstream.Observation]]:
    each = len(observations) // parts
    return [observations[number * each : (number + 1) * each] for number in range(parts)]


def measure_parts(report: Report, material: Material, file: Path) -> None:
    """The parts that need no other process: two commits, embedding, and stemming."""
    count = len(material.texts)

    def commit_rows(rows: Sequence[tuple[bytes, bytes | None]]) -> None:
        with open_database(file) as opened:
            time_commits(opened, rows, GROUP)

    def embed_texts() -> None:
        embedder = HashingEmbedder()
        for start in range(0, count, EMBEDDED):
            embedder.vectors(material.texts[start : start + EMBEDDED])

    def analyse_texts() -> None:
        analyzer = SnowballAnalyzer()
        for text in material.texts:
            analyzer.terms(text)

    parts: dict[str, tuple[str, Callable[[], None]]] = {
        COMMIT: (RECEIVED, lambda: commit_rows([(observation, None) for observation, _ in material.rows])),
        FULL_COMMIT: (STORED, lambda: commit_rows(material.rows)),
        EMBEDDING: (STORED, embed_texts),
        ANALYSING: (STORED, analyse_texts),
    }
    for row, (column, work) in parts.items():
        before, began = own_cpu_s(), time.perf_counter()
        work()
        seconds, used = time.perf_counter() - began, own_cpu_s() - before
        report.add_round(row, **{column: count / seconds, CPU: used / count * 1e6})


async def measure_lite(report: Report, material: Material, directory: Path) -> None:
    """Store the same vectors durably in a Milvus Lite."""
    vectors = HashingEmbedder().vectors(material.texts)
    async with start_milvus_lite(directory) as lite:
        before, own = lite.cpu_s(), own_cpu_s()
        seconds = await lite.fill_collection([vectors])
        used = lite.cpu_s() - before
        figures = {INDEXED: len(vectors) / seconds, CPU: (used + own_cpu_s() - own) / len(vectors) * 1e6}
        report.add_round(LITE, **figures, **{"lite µs": used / len(vectors) * 1e6})


async def measure_echo(report: Report, echo: EchoServer, parts: Sequence[Sequence[memstream.Observation]]) -> None:
    """Send the messages of these streams to the echo and back."""
    messages, total = [_make_messages(part) for part in parts], sum(map(len, parts))
    since, before, own = time.monotonic(), echo.cpu_s(), own_cpu_s()
    seconds = await echo.time_observe(messages)
    figures = {
        RECEIVED: total / seconds,
        CPU: (echo.cpu_s() - before + own_cpu_s() - own) / total * 1e6,
    }
    report.add_round(_echo_row(len(parts)), **figures)
    report.add_pause(_echo_loop_row(len(parts)), echo.longest_pause(since))


def _add_sums(report: Report, streams: int) -> None:
    """Add the rate of all parts in sequence, and their CPU."""
    rows = {_echo_row(streams): RECEIVED, COMMIT: RECEIVED, FULL_COMMIT: STORED, EMBEDDING: STORED, ANALYSING: STORED}
    apart = sum(1 / report.round_values(row, column)[-1] for row, column in rows.items())
    cpu_us = sum(report.round_values(row, CPU)[-1] for row in rows)
    report.add_round(_parts_row(streams), **{STORED: 1 / apart, CPU: cpu_us})
    with_lite = apart + 1 / report.round_values(LITE, INDEXED)[-1]
    report.add_round(
        _all_parts_row(streams), **{INDEXED: 1 / with_lite, CPU: cpu_us + report.round_values(LITE, CPU)[-1]}
    )


async def measure_single(
    report: Report, server: BenchServer, echo: EchoServer, file: Path, count: int, name: str
) -> None:
    """Send observations one at a time until acknowledged; a commit and an echo of the same after each."""
    observations = SentenceSource(8).make_observations(count)
    wire = [observation_to_wire(one) for one in observations]
    vector = HashingEmbedder().vectors(["one"])[0].tobytes()
    times: dict[str, list[float]] = {row: [] for row in (SINGLE, SINGLE_COMMIT, SINGLE_ECHO, SINGLE_SUM)}
    message = pb.ObserveRequest(batch=pb.ObservationBatch(first_sequence=1, observations=wire[:1]))
    own = 0.0
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(memstream.connect(server.address))
        memory = await client.create_memory(f"bench/{name}")
        stream = await stack.enter_async_context(memory.observe("bench", ack_level=memstream.AckLevel.RECEIVED))
        ask = await stack.enter_async_context(echo.open_echoing(message))
        opened = stack.enter_context(open_database(file))
        before = server.cpu_used()
        for one, sent in zip(observations, wire, strict=True):
            own_before, began = own_cpu_s(), time.perf_counter()
            await stream.send(one)
            await stream.flush()
            times[SINGLE].append(time.perf_counter() - began)
            own += own_cpu_s() - own_before
            times[SINGLE_COMMIT].append(time_commits(opened, [(sent.SerializeToString(), vector)], 1))
            times[SINGLE_ECHO].append(await ask())
            times[SINGLE_SUM].append(times[SINGLE_COMMIT][-1] + times[SINGLE_ECHO][-1])
        used = server.cpu_used().since(before)
    for row, seconds in times.items():
        report.add_round(row, **{"p50 ms": percentile(seconds, 0.5) * 1e3})
    report.add_round(SINGLE, **{CPU: (own + used.server) / count * 1e6, "server µs": used.server / count * 1e6})


def _observe_row(streams: int) -> str:
    return f"memstream, {_stream_count(streams)}"


def _loop_row(streams: int) -> str:
    return f"event loop of memstream, {_stream_count(streams)}"


def _echo_loop_row(streams: int) -> str:
    return f"event loop of the bare echo, {_stream_count(streams)}"


def _echo_row(streams: int) -> str:
    return f"bare echo, {_stream_count(streams)}"


def _parts_row(streams: int) -> str:
    return f"echo + commits + embedding + stemming, {_stream_count(streams)}"


def _all_parts_row(streams: int) -> str:
    return f"the same + bare Milvus Lite, {_stream_count(streams)}"


def _stream_count(count: int) -> str:
    return f"{count} stream{'s' if count > 1 else ''}"


def _add_row(report: Report, streams: int, count: int, found: Round) -> None:
    figures = {
        RECEIVED: count / found.received_s,
        STORED: count / found.stored_s,
        INDEXED: count / found.indexed_s,
        CPU: (found.client_s + found.server.total) / count * 1e6,
        "client µs": found.client_s / count * 1e6,
        "server µs": found.server.server / count * 1e6,
        "lite µs": found.server.lite / count * 1e6,
    }
    report.add_round(_observe_row(streams), **figures)
    report.add_pause(_loop_row(streams), found.longest_pause)


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """All rounds; each runs every kind of measurement."""
    material = Material.make(COUNT[size])
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        await measure_lite(report, material, scratch / "lite")
        with (
            EchoServer(scratch) as echo,
            BenchServer(
                scratch / "data", index_flush_interval_s=FLUSH_INTERVAL_S[size], index_from_fragments=0
            ) as server,
        ):
            await observe_round(server, [material.observations[:500]], "warm")
            for number in range(rounds):
                await asyncio.to_thread(measure_parts, report, material, scratch / f"bare-{number}.db")
                for streams in STREAMS:
                    parts = _split_evenly(material.observations, streams)
                    await measure_echo(report, echo, parts)
                    _add_sums(report, streams)
                    found = await observe_round(server, parts, f"{number}-{streams}")
                    _add_row(report, streams, sum(map(len, parts)), found)
                await measure_single(report, server, echo, scratch / "alone.db", SINGLE_COUNT[size], f"alone-{number}")


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report(COLUMNS)
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about observing."""
    claims: list[Claim] = []
    for streams in STREAMS:
        ours, suffix = _observe_row(streams), _stream_count(streams)
        claims += [
            make_claim(report, f"received, burst, {suffix}", ours, RECEIVED, COMMIT),
            make_claim(
                report, f"sustained (received = stored), {suffix}", ours, STORED, COMMIT, at_least(0.5), RECEIVED
            ),
            make_claim(report, f"received, burst, vs echo, {suffix}", ours, RECEIVED, _echo_row(streams)),
            make_claim(report, f"stored, {suffix}", ours, STORED, _parts_row(streams)),
            make_claim(
                report,
                f"indexed (outbox empty), {suffix}",
                ours,
                INDEXED,
                _all_parts_row(streams),
                at_least(3_000, "/s"),
            ),
            make_pause_claim(
                report, f"longest event-loop pause, {suffix}", _loop_row(streams), _echo_loop_row(streams)
            ),
        ]
    claims += [
        make_claim(report, "single observation received, p50", SINGLE, "p50 ms", SINGLE_COMMIT, at_most(3)),
        make_claim(report, "single observation vs its parts, p50", SINGLE, "p50 ms", SINGLE_SUM),
    ]
    return claims


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
