"""One large memory: recalls before and after a restart, recalls through Milvus Lite, and RSS per fragment.

    python benchmarks/bench_large.py [--full | --tiny] [--rounds N] [--json FILE]

100,000 fragments in one memory (20,000 without --full). Recalls are measured where the memory grew; then the server is
restarted over the filled journal, once with the defaults, which keep the vectors of such a memory in RAM, and once with
a limit that keeps none. Questions with a fixed time are asked before and after the first restart. Rounds alternate with
echo + numpy scan + BM25 of the same fragments, and a search of a bare Milvus Lite with the same vectors.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bare import start_milvus_lite
from claims import Claim, at_most, make_claim, make_pause_claim, run_standalone
from echo import EchoServer
from recalls import COLUMNS, P50, P99, BareParts, RecallClient, Texts, fill_memories, measure_lite
from report import PAUSES, Report, Size
from served import BenchServer

import memstream

COUNT = {Size.TINY: 60, Size.SHORT: 20_000, Size.FULL: 100_000}
SETTINGS: dict[str, Any] = {"index_flush_interval_s": 2, "index_from_fragments": 0}
QUERIES = {Size.TINY: 3, Size.SHORT: 50, Size.FULL: 200}
ROUNDS = {Size.TINY: 1, Size.SHORT: 3, Size.FULL: 3}
PREFIX = "large/agent"
SETTLED_S = 1.0
SMALL = 10
"""Fragments of another memory that is asked first, so that the large one's activation is not the server's first recall.
"""
RESIDENT, ACTIVATION = "RSS bytes", "first answer ms"
IN_RAM, IN_INDEX = "vectors in RAM", "vectors in the index"
GROWN = "memstream, as it grew"
REPEATED = {Size.TINY: 3, Size.SHORT: 30, Size.FULL: 30}
"""Questions whose answers are compared."""
NOW = datetime(2026, 1, 1, tzinfo=UTC)
CHANGED, SAME, TWICE = "changed answers", "answers after a restart", "memstream, asked twice"
VARIANTS: dict[str, dict[str, Any]] = {IN_RAM: {}, IN_INDEX: {"dense_bytes_max": 0}}
LITE, PARTS, ECHO = "bare Milvus Lite search", "echo + numpy scan + BM25", "event loop of the bare echo"
BYTES = "bytes of its vector and text"


def row_names(variant: str) -> tuple[str, str, str, str]:
    """Names of one variant's rows: recalls, event loop, event loop during activation, RSS."""
    return (
        f"memstream, {variant}",
        f"event loop, {variant}",
        f"event loop, activation, {variant}",
        f"RSS per fragment, {variant}",
    )


