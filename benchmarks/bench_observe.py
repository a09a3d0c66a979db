"""How many observations a second become received, stored and indexed, through the SDK.

    python benchmarks/bench_observe.py [--full] [--rounds N] [--json FILE]

One stream into one memory, and eight streams into eight. The clock runs until the last observation is *received*
(durable), *stored* (decided, every recall sees it) and indexed (the outbox is empty, Milvus Lite has flushed).
Beside them, in turns with them: a bare gRPC echo of the same messages, and a bare grouped SQLite commit of the same
rows. Client, server and Milvus Lite share the machine: the CPU of each is shown per observation.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bare import EchoServer, committed
from report import Report, options
from served import Cpu, Served
from texts import Talk

import memstream
from memstream.codec import observation_to_wire
from memstream.observe import BATCH_MAX
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.adapters.models.hashing import HashingEmbedder

SHORT, FULL = 16_000, 100_000
"""Observations a round, shared by its streams."""
GROUP = 512
"""Rows of one bare commit: the most the server decides together."""
FLUSH_INTERVAL_S = 2.0
"""Instead of the default 15, so that the end of a round is not spent on waiting for the clock."""
COLUMNS = (
    "received/s",
    "stored/s",
    "indexed/s",
    "client µs",
    "server µs",
    "lite µs",
    "loop stall ms",
)


@dataclass(frozen=True)
class Round:
    """Seconds from the first send, CPU of each process, and the longest time a small call had to wait."""

    received_s: float
    stored_s: float
    indexed_s: float
    client_s: float
    server: Cpu
    stall_s: float


async def observe(server: Served, streams: Sequence[Sequence[memstream.Observation]], name: str) -> Round:
    """One round: every stream into a new memory of its own."""
    async with memstream.connect(server.address) as client:
        memories = [await client.create_memory(f"bench/{name}-{number}") for number in range(len(streams))]
        async with contextlib.AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(memory.observe("bench", ack_level=memstream.AckLevel.INDEXED))
                for memory in memories
            ]
            asked = asyncio.create_task(_asked(client))
            before, client_before, began = server.cpu(), _own_cpu(), time.perf_counter()
            sending = [asyncio.create_task(_send(stream, each)) for stream, each in zip(opened, streams, strict=True)]
            counts = [len(each) for each in streams]
            await _until(lambda: all(one.received >= n for one, n in zip(opened, counts, strict=True)), sending)
            received = time.perf_counter()
            await _until(lambda: all(one.stored >= n for one, n in zip(opened, counts, strict=True)), sending)
            stored = time.perf_counter()
            asked.cancel()
            stalls = await asked
            await asyncio.gather(*(stream.flush() for stream in opened))
            indexed = time.perf_counter()
            used = server.cpu().since(before)
    return Round(
        received - began, stored - began, indexed - began, _own_cpu() - client_before, used, max(stalls, default=0.0)
    )


async def _send(stream: memstream.ObserveStream, observations: Sequence[memstream.Observation]) -> None:
    for one in observations:
        await stream.send(one)


async def _asked(client: memstream.Client) -> list[float]:
    """How long a small call takes, again and again until cancelled: what others feel of the load."""
    seconds: list[float] = []
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            began = time.perf_counter()
            await client.server_info()
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)
    return seconds


async def _until(reached: Callable[[], bool], sending: Sequence[asyncio.Task[None]]) -> None:
    while not reached():
        for task in sending:
            if task.done():
                task.result()
        await asyncio.sleep(0.005)


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


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


async def measure(report: Report, count: int, rounds: int) -> None:
    """All rounds, each kind of measurement in its turn."""
    observations = Talk().observations(count)
    vectors = HashingEmbedder().vectors([str(one.body) for one in observations])
    rows = [
        (observation_to_wire(one).SerializeToString(), vector.tobytes())
        for one, vector in zip(observations, vectors, strict=True)
    ]
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with (
            EchoServer(scratch) as echo,
            Served(scratch / "data", index_flush_interval_s=FLUSH_INTERVAL_S) as server,
        ):
            await observe(server, [observations[:500]], "warm")
            for number in range(rounds):
                seconds = committed(scratch / f"bare-{number}.db", rows, GROUP)
                report.add("bare SQLite commit", **{"stored/s": count / seconds})
                for streams in (1, 8):
                    parts = _split(observations, streams)
                    total = sum(map(len, parts))
                    seconds = await echo.observe([_messages(part) for part in parts])
                    report.add(_row("bare echo", streams), **{"received/s": total / seconds})
                    found = await observe(server, parts, f"{number}-{streams}")
                    _enter(report, _row("memstream", streams), total, found)


def _row(what: str, streams: int) -> str:
    return f"{what}, {streams} stream{'s' if streams > 1 else ''}"


def _enter(report: Report, row: str, count: int, found: Round) -> None:
    figures = {
        "received/s": count / found.received_s,
        "stored/s": count / found.stored_s,
        "indexed/s": count / found.indexed_s,
        "client µs": found.client_s / count * 1e6,
        "server µs": found.server.server / count * 1e6,
        "lite µs": found.server.lite / count * 1e6,
        "loop stall ms": found.stall_s * 1e3,
    }
    report.add(row, **figures)


def main() -> None:
    """Measure and print."""
    given = options(__doc__).parse_args()
    report = Report(COLUMNS)
    count = FULL if given.full else SHORT
    asyncio.run(measure(report, count, given.rounds or 3))
    report.show()
    for streams in (1, 8):
        ours = _row("memstream", streams)
        report.ratio(f"{ours}: stored / bare SQLite commit", ours, "bare SQLite commit", "stored/s")
        report.ratio(f"{ours}: received / bare echo", ours, _row("bare echo", streams), "received/s")
    report.write(given.json)


if __name__ == "__main__":
    main()
