"""Latency of one caller's small calls beside every rpc of another caller at its largest arguments.

    python benchmarks/bench_fair.py [--full | --tiny] [--rounds N] [--json FILE]

Tenant B recalls from a memory of a few fragments and stores one observation, one call after the other. It does so
alone, beside one call of tenant A, and beside as many of A's calls as its limits allow in flight, for each rpc of the
contract over gRPC and, where HTTP has it, as JSON over HTTP. `heavy_calls.py` has the arguments; an rpc without a line
there fails the benchmark. A is a process of its own with a lower priority, so that the cores that both share do not
count.

The aims: B's p99 during A's calls is at most three times its p99 alone; with a single call it is longer by a slice
at most. Exits with 1 if one is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httpx2
from bench_http import free_address
from bench_overload import TENANTS, make_access
from claims import Claim, at_most, make_claim, run_standalone
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from heavy_calls import ARGUMENTS, METHODS, Caller, World, find_missing, from_record, path_of, prepare_world, to_record
from report import Report, Size, percentile
from served import BenchServer

from memstream.v1 import memory_service_pb2 as memories
from memstream.v1 import stream_service_pb2 as streams

FRAGMENTS = {Size.TINY: 30, Size.SHORT: 5_000, Size.FULL: 10_000}
"""Of A's memory."""
TRIALS = {Size.TINY: 2, Size.SHORT: 60, Size.FULL: 300}
"""Small calls of each kind in a round."""
CALLS = {Size.TINY: 2, Size.SHORT: 64, Size.FULL: 256}
"""Calls of A in flight; 256 are `caller_calls_max` and `connection_streams_max`."""
STREAMS = {Size.TINY: 2, Size.SHORT: 16, Size.FULL: 192}
"""Streams of A; 192 are `caller_streams_max`."""
ROUNDS = {Size.TINY: 1, Size.SHORT: 1, Size.FULL: 3}
PAUSE_S = 0.005
SLICE_MS = 10.0
"""The longest computation that is not divided, such as the ranking of one recall."""
RATIO_MAX = 3.0
NICE = 10
GRPC, HTTP = "gRPC", "HTTP"
P99 = "p99 ms"
COLUMNS = (P99, "p50 ms")
ALONE = "alone"
HEAVY, LIGHT = TENANTS
SMALL = {"namespace": LIGHT, "memory": "small"}
BY_NAME = {method.name: method for method in METHODS}


class SmallCalls:
    """Tenant B."""

    def __init__(self, caller: Caller, report: Report, trials: int) -> None:
        self._caller = caller
        self._report = report
        self._trials = trials

    async def _recall(self) -> None:
        query = streams.RecallQuery(text="Where does Bob live?", limit=5)
        await self._caller.call(BY_NAME["RecallOnce"], streams.RecallOnceRequest(**SMALL, query=query))

    async def _observe(self) -> None:
        request = streams.ObserveBatchRequest(**SMALL)
        request.observations.add(content="Bob lives in Ulm")
        await self._caller.call(BY_NAME["ObserveBatch"], request)

    async def measure(self, row: str) -> None:
        """One round of both kinds, interleaved; `row` is the row's name with a place for the kind."""
        taken: dict[str, list[float]] = {"recall": [], "observe": []}
        calls: dict[str, Callable[[], Awaitable[None]]] = {"recall": self._recall, "observe": self._observe}
        for _ in range(self._trials):
            for kind, call in calls.items():
                began_s = time.perf_counter()
                await call()
                taken[kind].append((time.perf_counter() - began_s) * 1e3)
                await asyncio.sleep(PAUSE_S)
        for kind, each in taken.items():
            self._report.add_round(row.format(kind), p99_ms=percentile(each, 0.99), p50_ms=statistics.median(each))


