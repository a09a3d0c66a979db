"""Soak test: twenty minutes of mixed load against a real server, then checks for leaks and losses.

    python benchmarks/soak.py [--minutes 20] [--seed N] [--json FILE]

The program samples the server every ten seconds, stops the load, checks that nothing acknowledged is lost, deletes all
memories and waits until tasks, streams and open files are back at the counts of an idle server. It exits with 1 when
something leaks or is lost. `--minutes 1` is for trying it out: too short to judge the slope, which is then only shown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from report import describe_machine
from served import BenchServer
from soak_load import PATIENT, Load

import memstream

SAMPLE_S = 10.0
SETTLE_MAX_S = 120.0
JUDGED_MIN = 10.0
"""Minutes below which a slope is meaningless, because the server is still warming up."""
GROWTH_MAX = 0.04
"""Share of its resident memory by which noise alone may make the server grow over the second half; half of it over the
last quarter."""
STANDARD_ERRORS = 3.0
_METRIC = re.compile(r"^memstream_(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_GAUGES = ("tasks", "streams", "sessions", "producers", "watchers", "active_memories", "backlog", "outbox_depth")
MUST_RETURN = ("fds", "threads", "tasks", "streams", "sessions", "producers", "watchers", "active_memories", "backlog")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the server; memory and files in MB."""

    minute: float
    server_mb: float
    lite_mb: float
    fds: int
    threads: int
    tasks: int
    streams: int
    sessions: int
    producers: int
    watchers: int
    active_memories: int
    backlog: int
    outbox_depth: int
    wal_mb: float
    data_mb: float


class ServerSampler:
    """Samples a server from outside."""

    def __init__(self, server: BenchServer, metrics: str) -> None:
        self._server = server
        self._metrics = metrics
        self._began = time.monotonic()
        self.samples: list[Sample] = []

    async def take_sample(self) -> Sample:
        """Sample now."""
        return await asyncio.to_thread(self._take_sample)

    async def sample_forever(self) -> None:
        """Keep a sample every ten seconds until cancelled."""
        while True:
            self.samples.append(await self.take_sample())
            await asyncio.sleep(SAMPLE_S)

    def open_files(self) -> Counter[str]:
        """The targets of the server's file descriptors, with the numbers in the names masked."""
        found: Counter[str] = Counter()
        for link in Path(f"/proc/{self._server.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed in the meantime
                found[re.sub(r"\d+", "#", os.readlink(link))] += 1
        return found

    def _take_sample(self) -> Sample:
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=30) as answer:
            gauges = _parse_gauges(answer.read().decode("utf-8"))
        server_mb, lite_mb = self._server.resident_mb()
        process = Path(f"/proc/{self._server.pid}")
        sizes = {file: _file_size(file) for file in self._server.data_dir.rglob("*")}
        return Sample(
            minute=(time.monotonic() - self._began) / 60,
            server_mb=server_mb,
            lite_mb=lite_mb,
            fds=len(os.listdir(process / "fd")),
            threads=len(os.listdir(process / "task")),
            wal_mb=sum(size for file, size in sizes.items() if file.name.endswith("-wal")) / 1e6,
            data_mb=sum(sizes.values()) / 1e6,
            **{name: int(gauges.get(name, 0)) for name in _GAUGES},
        )


def _parse_gauges(text: str) -> dict[str, float]:
    """Values by name, summed over labels."""
    found: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def _file_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # deleted in the meantime
        return 0


@dataclass(frozen=True, slots=True)
class Slope:
    """A straight line through some samples."""

    mb_per_hour: float
    error: float
    """Its standard error, assuming independent samples."""
    noise_mb: float
    """Standard deviation around the line."""
    growth: float
    """Gain from the first sample to the last, as a share of the mean."""

    def is_rising(self, growth_max: float) -> bool:
        """Whether it is steeper than noise explains."""
        return self.growth > growth_max and self.mb_per_hour > STANDARD_ERRORS * self.error


def fit_slope(samples: Sequence[Sample], column: str) -> Slope:
    """Fit a line to one column in MB."""
    times, values = [one.minute / 60 for one in samples], [getattr(one, column) for one in samples]
    if len(samples) < 3:
        return Slope(0.0, 0.0, 0.0, 0.0)
    fit = statistics.linear_regression(times, values)
    rest = [value - fit.intercept - fit.slope * at for at, value in zip(times, values, strict=True)]
    noise = (sum(one * one for one in rest) / (len(rest) - 2)) ** 0.5
    spread = (sum((at - statistics.fmean(times)) ** 2 for at in times)) ** 0.5
    mean = statistics.fmean(values)
    return Slope(fit.slope, noise / spread, noise, fit.slope * (times[-1] - times[0]) / mean if mean else 0.0)


async def warm_up(address: str, load: Load) -> None:
    """Fill the pools of threads and connections, which stay; the idle sample comes after it."""
    async with memstream.connect(address, retry=PATIENT) as client:
        memory = await client.create_memory("soak/warm")
        await memory.observe_batch(["a first word"], ack_level=memstream.AckLevel.INDEXED)
        for _ in range(5):
            await asyncio.gather(*(memory.recall_once("word") for _ in range(20)), *(memory.stats() for _ in range(40)))
        await load.delete_memories(client)


