"""Time until an erased fragment is in no file, vs SQLite rewriting the same journal.

    python benchmarks/bench_erase.py [--full | --tiny] [--rounds N] [--json FILE]

100,000 (--full: 1,000,000) fragments of others, copies of rows in the journal's file. One fragment of a memory of
three is erased while a neighbour writes, once after few writes and once after many, which leave a long log; vs the
neighbour's longest write while nothing is erased.

Then 10,000 (--full: 50,000) fragments in one long-term memory, indexed. Ten are erased while another memory observes
and the first one serves recalls. The other side is a bare VACUUM INTO of the same journal, made durable: an erasure
that rewrote the whole journal would cost at least that. The longest observe and recall meanwhile are shown as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from claims import Claim, at_most, make_claim, run_standalone
from holding import copy_memories
from recalls import wait_until_indexed
from report import Report, Size
from served import BenchServer
from texts import SentenceSource

import memstream
from memstream import MemoryKind

COUNT = {Size.TINY: 50, Size.SHORT: 10_000, Size.FULL: 50_000}
OTHERS = {Size.TINY: 400, Size.SHORT: 100_000, Size.FULL: 1_000_000}
"""Fragments of others, in memories of OTHERS_EACH."""
OTHERS_EACH, OTHERS_SEEDS = 100, 2
WRITES = {Size.TINY: 8, Size.SHORT: 128, Size.FULL: 128}
"""Batches of three to memories of others, WRITERS at a time, which leave a log of some 10 MB."""
WRITERS = 8
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 7}
ROUNDS_INDEXED = {Size.TINY: 1, Size.SHORT: 1, Size.FULL: 3}
BATCH = 500
ERASED = 10
ALONE_S = 0.3
"""How long the neighbour writes alone."""
ERASURE, VACUUM = "erase ten fragments", "bare VACUUM INTO of the journal"
ERASE_ONE, NEIGHBOUR = "erase one of three", "neighbour's longest write"
ALONE = f"{NEIGHBOUR}, nothing erased"
AFTER_FEW, AFTER_MANY = "after few writes", "after many"
OBSERVE, RECALL = "longest observe during the erasure", "longest recall during the erasure"
SECONDS = "time s"


async def fill_memory(memory: memstream.Memory, count: int) -> list[str]:
    """Returns all ids, once everything is in the index."""
    ids: list[str] = []
    for start in range(0, count, BATCH):
        places = range(start, min(start + BATCH, count))
        texts = [f"note {place}: the ferry number {place} leaves harbour" for place in places]
        ids += [outcome.fragment_id for outcome in (await memory.observe_batch(texts)).outcomes]
    await wait_until_indexed(memory)
    return ids


async def time_longest(call: Callable[[], Awaitable[object]], done: asyncio.Event) -> float:
    """The longest of consecutive calls until `done` is set, in seconds."""
    worst = 0.0
    while not done.is_set():
        begun = time.perf_counter()
        await call()
        worst = max(worst, time.perf_counter() - begun)
    return worst


def time_vacuum(journal: Path, target: Path) -> float:
    """Seconds of a VACUUM INTO until it is on disk."""
    began = time.perf_counter()
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as opened:
        opened.execute("VACUUM INTO ?", (str(target),))
    with target.open("rb") as file:
        os.fsync(file.fileno())
    target.unlink()
    return time.perf_counter() - began


async def fill_others(data: Path, count: int) -> list[str]:
    """Names of memories with so many fragments in all; the server is stopped."""
    talk = SentenceSource(1)
    with BenchServer(data, probed=False) as server:
        async with memstream.connect(server.address) as client:
            for seed in range(OTHERS_SEEDS):
                memory = await client.create_memory(f"others/seed-{seed}")
                await memory.observe_batch(talk.make_observations(OTHERS_EACH))
    copies = count // (OTHERS_EACH * OTHERS_SEEDS) - 1
    copy_memories(data / "journal.db", copies)
    return [f"others/seed-{seed}-{copy}" for seed in range(OTHERS_SEEDS) for copy in range(1, copies + 1)]


async def write_others(client: memstream.Client, names: list[str], count: int) -> None:
    """So many batches of three, to random memories."""
    talk, chosen = SentenceSource(2), iter(random.choices(names, k=count))

    async def work() -> None:
        for name in chosen:
            await client.memory(name).observe_batch(talk.make_observations(3))

    await asyncio.gather(*(work() for _ in range(WRITERS)))


async def measure_one(report: Report, client: memstream.Client, which: str, number: int) -> None:
    """Erase one of three fragments during a neighbour's writes."""
    neighbour = await client.create_memory("neighbours/one", exist_ok=True)
    mine = await client.create_memory(f"mine/{which.replace(' ', '-')}-{number}")
    result = await mine.observe_batch(["My sister lives in Oslo", "I like tea", "The cat is grey"])

    async def time_writes(work: Awaitable[object]) -> float:
        done = asyncio.Event()
        waits = asyncio.create_task(time_longest(lambda: neighbour.observe_batch(["a line"]), done))
        await work
        done.set()
        return await waits

    async def erase() -> None:
        begun = time.perf_counter()
        await client.finished(await mine.erase_fragments([result.outcomes[0].fragment_id]))
        report.add_round(f"{ERASE_ONE}, {which}", **{SECONDS: time.perf_counter() - begun})

    report.add_round(f"{NEIGHBOUR}, {which}", **{SECONDS: await time_writes(erase())})
    report.add_round(f"{ALONE}, {which}", **{SECONDS: await time_writes(asyncio.sleep(ALONE_S))})


