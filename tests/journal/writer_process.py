"""A process that writes until it is killed, saying what was acknowledged: run as `python -m ... DIRECTORY`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from memstream_server.adapters.journal import open_journal
from memstream_server.ports.journal import Journal
from tests.journal.conformance import MODEL, Now, fragment, receipt, record, row, transition

BATCH = 5


async def receive(journal: Journal, first: int) -> None:
    while True:
        batch = replace(receipt(first, BATCH, 1_000_000 + first), producer_epoch=1)
        await journal.receive(batch)
        first += BATCH
        sys.stdout.write(f"received {first - 1}\n")
        sys.stdout.flush()


async def store(journal: Journal, revision: int) -> None:
    while True:
        await journal.commit(transition(revision, rows=(row(fragment(revision)),)))
        revision += 1
        sys.stdout.write(f"revision {revision}\n")
        sys.stdout.flush()


async def main(data_dir: Path) -> None:
    journal = await open_journal(data_dir, clock_us=Now(), reserve_bytes=0)
    if await journal.get_memory("comedy", "joy") is None:
        await journal.create_memory(record(), ())
        await journal.own("u1")
        await journal.open_producer("u1", 1, "p")
    image = await journal.load("u1", MODEL, 0)
    await asyncio.gather(receive(journal, image.producers[0].received + 1), store(journal, image.record.revision))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
