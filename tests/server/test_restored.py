"""A server restored from an older backup: a client that is ahead of it is notified, and can continue without a gap."""

from __future__ import annotations

from pathlib import Path

import pytest

import memstream
from memstream import Cursor, Memory
from tests.cli.commands import run
from tests.server.conftest import MakeServer, started
from tests.server.listing import contents, history, refusal_of_revision
from tests.server.producing import PATIENT
from tests.support.journals import only_sqlite
from tests.support.server import ServerProcess, free_address

SOURCE = [f"line {number}" for number in range(1, 13)]
"""The producer's source, which can be read again."""
SAVED, SAID = 4, 9
"""Lines in the backup, and lines sent before the restore."""


async def observed_and_restored(server: ServerProcess, memory: Memory, file: Path) -> tuple[Cursor, Cursor]:
    """Sends 9 lines, of which 4 are in the backup that is then restored; cursors from before and after the backup."""
    await memory.observe_batch(SOURCE[:SAVED], producer="joy", first_sequence=1)
    saved = (await history(memory))[-1].cursor
    assert run("backup", str(file), "--data", str(server.data_dir)).returncode == 0
    await memory.observe_batch(SOURCE[SAVED:SAID], producer="joy", first_sequence=SAVED + 1)
    ahead = (await history(memory))[-1].cursor
    await restored(server, file)
    return saved, ahead


async def restored(server: ServerProcess, file: Path) -> None:
    server.kill()
    assert run("restore", str(file), "--data", str(server.data_dir), "--force").returncode == 0
    await started(server)


@only_sqlite("`restore` is for a data directory; for a database it is pg_restore")
async def test_producer_ahead_gets_both_numbers_and_continues(make_server: MakeServer, tmp_path: Path) -> None:
    server = await started(make_server(listen=free_address()))
    async with memstream.connect(server.address, retry=PATIENT) as client:
        memory = await client.create_memory("restored/joy", kind=memstream.MemoryKind.LONG_TERM)
        stream = memory.observe("joy")
        await stream.__aenter__()
        for line in SOURCE[:SAVED]:
            await stream.send(line)
        await stream.flush()
        file = tmp_path / "monday.memstream"
        assert run("backup", str(file), "--data", str(server.data_dir)).returncode == 0
        for line in SOURCE[SAVED:SAID]:
            await stream.send(line)
        await stream.flush()
        await restored(server, file)
        waiting = await stream.send(SOURCE[SAID])
        with pytest.raises(memstream.ServerBehind, match=r"expects observation 5 .* acknowledged 9") as raised:
            await waiting
        assert (raised.value.expected_sequence, raised.value.acknowledged) == (SAVED + 1, SAID)
        with pytest.raises(memstream.ServerBehind):
            await stream.close()
        assert await contents(memory) == SOURCE[:SAVED]  # nothing was accepted after a gap
        async with memory.observe("joy") as again:
            assert again.expected_sequence == raised.value.expected_sequence
            for line in SOURCE[again.expected_sequence - 1 :]:
                await again.send(line)
        assert await contents(memory) == SOURCE


@only_sqlite("`restore` is for a data directory; for a database it is pg_restore")
async def test_batch_ahead_is_refused_with_expected_number(make_server: MakeServer, tmp_path: Path) -> None:
    server = await started(make_server(listen=free_address()))
    async with memstream.connect(server.address, retry=PATIENT) as client:
        memory = await client.create_memory("restored/joy", kind=memstream.MemoryKind.LONG_TERM)
        await observed_and_restored(server, memory, tmp_path / "monday.memstream")
        with pytest.raises(memstream.SequenceGap, match="starts at 10, expected 5") as raised:
            await memory.observe_batch(SOURCE[SAID:], producer="joy", first_sequence=SAID + 1)
        assert raised.value.details["expected_sequence"] == str(SAVED + 1)
        await memory.observe_batch(SOURCE[SAVED:], producer="joy", first_sequence=SAVED + 1)
        assert await contents(memory) == SOURCE


@only_sqlite("`restore` is for a data directory; for a database it is pg_restore")
async def test_cursors_from_before_a_restore_are_void(make_server: MakeServer, tmp_path: Path) -> None:
    """Revisions are reused after a restore: an old cursor would skip their new contents."""
    server = await started(make_server(listen=free_address()))
    async with memstream.connect(server.address, retry=PATIENT) as client:
        memory = await client.create_memory("restored/joy", kind=memstream.MemoryKind.LONG_TERM)
        before = await observed_and_restored(server, memory, tmp_path / "monday.memstream")
        for _ in range(2):
            for cursor in before:
                with pytest.raises(memstream.CursorVoid, match="restored from a backup"):
                    await anext(memory.watch(cursor))
            for line in SOURCE:  # now the revisions of the cursors are passed
                await memory.observe_batch([line])  # each a repeat, or missing in the backup
        listing = memory.list_fragments()
        assert len([one async for one in listing]) == len(SOURCE)
        assert listing.cursor is not None
        watch = memory.watch(listing.cursor)
        await memory.observe_batch(["from here on"])
        assert (await anext(watch)).cursor.revision == listing.cursor.revision + 1
        assert "behind the 5000 asked for" in str(await refusal_of_revision(memory, "line", 5_000))


async def test_cursor_ahead_or_of_another_memory_is_void(client: memstream.Client, path: str) -> None:
    memory, other = await client.create_memory(path), await client.create_memory(f"{path}-other")
    here = await memory.describe()
    with pytest.raises(memstream.CursorVoid, match="at revision 99, the memory at 1"):
        await anext(memory.watch(Cursor(here.uid, 99)))
    with pytest.raises(memstream.CursorVoid):
        await anext(memory.watch(Cursor((await other.describe()).uid, 0)))
    with pytest.raises(memstream.CursorVoid):
        await anext(memory.watch(Cursor("NOBODY", 0)))
    assert (await memory.describe()).revision == here.revision


async def test_cursors_of_a_recreated_name_are_void(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await memory.observe_batch(["before"])
    old = await memory.describe()
    await memory.delete()
    memory = await client.create_memory(path)
    await memory.observe_batch(["after", "and after"])
    for revision in (0, 1, old.revision):
        with pytest.raises(memstream.CursorVoid):
            await anext(memory.watch(Cursor(old.uid, revision)))
    assert [event.cursor.memory_uid for event in await history(memory)].count(old.uid) == 0


async def test_foreign_producer_changes_nothing(client: memstream.Client, path: str) -> None:
    """Two processes under one name: the second ends the first, and other texts under used numbers are refused."""
    memory = await client.create_memory(path, kind=memstream.MemoryKind.LONG_TERM)
    await memory.observe_batch(["mine"], producer="joy", first_sequence=1)
    before = (await memory.describe()).revision
    with pytest.raises(memstream.SequenceConflict):
        await memory.observe_batch(["foreign"], producer="joy", first_sequence=1)
    with pytest.raises(memstream.SequenceGap):
        await memory.observe_batch(["foreign"], producer="joy", first_sequence=3)
    assert ((await memory.describe()).revision, await contents(memory)) == (before, ["mine"])
