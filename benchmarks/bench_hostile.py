"""Cost of attacks for the server and its honest clients.

    python benchmarks/bench_hostile.py [--full | --tiny] [--rounds N] [--json FILE]

A server with API keys has one memory of 1,000 fragments. An honest client recalls and observes alternately over one
connection, at most thirty times a second: without an attack, and while an attack of `tests/support/attacks.py` runs in
a separate process, without credentials ("anyone") or with another tenant's ("tenant"). HOSTILE="anyone:NAME
tenant:NAME" in the environment selects attacks. The server is restarted for each attack and uses its default limits.
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
from functools import partial
from pathlib import Path

from bench_overload import make_access
from claims import Claim, at_most, make_claim, run_standalone
from report import Report, Size, percentile
from served import BenchServer
from texts import SentenceSource

import memstream

HERE = Path(__file__).parent
HELD = {Size.TINY: 20, Size.SHORT: 1_000, Size.FULL: 1_000}
SECONDS = {Size.TINY: 0.2, Size.SHORT: 5.0, Size.FULL: 15.0}
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
class HonestCalls:
    """Latencies and failures of an honest client."""

    seconds: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)


class PeakSampler:
    """Samples the server's resident memory 200 times a second during the block and keeps the peak."""

    def __init__(self, server: BenchServer) -> None:
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.peak_mb = 0.0

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.005):
            self.peak_mb = max(self.peak_mb, self._server.resident_mb()[0])


async def run_honest_client(memory: memstream.Memory, seconds: float) -> HonestCalls:
    """Recall and observe for `seconds`, timing each call."""
    talk, seen, until = SentenceSource(3), HonestCalls(), time.monotonic() + seconds
    while time.monotonic() < until:
        for call in (
            partial(memory.recall_once, talk.make_sentence()),
            partial(memory.observe_batch, [talk.make_sentence()]),
        ):
            began = time.perf_counter()
            try:
                await call()
            except memstream.MemstreamError as error:
                seen.failed[f"{type(error).__name__}: {error}"] += 1
            seen.seconds.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)
    return seen


@contextlib.contextmanager
def run_attack(address: str, name: str, token: str, attack_counts: dict[str, int]) -> Iterator[None]:
    """Run attack `name` in a separate process; `attack_counts` is filled at the end."""
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
        attack_counts.update(json.loads(process.stdout.readline() or "{}"))
        process.wait(10)
    finally:
        process.kill()
        process.wait()


async def measure_attack(report: Report, size: Size, name: str, by: str) -> None:
    """Run one attack against a new server."""
    with tempfile.TemporaryDirectory() as scratch:
        access, tokens = make_access(Path(scratch) / "access")
        with BenchServer(Path(scratch) / "data", **access) as server:
            async with memstream.connect(server.address, token=tokens["flood"]) as client:
                await client.create_memory("flood/m")
            async with memstream.connect(server.address, token=tokens["quiet"]) as client:
                memory = await client.create_memory("quiet/m")
                talk = SentenceSource(1)
                for _ in range(HELD[size] // 20):
                    await memory.observe_batch([talk.make_sentence() for _ in range(20)])
                await run_honest_client(memory, min(2.0, SECONDS[size]))
                quiet = await run_honest_client(memory, SECONDS[size])
                before, attack_counts = server.resident_mb()[0], dict[str, int]()
                token = tokens["flood"] if by == "tenant" else ""
                with PeakSampler(server) as resident, run_attack(server.address, name, token, attack_counts):
                    seen = await run_honest_client(memory, SECONDS[size])
                await asyncio.sleep(1.0)
                after = server.resident_mb()[0]
        p99, quiet_p99 = percentile(seen.seconds, 0.99) * 1e3, percentile(quiet.seconds, 0.99) * 1e3
        figures = {RSS: before, PEAK: resident.peak_mb, GROWTH: resident.peak_mb - before, AFTER: after}
        figures |= {QUIET_P99: quiet_p99, P99: p99}
        figures |= {QUIET: percentile(quiet.seconds, 0.5) * 1e3, P50: percentile(seen.seconds, 0.5) * 1e3}
        figures |= {RATIO: p99 / quiet_p99, CALLS: len(seen.seconds), FAILED: sum(seen.failed.values())}
        report.add_round(f"{by}: {name}", **figures)
        report.more.setdefault("came", {})[f"{by}: {name}"] = {**attack_counts, "honest failures": dict(seen.failed)}
        rounded = {column: round(value, 1) for column, value in figures.items()}
        print(f"{by}: {name}: {attack_counts}, failed {dict(seen.failed)}", rounded, file=sys.stderr)


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure the selected attacks."""
    report = Report(COLUMNS)
    wanted = os.environ.get("HOSTILE", "").split()
    for _ in range(rounds or 1):
        for by, names in (("anyone", ANYONE), ("tenant", TENANT)):
            for name in names:
                if (name in TINY or size is not Size.TINY) and (not wanted or f"{by}:{name}" in wanted):
                    asyncio.run(measure_attack(report, size, name, by))
    worst_first = sorted(report.rows, key=lambda row: -report.median_of(row, RATIO))
    report.rows = {row: report.rows[row] for row in worst_first}
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about the worst of all attacks: latency of an honest client, growth of the server's memory."""
    slowest = max(report.rows, key=lambda row: report.median_of(row, RATIO))
    largest = max(report.rows, key=lambda row: report.median_of(row, GROWTH))
    return [
        make_claim(report, f"honest p99, {slowest}", slowest, P99, slowest, at_most(2), other_column=QUIET_P99),
        make_claim(report, f"growth of memory, {largest}", largest, GROWTH, largest, at_most(64, "MB"), RSS),
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