async def measure_beside(report: Report, size: Size, rounds: int) -> None:
    """One of three fragments, beside many of others."""
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        names = await fill_others(data, OTHERS[size])
        with BenchServer(data, probed=False) as server:
            async with memstream.connect(server.address) as client:
                for number in range(rounds):
                    await measure_one(report, client, AFTER_FEW, number)
                    await write_others(client, names, WRITES[size])
                    await measure_one(report, client, AFTER_MANY, number)


async def measure_indexed(report: Report, count: int, rounds: int) -> None:
    """Ten fragments of a large indexed memory in each round."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with BenchServer(scratch / "data", index_flush_interval_s=2, index_from_fragments=0) as server:
            async with memstream.connect(server.address, timeout_s=600) as client:
                memory = await client.create_memory("bench/full", kind=MemoryKind.LONG_TERM)
                other = await client.create_memory("bench/other", kind=MemoryKind.LONG_TERM)
                ids = await fill_memory(memory, count)
                for number in range(rounds):
                    report.add_round(
                        VACUUM, **{SECONDS: time_vacuum(scratch / "data" / "journal.db", scratch / "anew.db")}
                    )
                    done = asyncio.Event()
                    waits = [
                        asyncio.create_task(time_longest(lambda: other.observe_batch(["a line"]), done)),
                        asyncio.create_task(time_longest(lambda: memory.recall_once("ferry number 17"), done)),
                    ]
                    begun = time.perf_counter()
                    chosen = ids[number * ERASED : (number + 1) * ERASED]
                    await client.finished(await memory.erase_fragments(chosen))
                    report.add_round(ERASURE, **{SECONDS: time.perf_counter() - begun})
                    done.set()
                    observed, recalled = await asyncio.gather(*waits)
                    report.add_round(OBSERVE, **{SECONDS: observed})
                    report.add_round(RECALL, **{SECONDS: recalled})


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((SECONDS,))
    report.more |= {"fragments": COUNT[size], "others": OTHERS[size]}
    asyncio.run(measure_beside(report, size, rounds or ROUNDS[size]))
    asyncio.run(measure_indexed(report, COUNT[size], rounds or ROUNDS_INDEXED[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about erasure."""
    suffix, others = f"{report.more['fragments']:,} remaining", f"{report.more['others']:,} of others"
    beside = []
    for which in (AFTER_FEW, AFTER_MANY):
        for row, aim_s in ((ERASE_ONE, 0.1), (NEIGHBOUR, 0.05)):
            name = f"{row}, {which}"
            beside.append(
                make_claim(report, f"{name}, {others}", name, SECONDS, f"{ALONE}, {which}", at_most(aim_s, "s"))
            )
    return beside + [make_claim(report, f"{row}, {suffix}", row, SECONDS, VACUUM) for row in (ERASURE, OBSERVE, RECALL)]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
