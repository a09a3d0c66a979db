"""Which writes share a transaction, by what they are expected to take; no clock decides here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection

from memstream_server.adapters.journal import writer as writer_module
from memstream_server.adapters.journal.database import sqlite
from memstream_server.adapters.journal.database.directory import open_database
from memstream_server.adapters.journal.writer import ROW_COST_S, Writer
from memstream_server.engine.runtime.call_context import ACCOUNT

ENDLESS_S = 3_600.0
LONG = round(0.1 / ROW_COST_S)
"""Rows of a write that is expected to take 0.1 s."""


class Groups:
    """The writer of a journal that is held by a first write until `release`, and the groups after that one."""

    def __init__(self, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._writer = writer
        self._gate, self.made, self._present = threading.Event(), list[list[str]](), list[str]()
        self._begun = threading.Event()
        self._writes: list[asyncio.Task[None]] = []
        self._alone: list[asyncio.Task[None]] = []
        commit = sqlite.commit_transaction

        def record_commit(connection: Connection) -> None:
            self.made.append(self._present)
            self._present = []
            commit(connection)

        monkeypatch.setattr(sqlite, "commit_transaction", record_commit)

    async def hold(self) -> None:
        """Returns once the writer is held."""

        def wait() -> None:
            self._begun.set()
            self._gate.wait()

        self.submit("gate", 1, wait)
        await asyncio.to_thread(self._begun.wait)

    def submit(self, principal: str, rows: int, work: Callable[[], None] = lambda: None) -> None:
        """A write of a principal. Writes are queued in the order of these calls."""

        def run(_: Connection) -> None:
            self._present.append(principal)
            work()

        async def write() -> None:
            ACCOUNT.set((principal, "namespace"))
            await self._writer.submit(run, rows, True)

        self._writes.append(asyncio.create_task(write()))

    def run_alone(self) -> None:
        """An exclusive work, which counts as a group of its own."""
        self._alone.append(asyncio.create_task(self._writer.run_exclusively(lambda: self.made.append(["alone"]))))

    async def release(self) -> list[list[str]]:
        """The principals of the writes of each later group."""
        await asyncio.sleep(0)  # each task submits its write in its first step
        assert self._writer.waiting == len(self._writes) - 1
        self._gate.set()
        await asyncio.gather(*self._writes, *self._alone)
        return self.made[1:]


@pytest.fixture
async def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Groups]:
    monkeypatch.setattr(writer_module, "SEVERAL_S", ENDLESS_S)
    monkeypatch.setattr(writer_module, "GROUP_S", 0.25)  # of a lone caller; a commit counts as at most this long, too
    database = open_database(tmp_path, readers=1, free_bytes=None, reserve_bytes=0)
    writer = Writer(database, asyncio.get_running_loop())
    made = Groups(writer, monkeypatch)
    await made.hold()
    try:
        yield made
    finally:
        await writer.close()
        database.close()


async def test_small_write_passes_the_large_ones_of_another_caller(groups: Groups) -> None:
    for _ in range(3):
        groups.submit("large", LONG)
    groups.submit("small", 1)
    assert await groups.release() == [["large"], ["small"], ["large"], ["large"]]


async def test_long_write_shares_a_transaction_with_no_other(groups: Groups) -> None:
    for principal in ("a", "b", "c"):
        groups.submit(principal, LONG)
    assert await groups.release() == [["a"], ["b"], ["c"]]


async def test_one_of_several_callers_has_a_share_of_each_group(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "SHARED_S", ENDLESS_S)
    monkeypatch.setattr(writer_module, "EACH_S", 0.35)
    for _ in range(4):
        groups.submit("busy", LONG)
    groups.submit("small", 1)
    first, *others = await groups.release()
    assert sorted(first) == ["busy", "busy", "busy", "small"]
    assert others == [["busy"]]


async def test_small_writes_of_all_callers_share_a_transaction(groups: Groups) -> None:
    for principal in ("a", "b", "a", "c"):
        groups.submit(principal, 1)
    assert [sorted(each) for each in await groups.release()] == [["a", "a", "b", "c"]]


async def test_exclusive_work_waits_for_no_waiting_write(groups: Groups) -> None:
    """Else a later write of another caller waits for all writes that are before the exclusive work."""
    for _ in range(3):
        groups.submit("large", LONG)
    groups.run_alone()
    groups.submit("small", 1)
    assert await groups.release() == [["alone"], ["large"], ["small"], ["large"], ["large"]]
