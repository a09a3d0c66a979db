"""Where the server's CPU goes, step by step: microseconds an observation and a recall.

    python benchmarks/budget.py PY_SPY [--full | --tiny]

PY_SPY is the program of that name (`pip install py-spy`, in any environment). It samples the server's threads that run,
while one stream floods one memory and while a hundred memories are asked one question after another. Each sample counts
for the first step of the table that its stack passes through; the shares are multiplied with the CPU that the system
says the server used. Sampling costs some of it, and a thread that waits for a core counts as one that runs: the figures
are for comparing steps, not runs.
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

from bench_observe import COUNT, Material, observe
from recalls import Recalling, fill
from report import Size, machine, options, told
from served import Served

import memstream

RATE = 250
"""Samples a second."""
MEMORIES, EACH = 100, 100
QUERIES = {Size.TINY: 20, Size.SHORT: 3_000, Size.FULL: 20_000}
STEPS = (
    ("garbage collection", ("<gc>", "gc_collect")),
    ("probe of these benchmarks", ("_tick (",)),
    ("journal: bind and insert rows", ("journal/bulk.py", "journal/prepared.py")),
    ("journal: encode rows", ("journal/codec.py",)),
    ("journal: transactions, fsync", ("journal/writer.py", "journal/writes.py", "journal/transition.py")),
    (
        "journal: read rows",
        ("journal/reads.py", "journal/selecting.py", "journal/outbox.py", "journal/store.py", "journal/image.py"),
    ),
    ("embed (hashing)", ("models/hashing.py",)),
    ("tokenise, stem", ("models/analyzer.py", "models/words.py")),
    ("write-behind to Milvus", ("engine/indexing.py", "milvus/", "pymilvus/")),
    ("decide (tiers)", ("core/tiers.py", "core/enhancement.py", "engine/decision.py", "core/transition.py")),
    ("working set after the commit", ("engine/working_set.py",)),
    ("rank: BM25, both legs", ("core/lexical.py", "core/postings.py", "core/neighbours.py")),
    ("rank: dense", ("core/dense.py",)),
    ("rank: the rest", ("core/ranking.py", "core/columns.py", "core/filters.py", "core/speakers.py")),
    ("budget of tokens", ("core/budget.py",)),
    ("reinforce", ("engine/reinforcing.py",)),
    ("messages to values and back", ("rpc/wire/", "rpc/validation.py")),
    ("receive: numbers, ids, order", ("engine/receiving.py", "engine/producers.py", "engine/intake.py")),
    ("recall: the rest", ("engine/recalling.py", "engine/contents.py")),
    ("gather, actor, turns", ("engine/",)),
    ("streams, interceptors", ("rpc/",)),
    ("event loop: turns", ("asyncio/",)),
)
"""Name of a step, and what its stacks go through. In order: the first that fits counts."""
COMPILED = ("gRPC and other compiled code", "Handle._run (")
"""A stack that ends in the event loop's call of something is in compiled code, which has no frames of its own."""
WAITING = ("EpollSelector.select (", "_worker (")
"""A stack that ends there waits, at most for a core."""
OTHER = "everything else"


def step_of(stack: str) -> str | None:
    """Of one of py-spy's lines, without its count; None where it only waits."""
    innermost = stack.rpartition(";")[2]
    if innermost.startswith(WAITING):
        return None
    if innermost.startswith(COMPILED[1]):
        return COMPILED[0]
    return next((step for step, marks in STEPS if any(mark in stack for mark in marks)), OTHER)


@contextlib.asynccontextmanager
async def sampled(py_spy: str, server: Served, found: Counter[str]) -> AsyncIterator[None]:
    """Counts samples by step while the block runs."""
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
            process.send_signal(signal.SIGINT)  # it writes what it has
            await process.wait()
        for line in file.read_text("utf-8", "replace").splitlines():
            stack, _, count = line.rpartition(" ")
            if (step := step_of(stack)) is not None:
                found[step] += int(count)


def show(what: str, found: Counter[str], cpu_s: float, operations: int) -> None:
    """A table, the greatest first."""
    each, samples = cpu_s / operations * 1e6, found.total()
    print(f"\n{what}: {each:,.0f} µs of the server's CPU each\n\n| step | µs | share |\n|---|---|---|")
    for step, count in found.most_common():
        print(f"| {step} | {each * count / samples:,.0f} | {count / samples:.1%} |")


async def measure(py_spy: str, size: Size) -> None:
    """Both loops."""
    material = Material.of(COUNT[size])
    with tempfile.TemporaryDirectory() as directory, Served(Path(directory) / "data") as server:
        await observe(server, [material.observations[:500]], "warm")
        found: Counter[str] = Counter()
        async with sampled(py_spy, server, found):
            used = (await observe(server, [material.observations], "flood")).server.server
        show(f"{COUNT[size]:,} observations on one stream, until they are indexed", found, used, COUNT[size])
        async with memstream.connect(server.address) as client:
            texts = await fill(client, "budget/agent", [EACH] * MEMORIES)
            async with Recalling(server, client, "budget/agent") as recalling:
                await recalling.ask([(place, texts.question(place)) for place in range(MEMORIES)])
                questions, found = texts.questions(QUERIES[size]), Counter()
                async with sampled(py_spy, server, found):
                    before, began = server.cpu(), time.perf_counter()
                    await recalling.ask(questions)
                    took, used = time.perf_counter() - began, server.cpu().since(before).server
        show(f"{QUERIES[size]:,} recalls, {took / QUERIES[size] * 1e3:.1f} ms each", found, used, QUERIES[size])


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("py_spy", metavar="PY_SPY", help="the program")
    given = parser.parse_args()
    print(told(machine()))
    asyncio.run(measure(given.py_spy, given.size))


if __name__ == "__main__":
    main()