async def measure_rounds(report: Report, size: Size, rounds: int) -> dict[str, dict[str, float]]:
    """Fill, restart for each variant, and run all rounds. Returns the recall steps in ms by variant."""
    steps: dict[str, dict[str, float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with BenchServer(scratch / "data", **SETTINGS) as server:
            async with memstream.connect(server.address) as client, RecallClient(server, client, PREFIX) as recalling:
                texts = await fill_memories(client, PREFIX, [COUNT[size], SMALL])
                for _ in range(rounds):
                    await recalling.measure(report, GROWN, texts.draw_questions(QUERIES[size], 1))
                repeated = [texts.draw_question(0) for _ in range(REPEATED[size])]
                answers = await list_answers(client, repeated)
                report.add_round(TWICE, **{CHANGED: count_changed(answers, await list_answers(client, repeated))})
        vectors = texts.vectors()
        report.add_round(BYTES, **{RESIDENT: (vectors[0].nbytes + sum(map(len, texts.sentences[0]))) / COUNT[size]})
        echo = stack.enter_context(EchoServer(scratch))
        lite = await stack.enter_async_context(start_milvus_lite(scratch / "lite"))
        await lite.fill_collection(vectors)
        for variant, settings in VARIANTS.items():
            with BenchServer(scratch / "data", **SETTINGS, **settings) as server:
                async with (
                    memstream.connect(server.address) as client,
                    RecallClient(server, client, PREFIX) as recalling,
                ):
                    parts = BareParts(echo, texts, await time_activation(report, variant, server, recalling, texts))
                    if variant == IN_RAM:
                        changed = count_changed(answers, await list_answers(client, repeated))
                        report.add_round(SAME, **{CHANGED: changed})
                    for _ in range(rounds):
                        asked = texts.draw_questions(QUERIES[size], 1)
                        steps[variant] = await measure_round(report, variant, server, recalling, asked)
                        await parts.measure(report, PARTS, asked)
                        report.add_pause(ECHO, parts.longest_pause())
                        await measure_lite(report, LITE, lite, texts, asked)
    return steps


def count_changed(answers: list[list[tuple[str, float]]], others: list[list[tuple[str, float]]]) -> int:
    """How many answers differ."""
    return sum(one != other for one, other in zip(answers, others, strict=True))


async def list_answers(client: memstream.Client, questions: list[str]) -> list[list[tuple[str, float]]]:
    """Ids and scores of each answer; the questions leave no trace."""
    memory = client.memory(f"{PREFIX}-0")
    answers = [await memory.recall_once(text, now=NOW, reinforce=False) for text in questions]
    return [[(hit.fragment.id, hit.score) for hit in answer] for answer in answers]


async def time_activation(
    report: Report, variant: str, server: BenchServer, recalling: RecallClient, texts: Texts
) -> memstream.Answer:
    """Time the first answer of a restarted server."""
    _, _, waking, held = row_names(variant)
    await recalling.answer(1, texts.draw_question(1))
    await asyncio.sleep(SETTLED_S)
    before, since = server.resident_mb()[0], time.monotonic()
    began = time.perf_counter()
    answer = await recalling.answer(0, texts.draw_question(0))
    took = time.perf_counter() - began
    report.add_pause(waking, server.longest_pause(since))
    resident = (server.resident_mb()[0] - before) / len(texts.sentences[0]) * 1e6
    report.add_round(held, **{RESIDENT: resident, ACTIVATION: took * 1e3})
    return answer


async def measure_round(
    report: Report, variant: str, server: BenchServer, recalling: RecallClient, asked: list[tuple[int, str]]
) -> dict[str, float]:
    """Measure recalls, and the event loop meanwhile."""
    ours, loop, _, _ = row_names(variant)
    since = time.monotonic()
    steps = await recalling.measure(report, ours, asked)
    report.add_pause(loop, server.longest_pause(since))
    return steps


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((*COLUMNS, RESIDENT, ACTIVATION, CHANGED, *PAUSES))
    report.more["fragments"] = COUNT[size]
    report.more["steps of a recall, ms"] = asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about large memories."""
    ours, _, _, held = row_names(IN_RAM)
    suffix = f"one memory of {report.more['fragments']:,}"
    one_second = at_most(1_000, "ms")
    restarted = [
        make_claim(report, f"recall p50 after a restart, {suffix}", ours, P50, GROWN, at_most(1.2)),
        make_claim(report, f"first answer after a restart, {suffix}", held, ACTIVATION, GROWN, one_second, P50),
        make_claim(report, f"answers that a restart changes, {suffix}", SAME, CHANGED, TWICE, at_most(0, "answers")),
    ]
    return restarted + [one for variant in VARIANTS for one in make_variant_claims(report, variant)]


def make_variant_claims(report: Report, variant: str) -> list[Claim]:
    """Claims about one variant."""
    suffix = f"one memory of {report.more['fragments']:,}, {variant}"
    ours, loop, waking, held = row_names(variant)
    return [
        make_claim(report, f"recall p50, {suffix}", ours, P50, PARTS, at_most(1.5)),
        make_claim(report, f"recall p99, {suffix}", ours, P99, PARTS, at_most(2.5)),
        make_claim(report, f"recall p50 vs index search, {suffix}", ours, P50, LITE, at_most(2)),
        make_pause_claim(report, f"longest event-loop pause, {suffix}", loop, ECHO),
        make_pause_claim(report, f"longest event-loop pause during activation, {suffix}", waking, ECHO),
        make_claim(report, f"RSS per fragment, {suffix}", held, RESIDENT, BYTES),
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
