"""A process that writes until it is killed and prints what was acknowledged: run as `python -m ... PLACE`.

PLACE is a data directory or the URL of a database.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from memstream_server.adapters.journal.store import open_journal
from memstream_server.ports.journal.port import Journal
from tests.journal.samples import MODEL, Now, fragment, receipt, record, row, transition
from tests.support.processes import run_process

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


async def main(place: str) -> None:
    url = place if "://" in place else ""
    journal = await open_journal(Path(place), url=url, clock_us=Now(), reserve_bytes=0)
    if await journal.get_memory("comedy", "joy") is None:
        await journal.create_memory(record(), ())
        await journal.own_memory("u1")
        await journal.open_producer("u1", 1, "p")
    image = await journal.load_memory("u1", MODEL, 0)
    await asyncio.gather(receive(journal, image.producers[0].received + 1), store(journal, image.record.revision))


def acknowledged_until_killed(place: str, lines: int) -> dict[str, int]:
    """Run a writer, read its acknowledgements, kill it after that many lines, and read the rest."""
    command = [sys.executable, "-m", "tests.journal.writer_process", place]
    with run_process(command) as process:
        assert process.stdout is not None
        acknowledged = dict.fromkeys(("received", "revision"), 0)
        for number, line in enumerate(process.stdout):
            what, value = line.split()
            acknowledged[what] = int(value)
            if number == lines:
                process.kill()
    return acknowledged


async def check_kept(journal: Journal, said: dict[str, int]) -> None:
    """Check that every write acknowledged so far exists, complete and once."""
    image = await journal.load_memory("u1", MODEL, 10_000)
    (producer,) = image.producers
    assert producer.received >= said["received"]
    assert producer.received % BATCH == 0, "a batch is received whole or not at all"
    sequences = [number for one in image.pending for number in one.sequences]
    assert sequences == list(range(1, producer.received + 1))
    hashes = await journal.received_hashes("u1", "p", 1, producer.received)
    assert [number for number, _, _ in hashes] == sequences
    assert image.record.revision >= said["revision"]
    assert [one.fragment.position for one in image.rows] == list(range(1, image.record.revision))
    assert all(one.vector for one in image.rows)
    assert len(await journal.list_events("u1", 0, 100_000)) == image.record.revision


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
