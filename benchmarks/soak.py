"""Twenty minutes of everything at once against a real server: does it stay flat, and does it let go of everything?

    python benchmarks/soak.py [--minutes 20] [--seed N] [--json FILE]

Samples the server every ten seconds, then stops the load, checks that nothing acknowledged is lost, deletes all
memories and waits until tasks, streams and open files are back at what an idle server has. Exits with 1 when something
leaks or is lost. `--minutes 1` tries it out: too short to judge the slope, which is then only shown.
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

from report import machine
from served import Served
from soak_load import PATIENT, Load

import memstream

SAMPLE_S = 10.0
SETTLE_MAX_S = 120.0
JUDGED_MIN = 10.0
"""Minutes below which a slope says nothing: the server is still warming up."""
GROWTH_MAX = 0.04
"""Share of its resident memory by which the server may seem to grow over the second half, half of it over the last
quarter: what noise can do."""
STANDARD_ERRORS = 3.0
_METRIC = re.compile(r"^memstream_(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_GAUGES = ("tasks", "streams", "sessions", "producers", "watchers", "active_memories", "backlog", "outbox_depth")
MUST_RETURN = ("fds", "threads", "tasks", "streams", "sessions", "producers", "watchers", "active_memories", "backlog")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the server; memory and files in MB."""

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


class Watcher:
    """Looks at a server from outside."""

    def __init__(self, server: Served, metrics: str) -> None:
        self._server = server
        self._metrics = metrics
        self._began = time.monotonic()
        self.samples: list[Sample] = []

    async def sample(self) -> Sample:
        """What it is now."""
        return await asyncio.to_thread(self._sample)

    async def run(self) -> None:
        """Keeps a sample every ten seconds until cancelled."""
        while True:
            self.samples.append(await self.sample())
            await asyncio.sleep(SAMPLE_S)

    def open_files(self) -> Counter[str]:
        """What the server's file descriptors are, without the numbers in the names."""
        found: Counter[str] = Counter()
        for link in Path(f"/proc/{self._server.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                found[re.sub(r"\d+", "#", os.readlink(link))] += 1
        return found

    def _sample(self) -> Sample:
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=30) as answer:
            gauges = _gauges(answer.read().decode("utf-8"))
        server_mb, lite_mb = self._server.resident_mb()
        process = Path(f"/proc/{self._server.pid}")
        sizes = {file: _size(file) for file in self._server.data_dir.rglob("*")}
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


def _gauges(text: str) -> dict[str, float]:
    """By name, summed over labels."""
    found: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # it went meanwhile
        return 0


@dataclass(frozen=True, slots=True)
class Slope:
    """A straight line through some samples."""

    mb_per_hour: float
    error: float
    """Standard error of it, as if samples were independent."""
    noise_mb: float
    """Standard deviation around the line."""
    growth: float
    """What the line gains from its first sample to its last, as a share of the mean."""

    def rises(self, growth_max: float) -> bool:
        """Whether it is steeper than noise explains."""
        return self.growth > growth_max and self.mb_per_hour > STANDARD_ERRORS * self.error


def slope(samples: Sequence[Sample], column: str) -> Slope:
    """Of one column in MB."""
    times, values = [one.minute / 60 for one in samples], [getattr(one, column) for one in samples]
    if len(samples) < 3:
        return Slope(0.0, 0.0, 0.0, 0.0)
    fit = statistics.linear_regression(times, values)
    rest = [value - fit.intercept - fit.slope * at for at, value in zip(times, values, strict=True)]
    noise = (sum(one * one for one in rest) / (len(rest) - 2)) ** 0.5
    spread = (sum((at - statistics.fmean(times)) ** 2 for at in times)) ** 0.5
    mean = statistics.fmean(values)
    return Slope(fit.slope, noise / spread, noise, fit.slope * (times[-1] - times[0]) / mean if mean else 0.0)


async def warm(address: str, load: Load) -> None:
    """Fills the pools of threads and connections, which stay: what is idle is measured after it."""
    async with memstream.connect(address, retry=PATIENT) as client:
        memory = await client.create_memory("soak/warm")
        await memory.observe_batch(["a first word"], ack_level=memstream.AckLevel.INDEXED)
        for _ in range(5):
            await asyncio.gather(*(memory.recall_once("word") for _ in range(20)), *(memory.stats() for _ in range(40)))
        await load.remove(client)


async def settled(watcher: Watcher, idle: Sample) -> Sample:
    """The server once nothing is above `idle`, or after a while all the same."""
    until = time.monotonic() + SETTLE_MAX_S
    while True:
        now = await watcher.sample()
        if not leaks(now, idle) or time.monotonic() > until:
            return now
        await asyncio.sleep(2.0)


