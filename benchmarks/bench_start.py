"""Time from start to serving, over an empty directory and over one with fragments in 100 memories.

    python benchmarks/bench_start.py [--full | --tiny] [--rounds N] [--json FILE]

The directory is filled once (10,000 fragments; --full: 100,000), with a complete index and an orderly stop; then it is
started repeatedly. Rounds alternate with a bare interpreter, an interpreter that imports grpc, numpy and pymilvus, a
bare Milvus Lite until it is ready, `memstream --help`, and memstream.local.
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

from claims import Claim, at_most, make_claim, run_standalone
from recalls import fill_memories
from report import Report, Size
from served import BenchServer

import memstream
from memstream.local_client import local_server
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
LOCAL = "memstream.local, empty directory"
WALL, CPU_S = "wall s", "CPU s"
COLUMNS = (WALL, CPU_S)


@contextmanager
def time_block(report: Report, row: str) -> Iterator[None]:
    """Record wall time of the block, and CPU of the processes that started and ended in it."""
    before, began = _children_cpu_s(), time.perf_counter()
    yield
    report.add_round(row, wall_s=time.perf_counter() - began, CPU_s=_children_cpu_s() - before)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_serve(report: Report, row: str, data_dir: Path) -> None:
    """Time until the port is known. CPU is the server's alone; its Milvus Lite starts in the background."""
    began = time.perf_counter()
    with BenchServer(data_dir, probed=False, index_flush_interval_s=FLUSH_INTERVAL_S) as server:
        report.add_round(row, wall_s=time.perf_counter() - began, CPU_s=server.cpu_used().server)


async def measure_lite(report: Report, scratch: Path) -> None:
    """Time until Milvus Lite reports that it serves, over a directory without collections."""
    with time_block(report, LITE):
        child = await LiteProcess.start(
            scratch, ["none"], start_timeout_s=60.0, lock_timeout_s=10.0, stop_timeout_s=30.0
        )
        await child.kill()


def measure_local(report: Report, scratch: Path) -> None:
    """Time until memstream.local has started the server of an empty directory, in a process that has imported it."""
    server = local_server(scratch, 60.0, {})
    began = time.perf_counter()
    server.open()
    report.add_round(LOCAL, wall_s=time.perf_counter() - began)
    server.close()


async def fill_directory(data_dir: Path, size: Size) -> None:
    """Fill a data directory, index all fragments and stop the server."""
    with BenchServer(data_dir, index_flush_interval_s=FLUSH_INTERVAL_S) as server:
        async with memstream.connect(server.address) as client:
            await fill_memories(client, "start/agent", [TOTAL[size] // MEMORIES[size]] * MEMORIES[size])


def measure_rounds(report: Report, row: str, size: Size, rounds: int) -> None:
    """Start each program once per round. The first round, which fills the disk cache and compiles, does not count."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        asyncio.run(fill_directory(scratch / "filled" / "data", size))
        for number in range(rounds + 1):
            into = report if number else Report(COLUMNS)
            for name, command in COMMANDS.items():
                with time_block(into, name):
                    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
            lite = scratch / f"lite-{number}"
            lite.mkdir()
            asyncio.run(measure_lite(into, lite))
            measure_serve(into, EMPTY, scratch / f"empty-{number}" / "data")
            measure_local(into, scratch / f"local-{number}")
            measure_serve(into, row, scratch / "filled" / "data")


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report(COLUMNS)
    report.more["row"] = row = f"memstream serve, {TOTAL[size]:,} in {MEMORIES[size]}"
    measure_rounds(report, row, size, rounds or ROUNDS[size])
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about starting."""
    row = report.more["row"]
    return [
        make_claim(report, f"start to serving, {row}", row, WALL, IMPORTED, at_most(2, "s")),
        make_claim(report, "start to serving, empty directory", EMPTY, WALL, IMPORTED),
        make_claim(report, f"CPU until serving, {row}", row, CPU_S, IMPORTED),
        make_claim(report, "memstream.local, empty directory", LOCAL, WALL, EMPTY, at_most(1, "s")),
        make_claim(report, "start to serving vs an empty directory", row, WALL, EMPTY),
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
