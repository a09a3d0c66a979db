"""How long it takes until an erased fragment is in no file, by the number of fragments that stay.

    python benchmarks/bench_erase.py 10000 50000

For each number: a server of its own, so many fragments in one long-term memory, indexed; then ten are erased while
another memory observes and the first one is recalled from. Printed are the erasure's time, and the longest time that
an observation was not acknowledged and a recall not answered meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import memstream
from memstream import MemoryKind
from tests.support.server import ServerProcess
from tests.support.waiting import until

BATCH = 500
ERASED = 10


async def filled(memory: memstream.Memory, count: int) -> list[str]:
    """Ids of the first few, once all is in the index."""
    first: list[str] = []
    for start in range(0, count, BATCH):
        texts = [f"note {start + place}: the ferry number {start + place} leaves harbour" for place in range(BATCH)]
        result = await memory.observe_batch(texts)
        first = first or [outcome.fragment_id for outcome in result.outcomes[:ERASED]]

    async def indexed() -> bool:
        return (await memory.stats()).unindexed == 0

    await until(indexed, 600)
    return first


async def longest(call: Callable[[], Awaitable[object]], done: asyncio.Event) -> float:
    """The longest of calls made one after the other until then, in seconds."""
    worst = 0.0
    while not done.is_set():
        begun = time.perf_counter()
        await call()
        worst = max(worst, time.perf_counter() - begun)
    return worst


async def measured(server: ServerProcess, count: int) -> str:
    """One line of the table."""
    async with memstream.connect(server.address, timeout_s=600) as client:
        memory = await client.create_memory("bench/full", kind=MemoryKind.LONG_TERM)
        other = await client.create_memory("bench/other", kind=MemoryKind.LONG_TERM)
        ids = await filled(memory, count)
        done = asyncio.Event()
        waits = [
            asyncio.create_task(longest(lambda: other.observe_batch(["a line"]), done)),
            asyncio.create_task(longest(lambda: memory.recall_once("ferry number 17"), done)),
        ]
        size = sum(path.stat().st_size for path in server.data_dir.rglob("*") if path.is_file())
        begun = time.perf_counter()
        await client.finished(await memory.erase_fragments(ids))
        took = time.perf_counter() - begun
        done.set()
        observed, recalled = await asyncio.gather(*waits)
        return f"{count:>10,} {size / 2**20:>8.0f} MB {took:>8.1f} s {observed:>8.2f} s {recalled:>8.2f} s"


def main() -> None:
    """A line for each number given."""
    print("   kept fragments  data    erasure  longest observe, recall")
    for count in [int(word) for word in sys.argv[1:]] or [10_000]:
        with tempfile.TemporaryDirectory() as scratch, ServerProcess(Path(scratch) / "data") as server:
            print(asyncio.run(measured(server, count)), flush=True)


if __name__ == "__main__":
    main()
