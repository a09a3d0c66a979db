"""Bytes on disk per fragment, by table, after a checkpoint: the share of each part in the pages of the database.

    python benchmarks/bench_disk.py [--full | --tiny] [--rounds N] [--json FILE]

Two shapes, one large memory and many of 12 fragments, each without a model (hashing) and with one of 384 dimensions,
whose vectors an endpoint gives. Pages are counted as SQLite's `dbstat` has them, with what is free in them. The other
side is the text itself. The command exits with 1 if a claim misses its aim.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import tempfile
from pathlib import Path

from claims import Claim, at_most, make_claim, run_standalone
from endpoint import MODEL, run_endpoint
from report import Report, Size
from served import BenchServer
from texts import SentenceSource

import memstream

SMALL = 12
"""Fragments of a small memory: those of a new user."""
LARGE = {Size.TINY: 200, Size.SHORT: 10_000, Size.FULL: 100_000}
MANY = {Size.TINY: 10, Size.SHORT: 1_000, Size.FULL: 10_000}
BATCH = 500
AT_ONCE = 16
WORDS_MAX = 12
"""Words of a text: 40 to 90 characters with its sentence."""
BYTES = "bytes"
TEXT = "the text"
PARTS = {
    "vectors": ("vectors", "sqlite_autoindex_vectors_1"),
    "anchors": ("anchors", "sqlite_autoindex_anchors_1"),
    "fragments": ("fragments", "fragments_id", "fragments_external_id", "fragments_due", "fragments_forgotten"),
    "events": ("events",),
}
"""Tables with their indexes; all other tables are "other"."""
ALL, OTHER = "all", "other"
AIMS = {"hashing": 1_000, "model": 2_000}
"""Bytes per fragment of one large memory."""
SMALL_AIMS = {"hashing": 1_500, "model": 3_000}
"""The same for memories of 12, of which 10 fragments are held, and each has rows of its own in other tables."""


def make_texts(count: int) -> list[memstream.Observation]:
    """Observations of 40 to 90 characters."""
    made = SentenceSource().make_observations(count)
    return [memstream.Observation(" ".join(str(one.body).split()[:WORDS_MAX]), speaker=one.speaker) for one in made]


async def fill_large(client: memstream.Client, count: int) -> list[memstream.Observation]:
    """One memory."""
    memory = await client.create_memory("disk/large")
    texts = make_texts(count)
    for start in range(0, count, BATCH):
        await memory.observe_batch(texts[start : start + BATCH])
    return texts


async def fill_many(client: memstream.Client, count: int) -> list[memstream.Observation]:
    """Memories of SMALL fragments, one turn of three at a time in turn."""
    texts, room = make_texts(count * SMALL), asyncio.Semaphore(AT_ONCE)

    async def fill_one(place: int) -> None:
        async with room:
            memory = await client.create_memory(f"disk/user-{place}")
            for start in range(place * SMALL, (place + 1) * SMALL, 3):
                await memory.observe_batch(texts[start : start + 3])

    await asyncio.gather(*(fill_one(place) for place in range(count)))
    return texts


def measure_parts(journal: Path) -> dict[str, int]:
    """Bytes of the pages of each part, free space in them included."""
    with contextlib.closing(sqlite3.connect(journal)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        sizes = dict(database.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name"))
    found = {part: sum(sizes.pop(name, 0) for name in names) for part, names in PARTS.items()}
    return found | {OTHER: sum(sizes.values())}


async def measure_shape(report: Report, scratch: Path, shape: str, kind: str, count: int, **settings: str) -> None:
    """Fill a server, stop it, and count its pages."""
    data = scratch / f"{shape}-{kind}"
    with BenchServer(data, probed=False, **settings) as server:
        async with memstream.connect(server.address) as client:
            texts = await (fill_large if shape == "large" else fill_many)(client, count)
    parts = measure_parts(data / "journal.db")
    fragments = len(texts)
    for part, size in (parts | {ALL: sum(parts.values())}).items():
        report.add_round(f"{shape}, {kind}: {part}", **{BYTES: size / fragments})
    report.add_round(f"{shape}, {kind}: {TEXT}", **{BYTES: sum(len(str(one.body)) for one in texts) / fragments})


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """Measure both shapes with both embedders."""
    with run_endpoint() as url:
        model = {"embedding": "openai", "embedding_model": MODEL, "embedding_base_url": url}
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as directory:
                for shape, counts in (("large", LARGE), ("small", MANY)):
                    await measure_shape(report, Path(directory), shape, "hashing", counts[size])
                    await measure_shape(report, Path(directory), shape, "model", counts[size], **model)


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((BYTES,))
    report.more["fragments"] = LARGE[size]
    asyncio.run(measure_rounds(report, size, rounds or 1))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about the journal's size."""
    found = []
    for shape, aims in (("large", AIMS), ("small", SMALL_AIMS)):
        for kind, aim in aims.items():
            row = f"{shape}, {kind}: {ALL}"
            name = f"bytes on disk per fragment, {row.removesuffix(f': {ALL}')}"
            bound = at_most(aim, BYTES) if report.more["fragments"] > LARGE[Size.TINY] else None
            found.append(make_claim(report, name, row, BYTES, f"{shape}, {kind}: {TEXT}", bound))
    return found


if __name__ == "__main__":
    done = run_standalone(__doc__, run_benchmark, make_claims)
    sys.exit(any(claim.met == "no" for claim in make_claims(done)))
