"""How long a server takes until it serves: over an empty directory, and over one with fragments in 100 memories.

    python benchmarks/bench_start.py [--full | --tiny] [--rounds N] [--json FILE]

The directory is filled once (10,000 fragments; --full: 100,000), with the vector index written and the server stopped
in order; then it is started again and again. Beside the starts, in turns with them: the bare interpreter, an
interpreter that imports grpc, numpy and pymilvus, a bare Milvus Lite until it is ready, and `memstream --help`.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from claims import Claim, at_most, claim, standalone
from recalls import fill
from report import Report, Size
from served import Served

import memstream
from memstream_server.adapters.milvus.lite import LiteProcess

TOTAL = {Size.TINY: 20, Size.SHORT: 10_000, Size.FULL: 100_000}
"""Fragments in all memories together."""
MEMORIES = {Size.TINY: 2, Size.SHORT: 100, Size.FULL: 100}
ROUNDS = {Size.TINY: 1, Size.SHORT: 5, Size.FULL: 5}
FLUSH_INTERVAL_S = 2.0
IMPORTS = "import grpc, numpy, pymilvus"
IMPORTED = f'python -c "{IMPORTS}"'
COMMANDS = {
    "bare interpreter": ("-c", "pass"),
    IMPORTED: ("-c", IMPORTS),
    "memstream --help": ("-m", "memstream_server", "--help"),
}
EMPTY, LITE = "memstream serve, empty directory", "bare Milvus Lite"
WALL, CPU_S = "wall s", "CPU s"
COLUMNS = (WALL, CPU_S)


@contextmanager
def timed(report: Report, row: str) -> Iterator[None]:
    """Wall time of the block, and CPU of the processes that were begun and ended in it."""
    before, began = _used_s(), time.perf_counter()
    yield
    report.add(row, wall_s=time.perf_counter() - began, CPU_s=_used_s() - before)


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_serve(report: Report, row: str, data_dir: Path) -> None:
    """Until the port is known; CPU of the server alone, whose Milvus Lite starts behind it."""
    began = time.perf_counter()
    with Served(data_dir, probed=False, index_flush_interval_s=FLUSH_INTERVAL_S) as server:
        report.add(row, wall_s=time.perf_counter() - began, CPU_s=server.cpu().server)


async def measure_lite(report: Report, scratch: Path) -> None:
    """Until it says that it serves; over a directory without collections."""
    with timed(report, LITE):
        child = await LiteProcess.start(
            scratch, ["none"], start_timeout_s=60.0, lock_timeout_s=10.0, stop_timeout_s=30.0
        )
        await child.kill()


async def filled(data_dir: Path, size: Size) -> None:
    """A directory whose server has stopped, with all of its fragments in the index."""
    with Served(data_dir, index_flush_interval_s=FLUSH_INTERVAL_S) as server:
        async with memstream.connect(server.address) as client:
            await fill(client, "start/agent", [TOTAL[size] // MEMORIES[size]] * MEMORIES[size])


def measure(report: Report, row: str, size: Size, rounds: int) -> None:
    """Every round starts each of them once; the first, which warms the disk's cache and compiles, is not counted."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        asyncio.run(filled(scratch / "filled" / "data", size))
        for number in range(rounds + 1):
            into = report if number else Report(COLUMNS)
            for name, command in COMMANDS.items():
                with timed(into, name):
                    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
            lite = scratch / f"lite-{number}"
            lite.mkdir()
            asyncio.run(measure_lite(into, lite))
            measure_serve(into, EMPTY, scratch / f"empty-{number}" / "data")
            measure_serve(into, row, scratch / "filled" / "data")


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report(COLUMNS)
    report.more["row"] = row = f"memstream serve, {TOTAL[size]:,} in {MEMORIES[size]}"
    measure(report, row, size, rounds or ROUNDS[size])
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of starting."""
    row = report.more["row"]
    return [
        claim(report, f"from start to serving, {row}", row, WALL, IMPORTED, at_most(2, "s")),
        claim(report, "from start to serving, empty directory", EMPTY, WALL, IMPORTED),
        claim(report, f"CPU until it serves, {row}", row, CPU_S, IMPORTED),
        claim(report, "the same beside an empty directory", row, WALL, EMPTY),
    ]


if __name__ == "__main__":
    standalone(__doc__, run, claims)