class HeavyTenant:
    """Tenant A, a process of its own, which calls what this one asks it to call."""

    def __init__(self, addresses: dict[str, str], token: str, record: Path) -> None:
        command = [sys.executable, __file__, "heavy", addresses[GRPC], addresses[HTTP], token, str(record)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def _tell(self, line: str, answer: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        said = (await asyncio.to_thread(self._process.stdout.readline)).strip()
        if said != answer:
            raise RuntimeError(f"{line}: {said or 'the process has ended'}")

    @contextlib.asynccontextmanager
    async def flood(self, name: str, port: str, calls: int) -> AsyncIterator[None]:
        """Keep calls in flight for the duration of the block. Raises RuntimeError if they end."""
        await self._tell(f"{name} {port} {calls}", "begun")
        yield
        await self._tell("stop", "stopped")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(30)


async def flood_http(address: str, token: str, method: MethodDescriptor, world: World, calls: int) -> None:
    """Keep this many calls in flight until cancelled."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    limits = httpx2.Limits(max_connections=calls, max_keepalive_connections=calls)
    async with httpx2.AsyncClient(base_url=f"http://{address}", headers=headers, limits=limits, timeout=120) as client:

        async def repeat() -> None:
            while True:
                body = json_format.MessageToJson(ARGUMENTS[method.name](world))
                answer = await client.post(path_of(method), content=body)
                if answer.status_code != httpx2.codes.OK:
                    await asyncio.sleep(0.02)

        await asyncio.gather(*(repeat() for _ in range(calls)))


async def run_heavy_process(grpc_address: str, http_address: str, token: str, world: World) -> None:
    """The process of tenant A: a line `NAME PORT CALLS` begins calls, `stop` ends them."""
    os.nice(NICE)
    caller = Caller(grpc_address, token)
    calling: asyncio.Task[None] | None = None
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if calling is not None:
            failed = calling.exception() if calling.done() else None
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            calling = None
            print(f"failed: {failed!r}" if failed else "stopped", flush=True)
            continue
        name, port, calls = line.split()
        method = BY_NAME[name]
        if port == HTTP:
            calling = asyncio.create_task(flood_http(http_address, token, method, world, int(calls)))
        else:
            calling = asyncio.create_task(caller.flood(method, world, int(calls)))
        print("begun", flush=True)


def list_floods(size: Size) -> Iterator[tuple[MethodDescriptor, str, tuple[int, ...]]]:
    """(rpc, port, numbers of calls in flight)."""
    for method in METHODS:
        most = (STREAMS if method.client_streaming or method.server_streaming else CALLS)[size]
        yield method, GRPC, (1, most)
        if not (method.client_streaming or method.server_streaming):
            yield method, HTTP, (1, most)


@contextlib.asynccontextmanager
async def run_tenants(size: Size) -> AsyncIterator[tuple[dict[str, str], dict[str, str], Path, Caller]]:
    """(addresses by port, keys, A's world, B) of a server with both tenants' memories."""
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        access, tokens = make_access(scratch / "access")
        http = free_address()
        server = stack.enter_context(BenchServer(scratch / "data", http_listen=http, **access))
        light, heavy = Caller(server.address, tokens[LIGHT]), Caller(server.address, tokens[HEAVY])
        stack.push_async_callback(light.close)
        await light.call(BY_NAME["CreateMemory"], memories.CreateMemoryRequest(**SMALL))
        world = await prepare_world(heavy, HEAVY, FRAGMENTS[size])
        await heavy.close()
        record = scratch / "world.json"
        record.write_text(to_record(world), "utf-8")
        yield {GRPC: server.address, HTTP: http}, tokens, record, light


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """Beside each rpc; alone before each."""
    async with run_tenants(size) as (addresses, tokens, record, light):
        small = SmallCalls(light, report, TRIALS[size])
        await SmallCalls(light, Report(COLUMNS), TRIALS[size]).measure("{}")  # warm up
        with contextlib.closing(HeavyTenant(addresses, tokens[HEAVY], record)) as heavy:
            for _ in range(rounds):
                for method, port, floods in list_floods(size):
                    await small.measure("{}, " + ALONE)
                    for calls in floods:
                        named = "1" if calls == 1 else "many"
                        async with heavy.flood(method.name, port, calls):
                            await small.measure(f"{{}}, beside {named} {method.name} over {port}")


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds. Raises ValueError if an rpc has no arguments."""
    if missing := find_missing():
        raise ValueError(f"heavy_calls.py and the contract differ in {', '.join(missing)}")
    report = Report(COLUMNS)
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Two for each kind of small call, rpc and port."""
    claims = []
    for row in report.rows:
        kind, _, beside = row.partition(", beside ")
        if not beside:
            continue
        alone = f"{kind}, {ALONE}"
        aim = at_most(RATIO_MAX)
        if beside.startswith("1 "):
            aim = at_most(max(RATIO_MAX, 1 + SLICE_MS / report.median_of(alone, P99)))
        claims.append(make_claim(report, f"p99 of {kind} beside {beside}", row, P99, alone, aim))
    return claims


if __name__ == "__main__":
    if sys.argv[1:2] == ["heavy"]:
        *named, file = sys.argv[2:]
        asyncio.run(run_heavy_process(*named, from_record(Path(file).read_text("utf-8"))))
    else:
        measured = run_standalone(__doc__, run_benchmark, make_claims)
        missed = [claim.name for claim in make_claims(measured) if claim.met == "no"]
        print("\n".join(["missed:", *missed]) if missed else "all aims are met")
        sys.exit(1 if missed else 0)
