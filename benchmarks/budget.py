"""Server CPU by step: microseconds per observation and per recall.

    python benchmarks/budget.py PY_SPY [--full | --tiny]

PY_SPY is the program of that name (`pip install py-spy`, in any environment). It samples the server's running threads
while one stream writes into one memory at full speed, and while a hundred memories serve one recall after another. Each
sample counts for the first step of the table that its stack passes through; the shares are multiplied by the CPU that
the system reports for the server. Sampling itself costs CPU, and a thread that waits for a core counts as running: use
the figures to compare steps, not runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from bench_observe import COUNT, Material, observe_round
from recalls import RecallClient, fill_memories
from report import Size, describe_machine, format_machine, make_parser
from served import BenchServer

import memstream

RATE = 250
"""Samples per second."""
MEMORIES, EACH = 100, 100
QUERIES = {Size.TINY: 20, Size.SHORT: 3_000, Size.FULL: 20_000}
STEPS = (
    ("garbage collection", ("<gc>", "gc_collect")),
    ("benchmark probe", ("_tick (",)),
    ("journal: bind and insert rows", ("journal/bulk.py", "journal/prepared.py")),
    ("journal: encode rows", ("journal/codec.py",)),
    ("journal: transactions, fsync", ("journal/writer.py", "journal/writes.py", "journal/transition.py")),
    (
        "journal: read rows",
        ("journal/reads.py", "journal/selecting.py", "journal/outbox.py", "journal/store.py", "journal/image.py"),
    ),
    ("embed (hashing)", ("models/hashing.py",)),
    ("tokenise, stem", ("models/analyzer.py", "models/words.py")),
    ("write-behind to Milvus", ("engine/background/indexer.py", "milvus/", "pymilvus/")),
    ("decide (tiers)", ("core/tiers.py", "core/enhancement.py", "engine/memory/decision.py", "core/transition.py")),
    ("working set after the commit", ("engine/memory/working_set.py",)),
    ("rank: BM25, both legs", ("core/lexical.py", "core/postings.py", "core/neighbours.py")),
    ("rank: dense", ("core/dense.py",)),
    ("rank: other", ("core/ranking.py", "core/columns.py", "core/filters.py", "core/speakers.py")),
    ("budget of tokens", ("core/budget.py",)),
    ("reinforce", ("engine/recall/reinforcement.py",)),
    ("messages to values and back", ("rpc/wire/", "rpc/validation.py")),
    (
        "receive: numbers, ids, order",
        ("engine/memory/ingest.py", "engine/memory/producers.py", "engine/memory/receipts.py"),
    ),
    ("recall: other", ("engine/recall/recall.py", "engine/memory/fragment_cache.py")),
    ("enrichment, actor", ("engine/",)),
    ("streams, interceptors", ("rpc/",)),
    ("event loop", ("asyncio/",)),
)
"""(step, stack marks). The first step with a matching mark counts."""
COMPILED = ("gRPC and other compiled code", "Handle._run (")
"""A stack that ends in the event loop's callback is in compiled code, which has no frames of its own."""
WAITING = ("EpollSelector.select (", "_worker (")
"""A stack that ends here is waiting, at most for a core."""
OTHER = "everything else"


def classify_stack(stack: str) -> str | None:
    """The step of one py-spy line without its count; None if it only waits."""
    innermost = stack.rpartition(";")[2]
    if innermost.startswith(WAITING):
        return None
    if innermost.startswith(COMPILED[1]):
        return COMPILED[0]
    return next((step for step, marks in STEPS if any(mark in stack for mark in marks)), OTHER)


@contextlib.asynccontextmanager
async def sample_server(py_spy: str, server: BenchServer, found: Counter[str]) -> AsyncIterator[None]:
    """Count samples by step while the block runs."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "stacks"
        command = [py_spy, "record", "--format", "raw", "--full-filenames", "--nonblocking", "--rate", str(RATE)]
        command += ["--output", str(file), "--pid", str(server.pid), "--duration", "100000"]
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*command, stdout=null, stderr=null)
        await asyncio.sleep(1.0)
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)  # makes it write its samples
            await process.wait()
        for line in file.read_text("utf-8", "replace").splitlines():
            stack, _, count = line.rpartition(" ")
            if (step := classify_stack(stack)) is not None:
                found[step] += int(count)


def print_table(what: str, found: Counter[str], cpu_s: float, operations: int) -> None:
    """Print the steps, largest first."""
    each, samples = cpu_s / operations * 1e6, found.total()
    print(f"\n{what}: {each:,.0f} µs of server CPU each\n\n| step | µs | share |\n|---|---|---|")
    for step, count in found.most_common():
        print(f"| {step} | {each * count / samples:,.0f} | {count / samples:.1%} |")


async def measure_budget(py_spy: str, size: Size) -> None:
    """Measure observations, then recalls."""
    material = Material.make(COUNT[size])
    with tempfile.TemporaryDirectory() as directory, BenchServer(Path(directory) / "data") as server:
        await observe_round(server, [material.observations[:500]], "warm")
        found: Counter[str] = Counter()
        async with sample_server(py_spy, server, found):
            used = (await observe_round(server, [material.observations], "flood")).server.server
        print_table(f"{COUNT[size]:,} observations on one stream, until they are indexed", found, used, COUNT[size])
        async with memstream.connect(server.address) as client:
            texts = await fill_memories(client, "budget/agent", [EACH] * MEMORIES)
            async with RecallClient(server, client, "budget/agent") as recalling:
                await recalling.ask([(place, texts.draw_question(place)) for place in range(MEMORIES)])
                questions, found = texts.draw_questions(QUERIES[size]), Counter()
                async with sample_server(py_spy, server, found):
                    before, began = server.cpu_used(), time.perf_counter()
                    await recalling.ask(questions)
                    took, used = time.perf_counter() - began, server.cpu_used().since(before).server
        print_table(f"{QUERIES[size]:,} recalls, {took / QUERIES[size] * 1e3:.1f} ms each", found, used, QUERIES[size])


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("py_spy", metavar="PY_SPY", help="path of py-spy")
    arguments = parser.parse_args()
    print(format_machine(describe_machine()))
    asyncio.run(measure_budget(arguments.py_spy, arguments.size))


if __name__ == "__main__":
    main()
