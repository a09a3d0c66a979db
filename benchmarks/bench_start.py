"""How long a server takes until it serves: over an empty directory, and over one with fragments in 100 memories.

    python benchmarks/bench_start.py [--full] [--rounds N] [--json FILE]

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

from bench_recall import MEMORIES, filled
from report import Report, options
from served import Served

import memstream
from memstream_server.adapters.milvus.lite import LiteProcess

SHORT, FULL = 10_000, 100_000
"""Fragments in all memories together."""
FLUSH_INTERVAL_S = 2.0
IMPORTS = "import grpc, numpy, pymilvus"
COMMANDS = {
    "bare interpreter": ("-c", "pass"),
    f'python -c "{IMPORTS}"': ("-c", IMPORTS),
    "memstream --help": ("-m", "memstream_server", "--help"),
}
EMPTY, LITE = "memstream serve, empty directory", "bare Milvus Lite"
COLUMNS = ("wall s", "CPU s")


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
    with Served(data_dir, index_flush_interval_s=FLUSH_INTERVAL_S) as server:
        report.add(row, wall_s=time.perf_counter() - began, CPU_s=server.cpu().server)


async def measure_lite(report: Report, scratch: Path) -> None:
    """Until it says that it serves; over a directory without collections."""
    with timed(report, LITE):
        child = await LiteProcess.start(
            scratch, ["none"], start_timeout_s=60.0, lock_timeout_s=10.0, stop_timeout_s=30.0
        )
        await child.kill()


async def fill(data_dir: Path, total: int) -> None:
    """A directory whose server has stopped, with all of its fragments in the index."""
    with Served(data_dir, index_flush_interval_s=FLUSH_INTERVAL_S) as server:
        async with memstream.connect(server.address) as client, filled(client, total):
            pass


def measure(report: Report, row: str, total: int, rounds: int) -> None:
    """Every round starts each of them once; the first, which warms the disk's cache and compiles, is not counted."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        asyncio.run(fill(scratch / "filled" / "data", total))
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


def main() -> None:
    """Measure and print."""
    given = options(__doc__).parse_args()
    total = FULL if given.full else SHORT
    row = f"memstream serve, {total:,} in {MEMORIES}"
    report = Report(COLUMNS)
    measure(report, row, total, given.rounds or 5)
    report.show()
    for name in (EMPTY, row):
        report.ratio(f"{name} / imports, CPU", name, f'python -c "{IMPORTS}"', "CPU s")
    report.write(given.json)


if __name__ == "__main__":
    main()