async def wait_until_settled(sampler: ServerSampler, idle: Sample) -> Sample:
    """Wait until no count is above `idle`, at most SETTLE_MAX_S; returns the last sample."""
    until = time.monotonic() + SETTLE_MAX_S
    while True:
        now = await sampler.take_sample()
        if not find_leaks(now, idle) or time.monotonic() > until:
            return now
        await asyncio.sleep(2.0)


def find_leaks(now: Sample, idle: Sample) -> list[str]:
    """The counts that did not return to their idle value."""
    before, after = asdict(idle), asdict(now)
    return [
        f"{name}: {before[name]} idle before, {after[name]} after" for name in MUST_RETURN if after[name] > before[name]
    ]


async def run_soak(
    server: BenchServer, metrics: str, minutes: float, seed: int
) -> tuple[list[Sample], list[str], Load]:
    """Returns (samples, problems, the load)."""
    load, sampler = Load(server.address, seed), ServerSampler(server, metrics)
    await warm_up(server.address, load)
    await asyncio.sleep(5.0)
    idle, files = await sampler.take_sample(), sampler.open_files()
    async with memstream.connect(server.address, retry=PATIENT) as client:
        await load.create_memories(client)
        watching, running = asyncio.create_task(sampler.sample_forever()), asyncio.create_task(load.run())
        await asyncio.wait({watching, running}, timeout=minutes * 60, return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, running):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        problems = await load.check_acknowledged(client)
        await load.delete_memories(client)
    after = await wait_until_settled(sampler, idle)
    problems += [f"leaked {leak}" for leak in find_leaks(after, idle)]
    if after.fds > idle.fds:
        problems.append(f"opened since: {dict(sampler.open_files() - files)}")
    return [idle, *sampler.samples, after], problems, load


def print_samples(samples: Sequence[Sample]) -> None:
    """Print about twenty lines; the first is before the load, the last after it."""
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    names = list(asdict(samples[0]))
    print("  ".join(f"{name:>{_column_width(name)}}" for name in names))
    inner = samples[1:-1]
    step = max(1, len(inner) // 20)
    for one in (samples[0], *inner[::step], samples[-1]):
        print("  ".join(f"{_format_value(value):>{_column_width(name)}}" for name, value in asdict(one).items()))


def _column_width(name: str) -> int:
    return max(len(name), 6)


def _format_value(value: float | int) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def judge_slopes(samples: Sequence[Sample], minutes: float) -> list[str]:
    """Print the slopes. Returns columns that rise over the second half and over the last quarter."""
    problems: list[str] = []
    inner = samples[1:-1]
    for column in ("server_mb", "lite_mb", "wal_mb", "data_mb"):
        half, quarter = (fit_slope(inner[len(inner) * part // 4 :], column) for part in (2, 3))
        print(f"{column}: second half {_describe_slope(half)}; last quarter {_describe_slope(quarter)}")
        judged = column in ("server_mb", "lite_mb") and minutes >= JUDGED_MIN
        if judged and half.is_rising(GROWTH_MAX) and quarter.is_rising(GROWTH_MAX / 2):
            problems.append(f"{column} grows: {quarter.mb_per_hour:+.1f} MB/h in the last quarter")
    if minutes < JUDGED_MIN:
        print(f"(too short to judge: the first {JUDGED_MIN:.0f} minutes are warm-up)")
    return problems


def _describe_slope(line: Slope) -> str:
    error = f"standard error {line.error:.1f}, noise {line.noise_mb:.1f} MB"
    return f"{line.mb_per_hour:+.1f} MB/h ({error}, {line.growth:+.1%})"


def _format_counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counted.items())) or "none"


def main() -> None:
    """Run, print, and exit with 1 when something leaks or is lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="minutes of load")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the clients")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    arguments = parser.parse_args()
    with socket.socket() as probe:  # the server does not report its metrics port
        probe.bind(("127.0.0.1", 0))
        metrics = f"127.0.0.1:{probe.getsockname()[1]}"
    with (
        tempfile.TemporaryDirectory() as directory,
        BenchServer(Path(directory) / "data", probed=False, metrics_listen=metrics) as server,
    ):
        samples, problems, load = asyncio.run(run_soak(server, metrics, arguments.minutes, arguments.seed))
        log = server.read_log()
    print_samples(samples)
    problems += judge_slopes(samples, arguments.minutes)
    if "Traceback" in log:
        problems.append(f"the server's log has a traceback:\n{log[log.index('Traceback') - 500 :][:4_000]}")
    print(f"done: {_format_counts(load.ledger.done)}\nrefused: {_format_counts(load.ledger.refused)}")
    producers = load.ledger.producers.values()
    print(
        f"ledger: {sum(one.received for one in producers):,} numbers received, "
        f"{sum(one.stored for one in producers):,} stored, "
        f"{load.ledger.checked:,} observations read back, {len(load.ledger.keys)} keys"
    )
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"machine": describe_machine(), "samples": [asdict(one) for one in samples]}), "utf-8"
        )
    print("\n".join(problems) if problems else "no leaks, no losses")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
