"""How long a recall takes through the SDK, when nothing else happens and while 500 observations arrive every second.

    python benchmarks/bench_recall.py [--full | --tiny] [--rounds N] [--json FILE]

100 memories hold 1,000, 10,000 and (with --full) 100,000 fragments together; queries go to them at random, one at a
time, with the defaults: ten fragments and the working memory, reinforcing. Beside them, in turns with them and under
the same load: a bare gRPC echo of the question and an answer of the same size, an exact numpy scan and a plain BM25 of
the same memory, summed question by question. For the cost of the total size a second server holds 1,000 fragments in
all, in memories of the same size as those of the largest total.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from arriving import PER_S, RATE, arriving
from claims import CPU, Claim, at_least, at_most, claim, pause, standalone
from echo import EchoServer
from recalls import COLUMNS, P50, P99, Parts, Recalling, Texts, enter, fill, whole_of
from report import PAUSES, Report, Size
from served import Served

import memstream

MEMORIES = {Size.TINY: 4, Size.SHORT: 100, Size.FULL: 100}
TOTALS = {Size.TINY: (80,), Size.SHORT: (1_000, 10_000), Size.FULL: (1_000, 10_000, 100_000)}
"""Fragments in all memories together."""
FEW = {Size.TINY: 20, Size.SHORT: 1_000, Size.FULL: 1_000}
"""Fragments in all, beside the largest total."""
QUERIES = {Size.TINY: 5, Size.SHORT: 200, Size.FULL: 500}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 5}
FLUSH_INTERVAL_S = 2.0
PREFIX = "recall/agent"
ALONE_S = 1.0
"""How long the load runs alone to learn what it costs."""
STORED, SENT = "stored /s", "observations sent"
IDLE, LOADED = "idle", f"{RATE}/s arrive"
BESIDE_ALL, BESIDE_FEW = "memstream, the largest total, in turns with the smallest", "memstream, 1,000 in all"


@dataclass(frozen=True)
class Filled:
    """A server with memories, and how to ask them."""

    server: Served
    texts: Texts
    recalling: Recalling


@contextlib.asynccontextmanager
async def filled(directory: Path, sizes: Sequence[int]) -> AsyncIterator[Filled]:
    """A server of its own with memories of these sizes, all asked once."""
    with Served(directory, index_flush_interval_s=FLUSH_INTERVAL_S) as server:
        async with memstream.connect(server.address) as client:
            texts = await fill(client, PREFIX, sizes)
            async with Recalling(server, client, PREFIX) as recalling:
                await recalling.ask([(place, texts.question(place)) for place in range(len(sizes))])
                yield Filled(server, texts, recalling)


async def measure_idle(report: Report, held: Filled, parts: Parts, total: int, count: int) -> dict[str, float]:
    """Recalls and parts in turns; the steps of a recall."""
    since = time.monotonic()
    steps = await held.recalling.measure(report, _ours(total, IDLE), held.texts.questions(count))
    report.pause(_loop(total, IDLE), held.server.pause(since))
    await parts.measure(report, _parts(total, IDLE), held.texts.questions(count))
    report.pause(_echo_loop(total, IDLE), parts.pause())
    return steps


async def measure_loaded(report: Report, held: Filled, parts: Parts, total: int, count: int) -> None:
    """The same while observations arrive."""
    async with arriving(held.server.address, PREFIX, len(held.texts.held)) as arrived:
        before, began = held.server.cpu(), time.perf_counter()
        await asyncio.sleep(ALONE_S)
        load_cpu = held.server.cpu().since(before).both / (time.perf_counter() - began)
        since = time.monotonic()
        seconds, _ = await held.recalling.ask(held.texts.questions(count))
        enter(report, _ours(total, LOADED), seconds)
        report.pause(_loop(total, LOADED), held.server.pause(since))
        await parts.measure(report, _parts(total, LOADED), held.texts.questions(count))
        report.pause(_echo_loop(total, LOADED), parts.pause())
    await held.recalling.settle()
    stored = arrived[PER_S]
    report.add(_load(total), **{STORED: stored, CPU: load_cpu / max(stored, 1.0) * 1e6})
    report.add(SENT, **{STORED: RATE})


async def measure(report: Report, size: Size, rounds: int) -> dict[str, dict[str, float]]:
    """All totals, one after another, each with all its rounds; the steps of an idle recall by total."""
    steps: dict[str, dict[str, float]] = {}
    memories, count = MEMORIES[size], QUERIES[size]
    for total in TOTALS[size]:
        each = total // memories
        async with contextlib.AsyncExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            echo = stack.enter_context(EchoServer(scratch))
            held = await stack.enter_async_context(filled(scratch / "data", [each] * memories))
            few: Filled | None = None
            if total == TOTALS[size][-1]:
                few = await stack.enter_async_context(filled(scratch / "few", [each] * (FEW[size] // each)))
            parts = Parts(echo, held.texts, await held.recalling.answer(0, held.texts.question(0)))
            for _ in range(rounds):
                steps[f"{total:,}"] = await measure_idle(report, held, parts, total, count)
                if few is not None:
                    await few.recalling.measure(report, BESIDE_FEW, few.texts.questions(count))
                    await held.recalling.measure(report, BESIDE_ALL, held.texts.questions(count))
                await measure_loaded(report, held, parts, total, count)
    return steps


def _ours(total: int, how: str) -> str:
    return f"memstream, {total:,} in all, {how}"


def _parts(total: int, how: str) -> str:
    return f"echo + numpy scan + BM25, {total:,} in all, {how}"


def _loop(total: int, how: str) -> str:
    return f"memstream's event loop, {total:,} in all, {how}"


def _echo_loop(total: int, how: str) -> str:
    return f"bare echo's event loop, {total:,} in all, {how}"


def _load(total: int) -> str:
    return f"observations arriving, {total:,} in all"


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report((*COLUMNS, STORED, *PAUSES))
    steps = asyncio.run(measure(report, size, rounds or ROUNDS[size]))
    report.more["steps of an idle recall, ms"] = steps
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of recall from active memories."""
    told: list[Claim] = []
    totals = [total for total in TOTALS[Size.TINY] + TOTALS[Size.FULL] if _ours(total, IDLE) in report.rows]
    for total in totals:
        for how in (IDLE, LOADED):
            ours, parts, said = _ours(total, how), _parts(total, how), f"{total:,} in all, {how}"
            told += [
                claim(report, f"recall p50, {said}", ours, P50, parts, at_most(1.5)),
                claim(report, f"recall p99, {said}", ours, P99, parts, at_most(2.5)),
                claim(report, f"recall p50, {said}, beside all unavoidable parts", ours, P50, whole_of(parts)),
                claim(report, f"recall p99, {said}, beside all unavoidable parts", ours, P99, whole_of(parts)),
            ]
            if how == LOADED:
                idle = _parts(total, IDLE)
                told += [
                    claim(report, f"recall p50, {said}, parts idle", ours, P50, idle),
                    claim(report, f"recall p99, {said}, parts idle", ours, P99, idle),
                    claim(report, f"stored meanwhile, {said}", _load(total), STORED, SENT, at_least(0.98)),
                ]
            told.append(pause(report, f"event loop's longest pause, {said}", _loop(total, how), _echo_loop(total, how)))
    name = f"recall p50, {totals[-1]:,} in all beside 1,000, memories of the same size"
    told.append(claim(report, name, BESIDE_ALL, P50, BESIDE_FEW, at_most(1.3)))
    return told


if __name__ == "__main__":
    standalone(__doc__, run, claims)
