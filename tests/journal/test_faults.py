"""Acknowledged writes are kept and failed ones leave nothing: killed processes, full disks, failing commits."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event
from sqlalchemy.exc import OperationalError

from memstream_server.adapters.journal import writer
from memstream_server.adapters.journal.database import sqlite
from memstream_server.adapters.journal.store import SqlJournal, open_journal
from memstream_server.adapters.journal.writer import JointWork
from memstream_server.engine.blocks import BlockPut, Blocks
from memstream_server.engine.runtime.call_context import ACCOUNT
from memstream_server.engine.runtime.clock import Clock
from memstream_server.engine.settings import EngineLimits
from memstream_server.ports.blocks import BlockName, MemoryName
from memstream_server.ports.journal.errors import OutcomeUnknown, StaleWrite, StorageFull
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import Space
from tests.journal.samples import MODEL, Now, fragment, receipt, record, row, transition
from tests.journal.writer_process import acknowledged_until_killed, check_kept
from tests.journal.writes import WRITES, run_in_one_group, seen
from tests.support.waiting import until


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
async def journal(data_dir: Path) -> AsyncIterator[SqlJournal]:
    opened = await open_journal(data_dir, clock_us=Now(), reserve_bytes=0)
    await opened.create_memory(record(), ())
    await opened.own_memory("u1")
    await opened.open_producer("u1", 1, "p")
    yield opened
    await opened.close()


async def revision(journal: SqlJournal) -> int:
    return (await journal.load_memory("u1", MODEL, 0)).record.revision


# ---- killed


async def test_acknowledged_writes_survive_kill_9(data_dir: Path) -> None:
    for lines in (1, 40, 173):
        said = await asyncio.to_thread(acknowledged_until_killed, str(data_dir), lines)
        journal = await open_journal(data_dir, clock_us=Now(), reserve_bytes=0)
        try:
            await check_kept(journal, said)
        finally:
            await journal.close()


async def test_opening_finishes_interrupted_deletion(
    journal: SqlJournal, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await journal.commit(transition(1, rows=tuple(row(fragment(place)) for place in range(1_500))))

    async def killed(self: SqlJournal) -> None:
        """Simulates the end of the process between the deletion and the first slice."""

    with monkeypatch.context() as patch:
        patch.setattr(SqlJournal, "purge", killed)
        await journal.delete_memory("u1")
    assert await journal.get_memory("comedy", "joy") is None
    await journal.close()
    again = await open_journal(data_dir, clock_us=Now(), reserve_bytes=0)
    try:
        assert await again.outbox_size() == 1_500
    finally:
        await again.close()
    with sqlite3.connect(data_dir / "journal.db") as connection:
        for table in ("fragments", "vectors", "events", "producers", "deletions"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
    connection.close()


# ---- commits that fail


def before_statements(journal: SqlJournal, patch: pytest.MonkeyPatch, trip: Callable[[Any], None]) -> None:
    """Call `trip` with the values of each of the writer's statements before it runs, on either path."""
    run, writer = sqlite.run_statement, journal._database.writer

    def tripping(connection: Connection, text: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        if connection.engine is writer:
            trip(values)
        return run(connection, text, values)

    patch.setattr(sqlite, "run_statement", tripping)
    event.listen(writer, "before_cursor_execute", lambda *given: trip(given[3]))


async def _has_waiting_writes(journal: SqlJournal, count: int) -> bool:
    return journal._writer.waiting == count


@pytest.mark.parametrize("lost", [True, False])
async def test_failed_commit_makes_group_outcome_unknown(
    journal: SqlJournal, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    def fail(connection: Connection) -> None:
        monkeypatch.undo()
        if not lost:
            connection.commit()
        raise OperationalError("COMMIT", None, sqlite3.OperationalError("disk I/O error"))

    monkeypatch.setattr(sqlite, "commit_transaction", fail)
    results = await run_in_one_group(
        journal,
        journal.commit(transition(1, rows=(row(fragment(0)),))),
        journal.commit(transition(7)),
        journal.receive(receipt(1, 2, 1)),
    )
    assert [type(result) for result in results] == [OutcomeUnknown, StaleWrite, OutcomeUnknown]
    image = await journal.load_memory("u1", MODEL, 0)
    assert (image.record.revision, len(image.pending)) == ((1, 0) if lost else (2, 1))
    await journal.commit(transition(image.record.revision))  # the writer continues


@pytest.mark.parametrize("name", WRITES)
async def test_any_failed_statement_rolls_back_and_can_be_retried(
    journal: SqlJournal, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await journal.receive(receipt(1, 2, 0))
    await journal.commit(transition(1, rows=(row(fragment(9)),)))
    before = await seen(journal)
    statements, failing = 0, 0

    def trip(_: object) -> None:
        nonlocal statements
        statements += 1
        if statements == failing:
            raise OperationalError("?", None, sqlite3.OperationalError("disk I/O error"))

    before_statements(journal, monkeypatch, trip)
    while True:
        statements, failing = 0, failing + 1
        try:
            await WRITES[name](journal)
        except OutcomeUnknown:
            if await seen(journal) != before:
                # Only a deletion has several transactions: the first commits it, the others clean up.
                assert name == "delete"
                assert await journal.list_memories("comedy", "", 9) == []
                break
        else:
            break
    assert failing > 3, "the statements before it were really made to fail"
    assert await seen(journal) != before


async def test_broken_transaction_fails_only_one_write(journal: SqlJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    def trip(values: Any) -> None:
        if "poison" in values:
            raise OperationalError("?", None, sqlite3.OperationalError("disk I/O error"))

    before_statements(journal, monkeypatch, trip)
    results = await run_in_one_group(
        journal,
        journal.receive(receipt(1, 1, 0)),
        journal.commit(transition(1, rows=(row(fragment(1, speaker="poison")),))),
        journal.commit(transition(1, rows=(row(fragment(2)),))),
    )
    assert [type(result) for result in results] == [type(None), OutcomeUnknown, type(None)]
    image = await journal.load_memory("u1", MODEL, 0)
    assert [one.fragment.position for one in image.rows] == [2]
    assert len(image.pending) == 1


# ---- full disks


async def test_low_space_rejects_only_writes_that_add_data(data_dir: Path) -> None:
    free = 1 << 40
    journal = await open_journal(data_dir, clock_us=Now(), free_bytes=lambda: free, reserve_bytes=1 << 20)
    try:
        await journal.create_memory(record(), ())
        await journal.own_memory("u1")
        await journal.open_producer("u1", 1, "p")
        await journal.commit(transition(1, rows=(row(fragment(0)), row(fragment(1)))))
        free = 1 << 19
        results = await asyncio.gather(
            journal.receive(receipt(1, 1, 2)),
            journal.commit(transition(2, removed=(fragment(0).id,))),
            journal.commit(transition(3, rows=(row(fragment(2)),))),
            journal.create_memory(record("u2", "sad"), ()),
            journal.set_space(Space(MODEL, 4, 1)),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [StorageFull, type(None), *[StorageFull] * 3]
        assert [one.position for one in await journal.list_fragments("u1", FragmentQuery())] == [1]
        assert (await journal.own_memory("u1")).epoch == 2
        await journal.delete_memory("u1")
        free = 1 << 40
        await journal.create_memory(record(), ())
    finally:
        await journal.close()


async def _fill(journal: SqlJournal) -> int:
    """Write until the disk is full; returns the number of acknowledged fragments."""
    for stored in range(0, 20_000, 20):
        rows = tuple(row(fragment(stored + place, content="x" * 2_000)) for place in range(20))
        try:
            await journal.commit(transition(stored // 20 + 1, rows=rows))
        except StorageFull:
            return stored
    raise AssertionError("the disk was never full")


async def test_full_disk_keeps_acknowledged_writes(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_WRITER", (*sqlite._WRITER, "PRAGMA max_page_count = 120"))
    journal = await open_journal(data_dir, clock_us=Now(), reserve_bytes=0)
    try:
        await journal.create_memory(record(), ())
        await journal.own_memory("u1")
        stored = await _fill(journal)
        assert stored >= 20
        now = await revision(journal)
        big = tuple(row(fragment(stored + place, content="x" * 50_000)) for place in range(20))
        results = await asyncio.gather(
            journal.commit(transition(now, rows=big)),
            journal.commit(transition(now, removed=tuple(fragment(place).id for place in range(stored)))),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [StorageFull, type(None)]
        assert await revision(journal) == now + 1
        await journal.commit(transition(now + 1, rows=(row(fragment(stored)),)))
    finally:
        await journal.close()


async def test_removed_content_is_not_left_in_file(journal: SqlJournal, data_dir: Path) -> None:
    secret = "the combination is 4711"
    await journal.receive(receipt(1, 1, 0))
    await journal.commit(transition(1, rows=(row(fragment(0, content=secret)), row(fragment(1)))))
    await journal.commit(transition(2, removed=(fragment(0).id,)))
    await journal.close()  # the last connection checkpoints the WAL and removes it
    assert sorted(os.listdir(data_dir)) == ["format", "journal.db", "journal.db-clean", "lock"]
    kept = (data_dir / "journal.db").read_bytes()
    assert secret.encode() not in kept
    assert fragment(1).content.encode() in kept


async def test_callers_take_turns_at_the_writer(journal: SqlJournal) -> None:
    """A caller with many waiting writes delays those of others by one; the writes of a memory keep their order."""
    held, order = threading.Event(), list[str]()

    def submit(principal: str, name: str, memory: str) -> asyncio.Task[None]:
        context = contextvars.copy_context()
        context.run(ACCOUNT.set, (principal, ""))
        work = JointWork(lambda _connection, items: order.extend(items), name, memory)
        return asyncio.get_running_loop().create_task(journal._writer.submit(work, 300, True), context=context)

    holding = asyncio.create_task(journal._writer.run_exclusively(held.wait))
    await asyncio.sleep(0)
    writing = [submit("much", f"much {number}", f"memory {number}") for number in range(8)]
    writing += [submit("little", "of the memory", "memory 7"), submit("little", "of another", "other")]
    await until(lambda: _has_waiting_writes(journal, 10))
    held.set()
    await asyncio.gather(*writing, holding)
    assert order.index("of another") <= 1
    assert order.index("of the memory") == order.index("much 7") + 1
    assert [name for name in order if name.startswith("much")] == [f"much {number}" for number in range(8)]


async def test_one_caller_waits_for_few_writes_of_another(journal: SqlJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once several write, a group is 3 ms of work: here 4 writes of 50 rows."""
    monkeypatch.setattr(writer, "SEVERAL_S", 60.0)
    loop, ran, submitted = asyncio.get_running_loop(), list[str](), threading.Event()
    little: list[asyncio.Task[None]] = []

    def submit(principal: str, name: str) -> asyncio.Task[None]:
        context = contextvars.copy_context()
        context.run(ACCOUNT.set, (principal, ""))

        def work(_: Connection) -> None:
            ran.append(name)
            if name == "much 0":  # the group that has it is under way
                loop.call_soon_threadsafe(come)
                submitted.wait()

        return loop.create_task(journal._writer.submit(work, 50, True), context=context)

    def come() -> None:
        little.append(submit("little", "little"))
        loop.call_soon(submitted.set)

    await submit("little", "before")
    held = threading.Event()
    holding = asyncio.create_task(journal._writer.run_exclusively(held.wait))
    await asyncio.sleep(0)
    writing = [submit("much", f"much {number}") for number in range(40)]
    await until(lambda: _has_waiting_writes(journal, 40))
    held.set()
    await asyncio.gather(holding, *writing)
    await asyncio.gather(*little)
    assert ran.index("little") <= 1 + 4


async def test_write_that_fails_after_its_caller_left_is_quiet(journal: SqlJournal) -> None:
    warnings: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: warnings.append(context))
    blocks, release = Blocks(journal.blocks, journal, Clock(), 3_600.0, EngineLimits()), threading.Event()
    holding = asyncio.create_task(journal._writer.run_exclusively(release.wait))
    leaving = asyncio.create_task(blocks.put(BlockName(MemoryName("comedy", "gone"), "task"), BlockPut("x"), None))

    await until(lambda: _has_waiting_writes(journal, 1))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    release.set()
    await holding
    await blocks.put(BlockName(MemoryName("comedy", "joy"), "task"), BlockPut("written after it"), None)
    del leaving
    gc.collect()
    assert not warnings
