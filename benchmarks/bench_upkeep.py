"""Upkeep beside many memories, vs the same beside few: time, RAM, and a neighbour's longest wait.

    python benchmarks/bench_upkeep.py [--full | --tiny] [--rounds N] [--json FILE]

1,000 (--full: 100,000) memories of twelve fragments, most of them copies of rows in the journal's file, and a server
with ten. Each round runs every step on both, while a
neighbour writes to a memory of its own. One object: erase one of two fragments, export or delete one small memory, the
console's first page. All that is stored: purge, reindex, backup, verify, start.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from claims import Claim, make_claim, run_standalone
from holding import copy_memories
from report import Report, Size
from served import BenchServer

import memstream

MEMORIES = {Size.TINY: 20, Size.SHORT: 1_000, Size.FULL: 100_000}
SEEDS = {Size.TINY: 20, Size.SHORT: 200, Size.FULL: 200}
"""Memories that are observed; the others are copies of them."""
FEW = 10
EACH = 12
FILLING = 32
ROUNDS = {Size.TINY: 1, Size.SHORT: 2, Size.FULL: 2}
SECONDS, WAIT, RESIDENT = "time s", "neighbour's longest wait s", "RSS MB"
START = "start"
ONE = ("first page", "erase", "export", "delete")
ALL = ("purge", "reindex", "backup", "verify", START)
"""Steps over everything that is stored: their time grows with it, a neighbour's wait should not."""


async def fill_server(client: memstream.Client, count: int) -> None:
    """Create `count` memories of twelve fragments."""
    room = asyncio.Semaphore(FILLING)

    async def fill_one(number: int) -> None:
        async with room:
            memory = await client.create_memory(f"upkeep/m{number}")
            await memory.observe_batch(
                [f"note {place} of {number}: the ferry leaves at {place}" for place in range(EACH)]
            )

    await asyncio.gather(*(fill_one(number) for number in range(count)))


async def make_small(client: memstream.Client, name: str) -> tuple[memstream.Memory, str]:
    """A memory of two fragments, and the id of the first."""
    memory = await client.create_memory(f"upkeep/{name}")
    result = await memory.observe_batch(["My sister lives in Oslo", "I like tea"])
    return memory, result.outcomes[0].fragment_id


async def run_command(*words: str) -> None:
    """Run a memstream command. Raises RuntimeError with its last lines if it fails."""
    command = [sys.executable, "-m", "memstream_server", *words]
    ended = await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"memstream {words[0]} failed:\n{(ended.stdout + ended.stderr)[-2_000:]}")


class Steps:
    """The steps on one server, in the order of their run."""

    def __init__(self, client: memstream.Client, server: BenchServer, scratch: Path, number: int) -> None:
        self._client, self._data, self._scratch, self._number = client, str(server.data_dir), scratch, number

    async def list_steps(self) -> dict[str, Callable[[], Awaitable[object]]]:
        """By name; what a step needs exists already."""
        memory, erased = await make_small(self._client, f"erased-{self._number}")
        small, _ = await make_small(self._client, f"deleted-{self._number}")
        copy = self._scratch / f"backup-{self._number}"

        async def finish(starting: Awaitable[memstream.Operation]) -> None:
            await self._client.finished(await starting)

        return {
            "first page": self._read_first_page,
            "erase": lambda: finish(memory.erase_fragments([erased])),
            "export": lambda: self._export(memory),
            "delete": small.delete,
            "purge": lambda: finish(self._client.start_purge()),
            "reindex": lambda: finish(self._client.start_reindex()),
            "backup": lambda: run_command("backup", "--data", self._data, str(copy)),
            "verify": lambda: run_command("verify", str(copy)),
        }

    async def _read_first_page(self) -> None:
        await anext(self._client.list_namespaces(page_size=50))
        await anext(self._client.list_memories("upkeep", page_size=50))

    async def _export(self, memory: memstream.Memory) -> None:
        async for _ in self._client.export(str(memory.namespace), memory.name):
            pass


async def time_step(
    client: memstream.Client, number: int, step: Callable[[], Awaitable[object]]
) -> tuple[float, float]:
    """Seconds of a step, and of the longest write of a neighbour meanwhile."""
    neighbour = await client.create_memory(f"neighbours/n{number}", exist_ok=True)
    await neighbour.observe_batch(["a line"])
    waits, ended = [0.0], asyncio.Event()

    async def write() -> None:
        while not ended.is_set():
            begun = time.perf_counter()
            await neighbour.observe_batch(["a line"])
            waits.append(time.perf_counter() - begun)
            await asyncio.sleep(0.01)

    writing = asyncio.create_task(write())
    begun = time.perf_counter()
    await step()
    took = time.perf_counter() - begun
    ended.set()
    await writing
    return took, max(waits)


def row_of(step: str, count: int) -> str:
    return f"{step}, {count:,} memories"


async def measure_rounds(report: Report, count: int, seeds: int, rounds: int) -> None:
    """Fill both servers, then run all rounds, alternately on both."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        for held in (FEW, count):
            with BenchServer(scratch / str(held)) as server:
                async with memstream.connect(server.address, timeout_s=600) as client:
                    await fill_server(client, min(held, seeds))
            copy_memories(scratch / str(held) / "journal.db", max(0, held // seeds - 1))
        for number in range(rounds):
            for held in (FEW, count):
                begun = time.perf_counter()
                with BenchServer(scratch / str(held)) as server:
                    report.add_round(row_of(START, held), **{SECONDS: time.perf_counter() - begun})
                    async with memstream.connect(server.address, timeout_s=600) as client:
                        steps = Steps(client, server, scratch / str(held), number)
                        for name, step in (await steps.list_steps()).items():
                            took, wait = await time_step(client, number, step)
                            figures = {SECONDS: took, WAIT: wait, RESIDENT: server.resident_mb()[0]}
                            report.add_round(row_of(name, held), **figures)


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((SECONDS, WAIT, RESIDENT))
    report.more["memories"] = MEMORIES[size]
    asyncio.run(measure_rounds(report, MEMORIES[size], SEEDS[size], rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about upkeep."""
    count, steps = report.more["memories"], (*ONE, *ALL)
    times = [make_claim(report, row_of(each, count), row_of(each, count), SECONDS, row_of(each, FEW)) for each in steps]
    waits = [
        make_claim(report, f"neighbour's longest wait: {each}", row_of(each, count), WAIT, row_of(each, FEW))
        for each in steps
        if each != START
    ]
    return times + waits


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
