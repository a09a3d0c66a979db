"""Latency of one caller's small calls beside every rpc of another caller at its largest arguments.

    python benchmarks/bench_fair.py [--full | --tiny] [--rpcs NAMES] [--real-time [--write]] [--json FILE]

Tenant B recalls from a memory of a few fragments and stores one observation, one call after the other. It does so
alone, beside one call of tenant A, and beside as many of A's calls as its limits allow in flight, for each rpc of the
contract over gRPC and, where HTTP has it, as JSON over HTTP. `heavy_calls.py` has the arguments; an rpc without a line
there fails the benchmark. A is a process of its own with a lower priority, so that the cores that both share do not
count.

A cell of the table is the ratio of B's p99 during A's calls and its p99 alone, measured before each rpc and taken over
all of them; behind it, in brackets, the same ratio of the CPU time that the server spends while a call of B is under
way: other processes of the machine do not count in it, nor does the disk.

The bar: at most three times; with a single call it may be longer by a slice. A cell over it is measured twice more, and
the median of the three counts. Exits with 1 if a cell is over the bar and over what `fair_records.json` has for it.

Small calls are measured until one of A's calls has ended, and the last column has how many ended, answered and refused.
A cell during which none ended is measured without the load that it names: it has no ratio, and the benchmark exits with
1. Streams that are quiet by nature (`Watch`, `WatchMessages`) count as load while they are open.

With `--real-time`, which needs root, server and B have real-time priority, so that nothing else on the machine counts:
so were the records measured, which `--write` writes. Without it B's p99 alone is measured while A's process uses its
core without calling: what the cores that all processes share cost B is then on both sides of a ratio.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_http import free_address
from bench_overload import TENANTS, make_access
from google.protobuf.descriptor import MethodDescriptor
from heavy_calls import (
    METHODS,
    QUIET,
    Caller,
    Ends,
    World,
    find_missing,
    flood_http,
    from_record,
    prepare_world,
    to_record,
)
from report import Size, describe_machine, format_machine, make_parser, percentile
from served import BenchServer, cpu_s

from memstream.v1 import memory_service_pb2 as memories
from memstream.v1 import stream_service_pb2 as streams

FRAGMENTS = {Size.TINY: 30, Size.SHORT: 5_000, Size.FULL: 10_000}
"""Of A's memory."""
TRIALS = {Size.TINY: 2, Size.SHORT: 40, Size.FULL: 60}
"""Small calls of each kind for a cell; a third of them alone before each rpc."""
CALLS = {Size.TINY: 2, Size.SHORT: 64, Size.FULL: 256}
"""Calls of A in flight; 256 are `caller_calls_max` and `connection_streams_max`."""
STREAMS = {Size.TINY: 2, Size.SHORT: 16, Size.FULL: 192}
"""Streams of A; 192 are `caller_streams_max`."""
AGAIN = {Size.TINY: 0, Size.SHORT: 2, Size.FULL: 2}
"""How often a cell over the bar is measured again."""
CELL_MAX_S = 12.0
"""A cell ends after this time with fewer calls, if one of A's calls has ended."""
LOAD_MAX_S = 60.0
"""A cell ends after this time in any case. 64 large calls in turns end together, and late."""
PAUSE_S = 0.002
IDLE_CORES, IDLE_LOOK_S, IDLE_MAX_S = 0.1, 0.2, 15.0
"""After A's calls the server is left alone until it uses less than so many cores, at most this long."""
DATA_MAX = 1 << 30
"""Bytes on disk."""
SLICE_MS = 10.0
"""The longest computation that is not divided, such as the ranking of one recall."""
RATIO_MAX = 3.0
WORSE_MAX = 1.3
"""How much a ratio over the bar may exceed its record."""
RECORDS = Path(__file__).with_name("fair_records.json")
NICE = 10
REAL_TIME = 10
"""Priority of server and B."""
SPIN = "spin"
"""A does not call, but uses its core."""
GRPC, HTTP = "gRPC", "HTTP"
KINDS = ("recall", "observe")
HEAVY, LIGHT = TENANTS
SMALL: dict[str, Any] = {"namespace": LIGHT, "memory": "small"}
BY_NAME = {method.name: method for method in METHODS}


