"""Recall latency of a memory that is not in RAM: the cost of activation.

    python benchmarks/bench_cold.py [--full | --tiny] [--rounds N] [--json FILE]

Two memories of 1,000 and two of 10,000 fragments on a server that keeps one memory in RAM. They are asked alternately,
so each answer is the first one after an activation. Rounds alternate with the same memory asked again, the same
questions to a server that keeps no images, the same rows read directly from the same SQLite file, and a search of a
Milvus Lite with the same vectors.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bare import start_milvus_lite
from claims import CPU, Claim, at_most, make_claim, make_pause_claim, run_standalone
from echo import EchoServer
from recalls import COLUMNS, P50, P99, BareParts, RecallClient, Texts, add_times, fill_memories, measure_lite
from report import PAUSES, Report, Size, own_cpu_s
from served import BenchServer

import memstream

SIZES = {Size.TINY: (20,), Size.SHORT: (1_000, 10_000), Size.FULL: (1_000, 10_000)}
"""Fragments per memory; there are two of each size."""
QUERIES = {Size.TINY: 2, Size.SHORT: 10, Size.FULL: 30}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 5}
PREFIX = "cold/agent"
IMAGES_PAY = 10_000
"""Fragments of the memories for which there is an aim."""
ROWS = (
    "SELECT payload, access_count, access_time_us, terms FROM fragments WHERE key BETWEEN ? AND ? ORDER BY key",
    "SELECT key, vector FROM vectors WHERE key BETWEEN ? AND ? ORDER BY key",
)
"""The rows that an activation reads (adapters/journal), except the few of its short-term side."""


def time_row_reads(journal: Path, place: int) -> float:
    """Seconds to read all rows of a memory from the journal, on a separate connection."""
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as opened:
        name = f"agent-{place}"
        (number,) = opened.execute("SELECT number FROM memories WHERE name = ?", (name,)).fetchone()
        began = time.perf_counter()
        for statement in ROWS:
            opened.execute(statement, (number << 32, (number + 1 << 32) - 1)).fetchall()
        return time.perf_counter() - began


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """Measure all sizes in every round."""
    sizes, count = SIZES[size], QUERIES[size]
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        echo = stack.enter_context(EchoServer(scratch))
        places = [each for each in sizes for _ in range(2)]
        server, recalling, texts = await _start_server(stack, scratch / "data", places)
        _, from_rows, _ = await _start_server(stack, scratch / "without", places, images_bytes_max=0)
        parts = BareParts(echo, texts, await recalling.answer(0, texts.draw_question(0)))
        lite = await stack.enter_async_context(start_milvus_lite(scratch / "lite"))
        await lite.fill_collection(parts.vectors)
        for _ in range(rounds):
            for at, each in enumerate(sizes):
                turns = [(2 * at + turn % 2, texts.draw_question(2 * at + turn % 2)) for turn in range(count)]
                await recalling.answer(*turns[1])
                since = time.monotonic()
                await recalling.measure(report, _cold_row(each), turns)
                report.add_pause(_loop_row(each), server.longest_pause(since))
                await from_rows.answer(*turns[1])
                await from_rows.measure(report, _rows_row(each), turns)
                warm = [(turns[-1][0], text) for _, text in turns]
                await recalling.measure(report, _warm_row(each), warm)
                own = own_cpu_s()
                seconds = [
                    await asyncio.to_thread(time_row_reads, scratch / "data" / "journal.db", place)
                    for place, _ in turns
                ]
                add_times(report, _sqlite_row(each), seconds, own_cpu_s() - own)
                await measure_lite(report, _lite_row(each), lite, texts, turns)
                await parts.measure(report, _parts_row(each), turns)
                report.add_pause(_echo_loop_row(each), parts.longest_pause())


async def _start_server(
    stack: contextlib.AsyncExitStack, data_dir: Path, sizes: Sequence[int], **settings: Any
) -> tuple[BenchServer, RecallClient, Texts]:
    """A server with room for one memory, filled with memories of these sizes."""
    server = BenchServer(data_dir, index_flush_interval_s=2, active_memories_max=1, **settings)
    stack.enter_context(server)
    client = await stack.enter_async_context(memstream.connect(server.address))
    texts = await fill_memories(client, PREFIX, sizes)
    return server, await stack.enter_async_context(RecallClient(server, client, PREFIX)), texts


def _cold_row(each: int) -> str:
    return f"memstream, cold, {each:,}"


def _rows_row(each: int) -> str:
    return f"memstream, cold, without images, {each:,}"


def _warm_row(each: int) -> str:
    return f"memstream, warm, {each:,}"


def _sqlite_row(each: int) -> str:
    return f"the same rows read from SQLite, {each:,}"


def _lite_row(each: int) -> str:
    return f"bare Milvus Lite search, {each:,}"


def _parts_row(each: int) -> str:
    return f"echo + numpy scan + BM25, {each:,}"


def _loop_row(each: int) -> str:
    return f"event loop of memstream, cold, {each:,}"


def _echo_loop_row(each: int) -> str:
    return f"event loop of the bare echo, {each:,}"


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((*COLUMNS, *PAUSES))
    report.more["sizes"] = SIZES[size]
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def _make_activation_claim(report: Report, each: int, suffix: str) -> Claim:
    """CPU of a cold recall less that of a warm one, with images and without."""
    warm = report.round_values(_warm_row(each), CPU)
    ours, others = (
        [cold - less for cold, less in zip(report.round_values(row, CPU), warm, strict=True)]
        for row in (_cold_row(each), _rows_row(each))
    )
    return Claim(
        f"activation vs from rows, {suffix}",
        CPU.rpartition(" ")[2],
        statistics.median(ours),
        _rows_row(each),
        statistics.median(others),
        statistics.median(one / other for one, other in zip(ours, others, strict=True)),
        at_most(0.2) if each >= IMAGES_PAY else None,
    )


def make_claims(report: Report) -> list[Claim]:
    """Claims about inactive memories."""
    claims: list[Claim] = []
    for each in report.more["sizes"]:
        suffix = f"inactive memory of {each:,}"
        claims += [
            make_claim(
                report, f"recall p50, activation included, {suffix}", _cold_row(each), P50, _lite_row(each), at_most(2)
            ),
            _make_activation_claim(report, each, suffix),
            make_claim(
                report,
                f"recall p50, activation included, vs from rows, {suffix}",
                _cold_row(each),
                P50,
                _rows_row(each),
            ),
            make_claim(report, f"recall p99, activation included, {suffix}", _cold_row(each), P99, _lite_row(each)),
            make_claim(
                report,
                f"recall p50 vs reading its rows, {suffix}",
                _cold_row(each),
                P50,
                _sqlite_row(each),
                at_most(150, "ms"),
            ),
            make_pause_claim(report, f"longest event-loop pause, {suffix}", _loop_row(each), _echo_loop_row(each)),
        ]
    return claims


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
