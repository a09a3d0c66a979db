"""The calls of a small memory on a server that holds many such memories, vs the same on one that holds few.

Both servers run at the same time and serve the same calls in turn. The many are copies of rows in the journal's file,
made while the server is stopped: to observe them would take a quarter of an hour for 100,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from claims import Claim, at_most, make_claim
from recalls import P50
from report import Report, Size, percentile
from served import BenchServer
from texts import SentenceSource

import memstream

HELD = {Size.TINY: (40,), Size.SHORT: (1_000, 10_000), Size.FULL: (1_000, 10_000, 100_000)}
"""Memories of EACH fragments."""
SEEDS = {Size.TINY: 20, Size.SHORT: 200, Size.FULL: 200}
"""Memories that are observed. The server with few holds only these, the other one also copies of them."""
CALLS = {Size.TINY: 2, Size.SHORT: 24, Size.FULL: 60}
FLOOD = {Size.TINY: 20, Size.SHORT: 1_000, Size.FULL: 2_000}
EACH = 12
ACTIVE = {Size.TINY: 4, Size.SHORT: 50, Size.FULL: 50}
"""Memories kept in RAM, fewer than are called between two calls of the same one."""
WARM = 2
SERVER = "server µs"
AT_MOST = at_most(1.1)
"""How much more a call may cost beside many memories than beside few."""
_SETTLE_S = 0.3
_KEYED = ("vectors", "versions", "observations", "events", "recall_receipts", "fragments")
_NUMBERED = ("producers", "receipts", "anchors", "jobs", "conflicts", "event_fragments")
_GENERAL = ("operations", "outbox")
"""Tables whose rows name a memory and do not belong to it."""


def copy_memories(journal: Path, copies: int) -> None:
    """Copy all memories of a stopped server so many times, with the same fragments in each.

    Raises ValueError if another table has rows of a memory: the copies would lack them.
    """
    with contextlib.closing(sqlite3.connect(journal)) as opened, opened:
        opened.execute("PRAGMA synchronous = OFF")
        (most,) = opened.execute("SELECT max(number) FROM memories").fetchone()
        names = {
            table: [row[1] for row in opened.execute(f"PRAGMA table_info({table})")]
            for table in ("memories", *_KEYED, *_NUMBERED)
        }
        tables = opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (table,) in tables:
            held = {row[1] for row in opened.execute(f"PRAGMA table_info({table})")}
            has_rows = opened.execute(f"SELECT EXISTS (SELECT 1 FROM {table})").fetchone()[0]
            if table not in names and held & {"key", "memory"} and has_rows and table not in _GENERAL:
                raise ValueError(f"{table} has rows of memories and is not copied")
        for copy in range(1, copies + 1):
            shift = copy * most
            changed = {
                "number": f"number + {shift}",
                "memory": f"memory + {shift}",
                "key": f"key + {shift << 32}",
                "uid": f"uid || '{copy}'",
                "name": f"name || '-{copy}'",
            }
            for table, columns in names.items():
                kept = {"name": "name"} if table == "producers" else {}
                values = [{**changed, **kept}.get(column, column) for column in columns]
                where = f"number <= {most}" if table == "memories" else f"memory <= {most}"
                where = f"key < {most + 1 << 32}" if table in _KEYED else where
                opened.execute(f"INSERT INTO {table} SELECT {', '.join(values)} FROM {table} WHERE {where}")


class Side:
    """One of the two servers, its client, and which memories its calls go to."""

    def __init__(self, server: BenchServer, names: list[str], calls: int) -> None:
        self.server, self.calls = server, calls
        self.client: memstream.Client
        self._cold = itertools.cycle(names)
        self._fresh = itertools.count()
        self.talk = SentenceSource(3)

    def next_cold(self) -> memstream.Memory:
        """A memory that is not in RAM."""
        return self.client.memory(f"many/{next(self._cold)}")

    def next_warm(self, number: int) -> memstream.Memory:
        """A memory that is called all the time."""
        return self.client.memory(f"many/warm-{number % WARM}")

    async def create(self) -> memstream.Memory:
        """A new memory."""
        return await self.client.create_memory(f"many/new-{next(self._fresh)}")


Call = Callable[[Side, int], Awaitable[object]]


async def _create(side: Side, _: int) -> None:
    await side.create()


async def _observe_first(side: Side, _: int) -> None:
    await (await side.create()).observe_batch(side.talk.make_observations(3))


def _observe(count: int, cold: bool) -> Call:
    async def call(side: Side, number: int) -> None:
        memory = side.next_cold() if cold else side.next_warm(number)
        await memory.observe_batch(side.talk.make_observations(count))

    return call


def _recall(cold: bool) -> Call:
    async def call(side: Side, number: int) -> None:
        memory = side.next_cold() if cold else side.next_warm(number)
        await memory.recall_once(side.talk.make_sentence())

    return call


async def _list(side: Side, _: int) -> None:
    listed = side.client.list_memories("many", name_prefix="seed-1", page_size=10)
    async for _one in take_first(listed, 10):
        pass


async def take_first(items: AsyncIterator[object], count: int) -> AsyncIterator[object]:
    """The first `count` items."""
    async for item in items:
        yield item
        if not (count := count - 1):
            return


ROWS: dict[str, Call] = {
    "create": _create,
    "create and first batch of three": _observe_first,
    "batch of three, in RAM": _observe(3, False),
    "batch of three, not in RAM": _observe(3, True),
    "lone observation, in RAM": _observe(1, False),
    "lone observation, not in RAM": _observe(1, True),
    "recall, in RAM": _recall(False),
    "recall, not in RAM": _recall(True),
    "list ten memories": _list,
}
FLOODS = {"flood, in RAM": False, "flood, not in RAM": True}
START = "start"


async def measure_calls(report: Report, call: str, held: int, sides: dict[str, Side]) -> None:
    """Add a row for each side: one call after the other, in turn, so that a busy machine slows down both."""
    for side in sides.values():
        for number in range(WARM):
            await side.next_warm(number).recall_once("warm")
    before = {name: side.server.cpu_used().server for name, side in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(min(side.calls for side in sides.values())):
        for name, side in list(sides.items())[:: -1 if number % 2 else 1]:
            began = time.perf_counter()
            await ROWS[call](side, number)
            seconds[name].append(time.perf_counter() - began)
    await asyncio.sleep(_SETTLE_S)  # work after the answers counts, too
    for name, side in sides.items():
        used = (side.server.cpu_used().server - before[name]) / len(seconds[name])
        report.add_round(name_row(call, name, held), **{P50: percentile(seconds[name], 0.5) * 1e3, SERVER: used * 1e6})


async def measure_flood(report: Report, row: str, side: Side, cold: bool, count: int) -> None:
    """Add a row for `count` observations on one stream, per observation."""
    memory = side.next_cold() if cold else side.next_warm(0)
    if not cold:
        await memory.recall_once("warm")
    flood = side.talk.make_observations(count)
    before, began = side.server.cpu_used().server, time.perf_counter()
    async with memory.observe(f"flood-{began}") as stream:
        for one in flood:
            await stream.send(one)
    took = time.perf_counter() - began
    await asyncio.sleep(_SETTLE_S)
    used = side.server.cpu_used().server - before
    report.add_round(row, **{P50: took / count * 1e3, SERVER: used / count * 1e6})


async def measure_start(report: Report, row: str, side: Side) -> None:
    """Add a row for a start of the server, until it answers a call."""
    await side.client.close()
    side.server.stop()
    began = time.perf_counter()
    side.server.start()
    side.client = memstream.connect(side.server.address)
    await side.client.server_info()
    took = time.perf_counter() - began
    await asyncio.sleep(_SETTLE_S)
    report.add_round(row, **{P50: took * 1e3, SERVER: side.server.cpu_used().server * 1e6})


@asynccontextmanager
async def open_sides(scratch: Path, held: int, size: Size) -> AsyncIterator[dict[str, Side]]:
    """The server with many memories and the one with few, by the name of each in rows."""
    seeds = SEEDS[size]
    async with contextlib.AsyncExitStack() as stack:
        sides = {}
        for name, copies in (("many", held // seeds - 1), ("few", 0)):
            data = scratch / f"{name}-{held}"
            with BenchServer(data) as server:
                async with memstream.connect(server.address) as client:
                    await _observe_seeds(client, seeds)
            copy_memories(data / "journal.db", copies)
            server = BenchServer(data, active_memories_max=ACTIVE[size])
            stack.callback(server.stop)
            names = [
                f"seed-{seed}" + (f"-{copy}" if copy else "") for seed in range(seeds) for copy in range(copies + 1)
            ]
            random.Random(5).shuffle(names)
            side = sides[name] = Side(server.start(), names, CALLS[size])
            side.client = memstream.connect(server.address)
        yield sides
        for side in sides.values():
            await side.client.close()


async def _observe_seeds(client: memstream.Client, seeds: int) -> None:
    talk, room = SentenceSource(), asyncio.Semaphore(16)

    async def one(name: str) -> None:
        async with room:
            memory = await client.create_memory(f"many/{name}")
            await memory.observe_batch(talk.make_observations(EACH))

    names = [f"seed-{seed}" for seed in range(seeds)] + [f"warm-{number}" for number in range(WARM)]
    await asyncio.gather(*(one(name) for name in names))


def name_row(call: str, side: str, held: int) -> str:
    """The row of a call on one side."""
    return f"{call}, {held:,} memories" if side == "many" else f"{call}, few memories beside {held:,}"


async def measure_holding(report: Report, size: Size, rounds: int) -> None:
    """Run all rounds for every number of memories."""
    for held in HELD[size]:
        with tempfile.TemporaryDirectory() as scratch:
            async with open_sides(Path(scratch), held, size) as sides:
                for number in range(rounds):
                    order = list(sides.items())[:: -1 if number % 2 else 1]
                    for call in ROWS:
                        await measure_calls(report, call, held, sides)
                    for call, cold in FLOODS.items():
                        for name, side in order:
                            await measure_flood(report, name_row(call, name, held), side, cold, FLOOD[size])
                    for name, side in order:
                        await measure_start(report, name_row(START, name, held), side)


def make_holding_claims(report: Report, size: Size) -> list[Claim]:
    """Each call beside many memories and beside few: the server's CPU, and p50."""
    return [
        make_claim(
            report,
            f"{unit} of {call}, {held:,} memories of {EACH}",
            name_row(call, "many", held),
            column,
            name_row(call, "few", held),
            AT_MOST,
        )
        for held in HELD[size]
        for call in (*ROWS, *FLOODS, START)
        for unit, column in (("server CPU", SERVER), ("p50", P50))
    ]