@dataclass
class Times:
    """Of B's calls of one kind: how long each took, and the CPU that the server used meanwhile, in ms."""

    taken_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def p99_ms(self) -> float:
        """Of few calls: the longest."""
        return percentile(self.taken_ms, 0.99)

    def ratios(self, alone: Times) -> tuple[float, float]:
        """(of time, of CPU), p99 to p99."""
        return self.p99_ms() / alone.p99_ms(), percentile(self.cpu_ms, 0.99) / percentile(alone.cpu_ms, 0.99)


class SmallCalls:
    """Tenant B."""

    def __init__(self, caller: Caller, server_pid: int) -> None:
        self._caller = caller
        self._pid = server_pid

    async def _recall(self) -> None:
        query = streams.RecallQuery(text="Where does Bob live?", limit=5)
        await self._caller.call(BY_NAME["RecallOnce"], streams.RecallOnceRequest(**SMALL, query=query))

    async def _observe(self) -> None:
        request = streams.ObserveBatchRequest(**SMALL)
        request.observations.add(content="Bob lives in Ulm")
        await self._caller.call(BY_NAME["ObserveBatch"], request)

    async def measure(self, trials: int, has_load: Callable[[], Awaitable[bool]] | None = None) -> dict[str, Times]:
        """Both kinds, interleaved. At least so many trials, and as many as it takes until there is load."""
        measured = {kind: Times() for kind in KINDS}
        calls: dict[str, Callable[[], Awaitable[None]]] = {"recall": self._recall, "observe": self._observe}
        started_s = time.perf_counter()
        done = 0
        while True:
            lasted_s, loaded = time.perf_counter() - started_s, has_load is None or await has_load()
            if (loaded and (done >= trials or lasted_s > CELL_MAX_S)) or lasted_s > LOAD_MAX_S:
                break
            done += 1
            for kind, call in calls.items():
                used_s, began_s = cpu_s(self._pid), time.perf_counter()
                await call()
                measured[kind].taken_ms.append((time.perf_counter() - began_s) * 1e3)
                measured[kind].cpu_ms.append((cpu_s(self._pid) - used_s) * 1e3)
                await asyncio.sleep(PAUSE_S)
        return measured

    async def wait_idle(self) -> None:
        """Returns once the server has ended what A asked for."""
        until_s = time.perf_counter() + IDLE_MAX_S
        used_s = IDLE_LOOK_S
        while used_s > IDLE_CORES * IDLE_LOOK_S and time.perf_counter() < until_s:
            before_s = cpu_s(self._pid)
            await asyncio.sleep(IDLE_LOOK_S)
            used_s = cpu_s(self._pid) - before_s


