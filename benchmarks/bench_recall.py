"""Recall latency through the SDK, idle and while 500 observations arrive every second.

    python benchmarks/bench_recall.py [--full | --tiny] [--rounds N] [--json FILE]

100 memories hold 1,000, 10,000 and (with --full) 100,000 fragments in total. Queries go to random memories, one at a
time, with the defaults: ten fragments and the working memory, with reinforcement. Rounds alternate with the parts under
the same load: a bare gRPC echo of the question and an answer of the same size, an exact numpy scan and a plain BM25 of
the same memory, summed question by question. For the cost of the total size, a second server holds 1,000 fragments, in
memories of the same size as those of the largest total.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from arriving import PER_S, RATE, send_steadily
from claims import CPU, Claim, at_least, at_most, make_claim, make_pause_claim, run_standalone
from echo import EchoServer
from recalls import COLUMNS, P50, P99, BareParts, RecallClient, Texts, add_times, all_parts_row, fill_memories
from report import PAUSES, Report, Size
from served import BenchServer

import memstream

MEMORIES = {Size.TINY: 4, Size.SHORT: 100, Size.FULL: 100}
TOTALS = {Size.TINY: (80,), Size.SHORT: (1_000, 10_000), Size.FULL: (1_000, 10_000, 100_000)}
"""Fragments in all memories together."""
FEW = {Size.TINY: 20, Size.SHORT: 1_000, Size.FULL: 1_000}
"""Fragments of the second server, compared with the largest total."""
QUERIES = {Size.TINY: 5, Size.SHORT: 200, Size.FULL: 500}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 5}
FLUSH_INTERVAL_S = 2.0
PREFIX = "recall/agent"
ALONE_S = 1.0
"""Seconds of load alone, to measure the CPU it costs."""
STORED, SENT = "stored /s", "observations sent"
IDLE, LOADED = "idle", f"{RATE} writes/s"
BESIDE_ALL, BESIDE_FEW = "memstream, largest total, alternating with 1,000", "memstream, 1,000 in total"


@dataclass(frozen=True)
class FilledServer:
    """A server with memories, and a client for them."""

    server: BenchServer
    texts: Texts
    recalling: RecallClient


@contextlib.asynccontextmanager
async def start_filled(directory: Path, sizes: Sequence[int]) -> AsyncIterator[FilledServer]:
    """Start a server, fill memories of these sizes, and ask each once."""
    with BenchServer(directory, index_flush_interval_s=FLUSH_INTERVAL_S) as server:
        async with memstream.connect(server.address) as client:
            texts = await fill_memories(client, PREFIX, sizes)
            async with RecallClient(server, client, PREFIX) as recalling:
                await recalling.ask([(place, texts.draw_question(place)) for place in range(len(sizes))])
                yield FilledServer(server, texts, recalling)


async def measure_idle(
    report: Report, held: FilledServer, parts: BareParts, total: int, count: int
) -> dict[str, float]:
    """Measure recalls, then parts. Returns the recall steps in ms."""
    since = time.monotonic()
    steps = await held.recalling.measure(report, _recall_row(total, IDLE), held.texts.draw_questions(count))
    report.add_pause(_loop_row(total, IDLE), held.server.longest_pause(since))
    await parts.measure(report, _parts_row(total, IDLE), held.texts.draw_questions(count))
    report.add_pause(_echo_loop_row(total, IDLE), parts.longest_pause())
    return steps


async def measure_loaded(report: Report, held: FilledServer, parts: BareParts, total: int, count: int) -> None:
    """Measure the same while observations arrive."""
    async with send_steadily(held.server.address, PREFIX, len(held.texts.sentences)) as arrived:
        before, began = held.server.cpu_used(), time.perf_counter()
        await asyncio.sleep(ALONE_S)
        load_cpu = held.server.cpu_used().since(before).total / (time.perf_counter() - began)
        since = time.monotonic()
        seconds, _ = await held.recalling.ask(held.texts.draw_questions(count))
        add_times(report, _recall_row(total, LOADED), seconds)
        report.add_pause(_loop_row(total, LOADED), held.server.longest_pause(since))
        await parts.measure(report, _parts_row(total, LOADED), held.texts.draw_questions(count))
        report.add_pause(_echo_loop_row(total, LOADED), parts.longest_pause())
    await held.recalling.wait_until_indexed()
    stored = arrived[PER_S]
    report.add_round(_load_row(total), **{STORED: stored, CPU: load_cpu / max(stored, 1.0) * 1e6})
    report.add_round(SENT, **{STORED: RATE})


async def measure_rounds(report: Report, size: Size, rounds: int) -> dict[str, dict[str, float]]:
    """All totals, one after another, each with all its rounds. Returns the idle recall steps in ms by total."""
    steps: dict[str, dict[str, float]] = {}
    memories, count = MEMORIES[size], QUERIES[size]
    for total in TOTALS[size]:
        each = total // memories
        async with contextlib.AsyncExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            echo = stack.enter_context(EchoServer(scratch))
            held = await stack.enter_async_context(start_filled(scratch / "data", [each] * memories))
            few: FilledServer | None = None
            if total == TOTALS[size][-1]:
                few = await stack.enter_async_context(start_filled(scratch / "few", [each] * (FEW[size] // each)))
            parts = BareParts(echo, held.texts, await held.recalling.answer(0, held.texts.draw_question(0)))
            for _ in range(rounds):
                steps[f"{total:,}"] = await measure_idle(report, held, parts, total, count)
                if few is not None:
                    await few.recalling.measure(report, BESIDE_FEW, few.texts.draw_questions(count))
                    await held.recalling.measure(report, BESIDE_ALL, held.texts.draw_questions(count))
                await measure_loaded(report, held, parts, total, count)
    return steps


def _recall_row(total: int, how: str) -> str:
    return f"memstream, {total:,} in total, {how}"


def _parts_row(total: int, how: str) -> str:
    return f"echo + numpy scan + BM25, {total:,} in total, {how}"


def _loop_row(total: int, how: str) -> str:
    return f"event loop of memstream, {total:,} in total, {how}"


def _echo_loop_row(total: int, how: str) -> str:
    return f"event loop of the bare echo, {total:,} in total, {how}"


def _load_row(total: int) -> str:
    return f"observations arriving, {total:,} in total"


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((*COLUMNS, STORED, *PAUSES))
    steps = asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    report.more["steps of an idle recall, ms"] = steps
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about recall from active memories."""
    claims: list[Claim] = []
    totals = [total for total in TOTALS[Size.TINY] + TOTALS[Size.FULL] if _recall_row(total, IDLE) in report.rows]
    for total in totals:
        for how in (IDLE, LOADED):
            ours, parts, suffix = _recall_row(total, how), _parts_row(total, how), f"{total:,} in total, {how}"
            claims += [
                make_claim(report, f"recall p50, {suffix}", ours, P50, parts, at_most(1.5)),
                make_claim(report, f"recall p99, {suffix}", ours, P99, parts, at_most(2.5)),
                make_claim(report, f"recall p50, {suffix}, vs all unavoidable parts", ours, P50, all_parts_row(parts)),
                make_claim(report, f"recall p99, {suffix}, vs all unavoidable parts", ours, P99, all_parts_row(parts)),
            ]
            if how == LOADED:
                idle = _parts_row(total, IDLE)
                claims += [
                    make_claim(report, f"recall p50, {suffix}, parts idle", ours, P50, idle),
                    make_claim(report, f"recall p99, {suffix}, parts idle", ours, P99, idle),
                    make_claim(
                        report, f"stored during the recalls, {suffix}", _load_row(total), STORED, SENT, at_least(0.98)
                    ),
                ]
            claims.append(
                make_pause_claim(
                    report, f"longest event-loop pause, {suffix}", _loop_row(total, how), _echo_loop_row(total, how)
                )
            )
    name = f"recall p50, {totals[-1]:,} in total vs 1,000, same memory size"
    claims.append(make_claim(report, name, BESIDE_ALL, P50, BESIDE_FEW, at_most(1.3)))
    return claims


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
