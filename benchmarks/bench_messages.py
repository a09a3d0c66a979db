"""Messages of conversations: appended in one call, the last ten of a long one, small ones beside large bodies.

    python benchmarks/bench_messages.py [--full | --tiny] [--rounds N] [--json FILE]

A round times calls of each way, one after another. CPU is user and system time of the server's process. Beside large
bodies, another client appends bodies of 4 MiB, one after another, and deletes them.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from claims import Claim, at_most, make_claim, run_standalone
from report import Report, Size, percentile
from served import BenchServer

import memstream
from memstream import NewMessage

LONG = {Size.TINY: 2_000, Size.SHORT: 100_000, Size.FULL: 100_000}
SHORT, BATCH, APPENDED = 100, 1_000, 20
CALLS = {Size.TINY: 5, Size.SHORT: 50, Size.FULL: 200}
LARGE_BYTES = 4 << 20
P50, CPU = "p50 in ms", "CPU in ms"
ONE, TWENTY = "20 messages in one call", "20 messages in 20 calls"
OF_SHORT, OF_LONG = "last 10 of 100", "last 10 of a long conversation"
ALONE, BESIDE = "one message", "one message beside bodies of 4 MiB"
MESSAGE = NewMessage(role="user", body='"' + "x" * 300 + '"')

Way = Callable[[], Awaitable[object]]


def list_ways(client: memstream.Client) -> dict[str, Way]:
    """What is compared."""
    talk, long, short = (client.conversation(f"bench/{name}") for name in ("talk", "long", "short"))

    async def append_each() -> None:
        for _ in range(APPENDED):
            await talk.append_messages([MESSAGE])

    async def read_last(conversation: memstream.Conversation) -> list[memstream.Message]:
        return [message async for message in conversation.messages(limit=10, newest_first=True)]

    return {
        ONE: lambda: talk.append_messages([MESSAGE] * APPENDED),
        TWENTY: append_each,
        OF_SHORT: lambda: read_last(short),
        OF_LONG: lambda: read_last(long),
        ALONE: lambda: talk.append_messages([MESSAGE]),
    }


async def measure_way(report: Report, server: BenchServer, name: str, way: Way, calls: int) -> None:
    """One row."""
    await way()
    before, took = server.cpu_used().total, []
    for _ in range(calls):
        began = time.perf_counter()
        await way()
        took.append(1_000 * (time.perf_counter() - began))
    report.add_round(name, **{P50: percentile(took, 0.5), CPU: 1_000 * (server.cpu_used().total - before) / calls})


async def append_large(address: str) -> None:
    """Append bodies until it is cancelled. Another keepalive makes another connection."""
    async with memstream.connect(address, keepalive_s=61.0) as client:
        large = client.conversation("bench/large")
        while True:
            await large.append_messages([NewMessage(body='"' + "y" * (LARGE_BYTES - 2) + '"')])
            await large.delete_messages()


async def measure_ways(report: Report, server: BenchServer, size: Size, rounds: int) -> None:
    """One row for each way."""
    async with memstream.connect(server.address) as client:
        for name, count in (("long", LONG[size]), ("short", SHORT)):
            for start in range(0, count, BATCH):
                await client.conversation(f"bench/{name}").append_messages([MESSAGE] * min(BATCH, count - start))
        ways = list_ways(client)
        for _ in range(rounds):
            for name, way in ways.items():
                await measure_way(report, server, name, way, CALLS[size])
            loading = asyncio.create_task(append_large(server.address))
            await measure_way(report, server, BESIDE, ways[ALONE], CALLS[size])
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)


def run(size: Size, rounds: int | None) -> Report:
    """Measure."""
    report = Report((P50, CPU))
    with tempfile.TemporaryDirectory() as scratch, BenchServer(Path(scratch) / "data", probed=False) as server:
        asyncio.run(measure_ways(report, server, size, rounds or 3))
    return report


def make_claims(report: Report) -> list[Claim]:
    """A list costs the same at any length; messages in one call cost a tenth of as many calls."""
    return [
        make_claim(report, "last 10 of a long conversation, CPU", OF_LONG, CPU, OF_SHORT, at_most(1.5)),
        make_claim(report, "last 10 of a long conversation, p50", OF_LONG, P50, OF_SHORT, at_most(1.5)),
        make_claim(report, "20 messages in one call, CPU", ONE, CPU, TWENTY, at_most(0.2)),
        make_claim(report, "20 messages in one call, p50", ONE, P50, TWENTY, at_most(0.2)),
        make_claim(report, "one message beside bodies of 4 MiB, p50", BESIDE, P50, ALONE, at_most(3.0)),
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run, make_claims)