class HeavyTenant:
    """Tenant A, a process of its own, which calls what this one asks it to call."""

    def __init__(self, addresses: dict[str, str], token: str, record: Path) -> None:
        command = [sys.executable, __file__, "heavy", addresses[GRPC], addresses[HTTP], token, str(record)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def _ask(self, line: str) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        said = (await asyncio.to_thread(self._process.stdout.readline)).strip()
        if not said.startswith("ok"):
            raise RuntimeError(f"{line}: {said or 'the process has ended'}")
        return [int(number) for number in said.split()[1:]]

    async def look(self) -> Ends:
        """How A's calls ended since the flood began."""
        return Ends(*await self._ask("look"))

    @contextlib.asynccontextmanager
    async def flood(self, name: str, port: str, calls: int) -> AsyncIterator[None]:
        """Keep calls in flight for the duration of the block. Raises RuntimeError if they end."""
        await self._ask(f"{name} {port} {calls}")
        yield
        await self._ask("stop")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(30)


async def run_heavy_process(grpc_address: str, http_address: str, token: str, world: World) -> None:
    """The process of tenant A: `NAME PORT CALLS` begins calls, `look` asks how they ended so far, `stop` ends them."""
    os.nice(NICE)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    caller = Caller(grpc_address, token)
    calling: asyncio.Task[None] | None = None
    ends = Ends()
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if calling is not None and calling.done():
            print(f"failed: {calling.exception()!r}", flush=True)
            continue
        if line == "look":
            print(f"ok {ends.answered} {ends.refused}", flush=True)
            continue
        if calling is not None:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            calling = None
        else:
            name, port, calls = line.split()
            ends, method = Ends(), BY_NAME.get(name)
            if method is None:
                calling = asyncio.create_task(_spin())
            elif port == HTTP:
                calling = asyncio.create_task(flood_http(http_address, method, world, int(calls), token, ends))
            else:
                calling = asyncio.create_task(caller.flood(method, world, int(calls), ends))
        print("ok", flush=True)


async def _spin() -> None:
    while True:
        sum(range(10_000))
        await asyncio.sleep(0)


def list_floods(size: Size, rpcs: frozenset[str]) -> Iterator[tuple[MethodDescriptor, str, tuple[int, int]]]:
    """(rpc, port, numbers of calls in flight); all rpcs if none is named."""
    for method in METHODS:
        if rpcs and method.name not in rpcs:
            continue
        most = (STREAMS if method.client_streaming or method.server_streaming else CALLS)[size]
        yield method, GRPC, (1, most)
        if not method.client_streaming:
            yield method, HTTP, (1, most)


def bytes_in(directory: Path) -> int:
    """Of its files."""
    found = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the server removes some
            found += path.stat().st_size
    return found


def make_admin_access(directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """As `make_access`; A may also call what concerns the whole server."""
    access, tokens = make_access(directory)
    policy = Path(str(access["access_policy_file"]))
    grant = f'\n[[grant]]\nwho = ["key:{HEAVY}"]\nnamespaces = ["*"]\nverbs = ["admin"]\n'
    policy.write_text(policy.read_text("utf-8") + grant, "utf-8")
    return access, tokens


@contextlib.asynccontextmanager
async def run_tenants(size: Size) -> AsyncIterator[tuple[dict[str, str], dict[str, str], Path, SmallCalls]]:
    """(addresses by port, keys, A's world, B) of a server with both tenants' memories."""
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        access, tokens = make_admin_access(scratch / "access")
        http = free_address()
        server = stack.enter_context(BenchServer(scratch / "data", http_listen=http, **access))
        light, heavy = Caller(server.address, tokens[LIGHT]), Caller(server.address, tokens[HEAVY])
        stack.push_async_callback(light.aclose)
        await light.call(BY_NAME["CreateMemory"], memories.CreateMemoryRequest(**SMALL))
        world = await prepare_world(heavy, HEAVY, FRAGMENTS[size])
        await heavy.aclose()
        record = scratch / "world.json"
        record.write_text(to_record(world), "utf-8")
        yield {GRPC: server.address, HTTP: http}, tokens, record, SmallCalls(light, server.pid)


@dataclass
class Cell:
    """B's calls of one kind beside one rpc of A over one port, once or many times in flight."""

    rpc: str
    port: str
    many: bool
    kind: str
    times: Times
    ends: Ends
    ratio: float = 0.0
    cpu_ratio: float = 0.0

    @property
    def has_load(self) -> bool:
        """Whether A's calls were under way."""
        return self.rpc in QUIET or self.ends.answered + self.ends.refused > 0

    @property
    def name(self) -> str:
        """In the records."""
        return f"{self.kind} beside {'many' if self.many else '1'} {self.rpc} over {self.port}"

    def compare(self, alone: Times) -> None:
        """Set the ratios."""
        self.ratio, self.cpu_ratio = self.times.ratios(alone)

    def bar(self, alone: Times) -> float:
        """The largest ratio that is good."""
        return RATIO_MAX if self.many else max(RATIO_MAX, 1 + SLICE_MS / alone.p99_ms())


class Measuring:
    """Measures the cells of one run."""

    _small: SmallCalls
    _heavy: HeavyTenant

    def __init__(self, size: Size, real_time: bool) -> None:
        self._size = size
        self._real_time = real_time
        self.alone = {kind: Times() for kind in KINDS}

    def use(self, small: SmallCalls, heavy: HeavyTenant) -> None:
        """Measure with these from now on."""
        self._small, self._heavy = small, heavy

    async def measure_alone(self) -> None:
        """Add calls without any of A's."""
        await self._small.wait_idle()
        beside = contextlib.nullcontext() if self._real_time else self._heavy.flood(SPIN, GRPC, 1)
        async with beside:
            measured = await self._small.measure(max(1, TRIALS[self._size] // 3))
        for kind, times in measured.items():
            self.alone[kind].taken_ms += times.taken_ms
            self.alone[kind].cpu_ms += times.cpu_ms

    async def measure_flood(self, rpc: str, port: str, calls: int) -> list[Cell]:
        """A cell of each kind."""

        async def has_load() -> bool:
            return Cell(rpc, port, calls > 1, "", Times(), await self._heavy.look()).has_load

        async with self._heavy.flood(rpc, port, calls):
            measured = await self._small.measure(TRIALS[self._size], has_load)
            ends = await self._heavy.look()
        await self._small.wait_idle()
        return [Cell(rpc, port, calls > 1, kind, times, ends) for kind, times in measured.items()]

    def over_bar(self, cells: list[Cell]) -> list[Cell]:
        """Those over the bar, by what was measured alone so far."""
        for cell in cells:
            cell.compare(self.alone[cell.kind])
        return [cell for cell in cells if cell.ratio > cell.bar(self.alone[cell.kind])]

    async def measure_again(self, cells: list[Cell], calls: int) -> None:
        """Repeat a flood if one of its cells is over the bar. The median of each cell counts."""
        if not self.over_bar(cells):
            return
        found = [[cell] for cell in cells]
        for _ in range(AGAIN[self._size]):
            again = await self.measure_flood(cells[0].rpc, cells[0].port, calls)
            for same, other in zip(found, again, strict=True):
                same.append(other)
        for cell, same in zip(cells, found, strict=True):
            loaded = sorted((each for each in same if each.has_load), key=lambda each: each.times.p99_ms()) or [cell]
            median = loaded[len(loaded) // 2]
            cell.times, cell.ends = median.times, median.ends


async def measure_cells(size: Size, real_time: bool, rpcs: frozenset[str]) -> tuple[list[Cell], Measuring]:
    """All cells. What floods store would fill a RAM disk: the server begins without data once it has `DATA_MAX`."""
    cells: list[Cell] = []
    measuring = Measuring(size, real_time)
    waiting = deque(list_floods(size, rpcs))
    while waiting:
        async with run_tenants(size) as (addresses, tokens, record, small):
            await small.measure(TRIALS[size])  # warm up
            with contextlib.closing(HeavyTenant(addresses, tokens[HEAVY], record)) as heavy:
                measuring.use(small, heavy)
                await measuring.measure_alone()
                while waiting and bytes_in(record.parent) < DATA_MAX:
                    method, port, floods = waiting.popleft()
                    await measuring.measure_alone()
                    for calls in floods:
                        measured = await measuring.measure_flood(method.name, port, calls)
                        await measuring.measure_again(measured, calls)
                        cells += measured
                        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    measuring.over_bar(cells)
    return cells, measuring


def format_cells(cells: list[Cell]) -> str:
    """A Markdown table: a row for each rpc and port."""
    rows: dict[tuple[str, str], list[str]] = {}
    for cell in sorted(cells, key=lambda cell: (KINDS.index(cell.kind), cell.many)):
        ratios = f"{cell.ratio:.1f} ({cell.cpu_ratio:.1f})" if cell.has_load else "no load"
        rows.setdefault((cell.rpc, cell.port), []).append(ratios)
    for cell in cells:
        if cell.many and cell.kind == KINDS[0]:
            rows[cell.rpc, cell.port].append(f"{cell.ends.answered} / {cell.ends.refused}")
    header = ["rpc", "port", *(f"{kind}, {many}" for kind in KINDS for many in ("1 call", "many")), "ended, many"]
    lines = [header, ["---"] * len(header), *([*key, *row] for key, row in sorted(rows.items()))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def find_failures(over: list[Cell], records: dict[str, float]) -> list[str]:
    """Cells over the bar that are worse than their record, or have none."""
    return [
        f"{cell.name}: {cell.ratio:.1f} times, recorded {records.get(cell.name, 'nothing')}"
        for cell in over
        if cell.ratio > WORSE_MAX * records.get(cell.name, 0.0)
    ]


def run_benchmark() -> int:
    """Measure, print, and return the exit status. Raises ValueError if an rpc has no arguments."""
    parser = make_parser(__doc__)
    parser.add_argument("--rpcs", default="", help="only these, separated by commas")
    parser.add_argument("--real-time", action="store_true", help="real-time priority for server and B; needs root")
    parser.add_argument("--write", action="store_true", help="record the ratios over the bar; with --real-time")
    given = parser.parse_args()
    if given.write and not given.real_time:
        parser.error("records are of real-time priority: --write needs --real-time")
    if missing := find_missing():
        raise ValueError(f"heavy_calls.py and the contract differ in {', '.join(missing)}")
    rpcs = frozenset(filter(None, given.rpcs.split(",")))
    if unknown := rpcs - set(BY_NAME):
        raise ValueError(f"no such rpc: {', '.join(unknown)}")
    if given.real_time:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME))  # the server inherits it
    cells, measuring = asyncio.run(measure_cells(given.size, given.real_time, rpcs))
    idle = [cell for cell in cells if not cell.has_load]
    over = measuring.over_bar([cell for cell in cells if cell.has_load])
    print(format_machine(describe_machine()))
    print(f"{'real-time' if given.real_time else 'ordinary'} priority; the records are of real-time priority")
    for kind, times in measuring.alone.items():
        print(f"{kind} alone: p50 {statistics.median(times.taken_ms):.1f} ms, p99 {times.p99_ms():.1f} ms")
    print(format_cells(cells))
    print(f"{len(cells) - len(over) - len(idle)} of {len(cells)} cells are within the bar")
    for cell in idle:
        print(f"{cell.name}: no call ended")
    if given.json is not None:
        figures = [
            {"cell": one.name, "ratio": one.ratio, "cpu_ratio": one.cpu_ratio, "answered": one.ends.answered}
            for one in cells
        ]
        given.json.write_text(json.dumps({"machine": describe_machine(), "cells": figures}, indent=1), "utf-8")
    records: dict[str, float] = json.loads(RECORDS.read_text("utf-8"))
    if given.write:
        kept = {name: ratio for name, ratio in records.items() if name not in {cell.name for cell in cells}}
        kept |= {cell.name: round(cell.ratio, 1) for cell in over}
        RECORDS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", "utf-8")
        return 1 if idle else 0
    failures = find_failures(over, records)
    print("\n".join(["over the bar and their records:", *failures]) if failures else "none is over its record")
    return 1 if (failures or idle) and given.size is not Size.TINY else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["heavy"]:
        grpc_address, http_address, token, file = sys.argv[2:]
        asyncio.run(run_heavy_process(grpc_address, http_address, token, from_record(Path(file).read_text("utf-8"))))
    else:
        sys.exit(run_benchmark())