def leaks(now: Sample, idle: Sample) -> list[str]:
    """What did not return to what it was."""
    before, after = asdict(idle), asdict(now)
    return [
        f"{name}: {before[name]} idle before, {after[name]} after" for name in MUST_RETURN if after[name] > before[name]
    ]


async def soak(server: Served, metrics: str, minutes: float, seed: int) -> tuple[list[Sample], list[str], Load]:
    """(samples, what is wrong, the load)."""
    load, watcher = Load(server.address, seed), Watcher(server, metrics)
    await warm(server.address, load)
    await asyncio.sleep(5.0)
    idle, files = await watcher.sample(), watcher.open_files()
    async with memstream.connect(server.address, retry=PATIENT) as client:
        await load.prepare(client)
        watching, running = asyncio.create_task(watcher.run()), asyncio.create_task(load.run())
        await asyncio.wait({watching, running}, timeout=minutes * 60, return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, running):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        wrong = await load.check(client)
        await load.remove(client)
    after = await settled(watcher, idle)
    wrong += [f"leaked {leak}" for leak in leaks(after, idle)]
    if after.fds > idle.fds:
        wrong.append(f"opened since: {dict(watcher.open_files() - files)}")
    return [idle, *watcher.samples, after], wrong, load


def show(samples: Sequence[Sample]) -> None:
    """About twenty lines; the first is before the load, the last after it."""
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    names = list(asdict(samples[0]))
    print("  ".join(f"{name:>{_width(name)}}" for name in names))
    inner = samples[1:-1]
    step = max(1, len(inner) // 20)
    for one in (samples[0], *inner[::step], samples[-1]):
        print("  ".join(f"{_shown(value):>{_width(name)}}" for name, value in asdict(one).items()))


def _width(name: str) -> int:
    return max(len(name), 6)


def _shown(value: float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def judge(samples: Sequence[Sample], minutes: float) -> list[str]:
    """Prints the slopes; what rises over the second half and still does over the last quarter."""
    wrong: list[str] = []
    inner = samples[1:-1]
    for column in ("server_mb", "lite_mb", "wal_mb", "data_mb"):
        half, quarter = (slope(inner[len(inner) * part // 4 :], column) for part in (2, 3))
        print(f"{column}: second half {_described(half)}; last quarter {_described(quarter)}")
        judged = column in ("server_mb", "lite_mb") and minutes >= JUDGED_MIN
        if judged and half.rises(GROWTH_MAX) and quarter.rises(GROWTH_MAX / 2):
            wrong.append(f"{column} grows: {quarter.mb_per_hour:+.1f} MB/h in the last quarter")
    if minutes < JUDGED_MIN:
        print(f"(too short to judge: below {JUDGED_MIN:.0f} minutes a slope is the warm-up's)")
    return wrong


def _described(line: Slope) -> str:
    error = f"standard error {line.error:.1f}, noise {line.noise_mb:.1f} MB"
    return f"{line.mb_per_hour:+.1f} MB/h ({error}, {line.growth:+.1%})"


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counted.items())) or "none"


def main() -> None:
    """Run, print, and exit with 1 when something leaks or is lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="of load")
    parser.add_argument("--seed", type=int, default=1, help="of what the clients do")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample here")
    given = parser.parse_args()
    with socket.socket() as probe:  # the server does not tell the port of its metrics
        probe.bind(("127.0.0.1", 0))
        metrics = f"127.0.0.1:{probe.getsockname()[1]}"
    with (
        tempfile.TemporaryDirectory() as directory,
        Served(Path(directory) / "data", probed=False, metrics_listen=metrics) as server,
    ):
        samples, wrong, load = asyncio.run(soak(server, metrics, given.minutes, given.seed))
        log = server.log()
    show(samples)
    wrong += judge(samples, given.minutes)
    if "Traceback" in log:
        wrong.append(f"the server's log has a traceback:\n{log[log.index('Traceback') - 500 :][:4_000]}")
    print(f"done: {_counts(load.ledger.done)}\nrefused: {_counts(load.ledger.refused)}")
    told = load.ledger.producers.values()
    print(
        f"ledger: {sum(one.received for one in told):,} numbers received, {sum(one.stored for one in told):,} stored, "
        f"{load.ledger.checked:,} observations read back, {len(load.ledger.keys)} keys"
    )
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": machine(), "samples": [asdict(one) for one in samples]}), "utf-8")
    print("\n".join(wrong) if wrong else "nothing leaks and nothing is lost")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
