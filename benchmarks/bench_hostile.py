"""What attacks on a server cost it and its honest clients, worst first.

    python benchmarks/bench_hostile.py [--full | --tiny] [--rounds N] [--json FILE]

HOSTILE="tenant:watches anyone:bursts" in the environment chooses attacks.

A server that asks who calls has one memory of 1,000 fragments; an honest client asks it one question after the other
and observes a sentence after each, over one connection, thirty times a second at most: quiet, and while an attack of
`tests/support/attacks.py` is under way in a process of its own, without any credential (names that begin with "anyone")
or with another tenant's ("tenant"). The server is started again for each attack, and runs with its default limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench_overload import guarded
from claims import Claim, at_most, claim, standalone
from report import Report, Size, percentile
from served import Served
from texts import Talk

import memstream

HERE = Path(__file__).parent
HELD = {Size.TINY: 20, Size.SHORT: 1_000, Size.FULL: 1_000}
SECONDS = {Size.TINY: 1.0, Size.SHORT: 5.0, Size.FULL: 15.0}
ANYONE = (
    "empty_observations",
    "empty_observations_16_mb",
    "empty_observations_gzip",
    "gzip_bomb",
    "health_message",
    "rapid_resets",
    "cancelled_calls",
    "bursts",
    "cancelled_under_way",
    "half_bodies",
    "half_bodies_that_flow",
    "half_prefaces",
    "watches",
    "health_watches",
    "large_headers",
)
TENANT = (
    "empty_observations",
    "empty_observations_16_mb",
    "empty_observations_gzip",
    "gzip_bomb",
    "empty_conditions",
    "empty_ids",
    "nested",
    "unknown_fields",
    "unknown_groups",
    "packed_floats",
    "single_floats",
    "metadata_entries",
    "rapid_resets",
    "cancelled_calls",
    "bursts",
    "cancelled_under_way",
    "half_bodies",
    "half_bodies_that_flow",
    "watches",
    "large_headers",
    "queries",
)
TINY = ("empty_observations", "cancelled_calls")
PAUSE_S = 0.02
CHOSEN = "HOSTILE"
COLUMNS = RSS, PEAK, GROWTH, AFTER, QUIET, QUIET_P99, P50, P99, RATIO, CALLS, FAILED = (
    "RSS MB",
    "peak MB",
    "growth MB",
    "after MB",
    "quiet p50 ms",
    "quiet p99 ms",
    "p50 ms",
    "p99 ms",
    "p99 ratio",
    "calls",
    "failed",
)


@dataclass
class Honest:
    """What an honest client saw."""

    seconds: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)


class Resident:
    """The largest resident memory of the server while the block runs, looked at 200 times a second."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.peak_mb = 0.0

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.005):
            self.peak_mb = max(self.peak_mb, self._server.resident_mb()[0])


async def honest(memory: memstream.Memory, seconds: float) -> Honest:
    """A client's calls for so long, each timed."""
    talk, seen, until = Talk(3), Honest(), time.monotonic() + seconds
    while time.monotonic() < until:
        for call in (memory.recall_once(talk.sentence()), memory.observe_batch([talk.sentence()])):
            began = time.perf_counter()
            try:
                await call
            except memstream.MemstreamError as error:
                seen.failed[f"{type(error).__name__}: {error}"] += 1
            seen.seconds.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)
    return seen


@contextlib.contextmanager
def attack(address: str, name: str, token: str, came: dict[str, int]) -> Iterator[None]:
    """`name` under way in a process of its own."""
    variables = {"MEMSTREAM_ATTACK_TOKEN": token, "MEMSTREAM_ATTACK_NAMESPACE": "flood"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.attacks", address, name],
        cwd=HERE.parent,
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield
        process.stdin.close()
        came.update(json.loads(process.stdout.readline() or "{}"))
        process.wait(10)
    finally:
        process.kill()
        process.wait()


async def measure_one(report: Report, size: Size, name: str, by: str) -> None:
    """One attack on a server of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        access, tokens = guarded(Path(scratch) / "access")
        with Served(Path(scratch) / "data", **access) as server:
            async with memstream.connect(server.address, token=tokens["flood"]) as client:
                await client.create_memory("flood/m")
            async with memstream.connect(server.address, token=tokens["quiet"]) as client:
                memory = await client.create_memory("quiet/m")
                talk = Talk(1)
                for _ in range(HELD[size] // 20):
                    await memory.observe_batch([talk.sentence() for _ in range(20)])
                await honest(memory, min(2.0, SECONDS[size]))
                quiet = await honest(memory, SECONDS[size])
                before, came = server.resident_mb()[0], dict[str, int]()
                token = tokens["flood"] if by == "tenant" else ""
                with Resident(server) as resident, attack(server.address, name, token, came):
                    seen = await honest(memory, SECONDS[size])
                await asyncio.sleep(1.0)
                after = server.resident_mb()[0]
        p99, quiet_p99 = percentile(seen.seconds, 0.99) * 1e3, percentile(quiet.seconds, 0.99) * 1e3
        figures = {
            RSS: before,
            PEAK: resident.peak_mb,
            GROWTH: resident.peak_mb - before,
            AFTER: after,
            QUIET_P99: quiet_p99,
            P99: p99,
        }
        figures |= {QUIET: percentile(quiet.seconds, 0.5) * 1e3, P50: percentile(seen.seconds, 0.5) * 1e3}
        figures |= {RATIO: p99 / quiet_p99, CALLS: len(seen.seconds), FAILED: sum(seen.failed.values())}
        report.add(f"{by}: {name}", **figures)
        report.more.setdefault("came", {})[f"{by}: {name}"] = {**came, "honest failures": dict(seen.failed)}
        print(
            f"{by}: {name}: {came}, failed {dict(seen.failed)}",
            {k: round(v, 1) for k, v in figures.items()},
            file=sys.stderr,
        )


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report(COLUMNS)
    wanted = os.environ.get(CHOSEN, "").split()
    for _ in range(rounds or 1):
        for by, names in (("anyone", ANYONE), ("tenant", TENANT)):
            for name in names:
                if (name in TINY or size is not Size.TINY) and (not wanted or f"{by}:{name}" in wanted):
                    asyncio.run(measure_one(report, size, name, by))
    worst_first = sorted(report.rows, key=lambda row: -report.median(row, RATIO))
    report.rows = {row: report.rows[row] for row in worst_first}
    return report


def claims(report: Report) -> list[Claim]:
    """The worst of all attacks."""
    slowest = max(report.rows, key=lambda row: report.median(row, RATIO))
    largest = max(report.rows, key=lambda row: report.median(row, GROWTH))
    return [
        claim(report, f"honest p99, {slowest}", slowest, P99, slowest, at_most(2), other_column=QUIET_P99),
        claim(report, f"resident memory, {largest}", largest, PEAK, largest, other_column=RSS),
        claim(report, f"growth of resident memory, {largest}", largest, GROWTH, largest, at_most(64, "MB"), RSS),
    ]


if __name__ == "__main__":
    standalone(__doc__, run, claims)
