"""The operation runner on a real journal: turns, progress, cancelling, failures, and continuing after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from memstream_server.engine.errors import (
    AlreadyAnswered,
    JournalUnavailable,
    MemoryNotFound,
    ModelDown,
    OperationNotFound,
    OwnedElsewhere,
)
from memstream_server.engine.operations import runner as module
from memstream_server.engine.operations.runner import OperationCancelled, OperationRunner, Progress, Work
from memstream_server.engine.runtime.clock import Clock, Ids
from memstream_server.engine.runtime.ownership import Ownership
from memstream_server.engine.settings import LeaseTimes
from memstream_server.ports.journal.errors import OutcomeUnknown
from memstream_server.ports.journal.records import Answer
from memstream_server.ports.operations import Operation, Operations, OperationState
from memstream_server.rpc.errors import failure_of
from tests.support import journals
from tests.support.waiting import until

CLOCK = Clock()


class Runner(OperationRunner):
    """The runner of the product, with public names for what tests read."""

    @property
    def store(self) -> Operations:
        """Where the operations are."""
        return self._store

    @property
    def ownership(self) -> Ownership:
        """Which operations are this process's."""
        return self._ownership

    @property
    def live(self) -> Collection[str]:
        """The ids of operations that run here."""
        return self._live

    def begin_task(self, operation: Operation) -> None:
        """Run an operation that was claimed."""
        self._begin_task(operation)


@asynccontextmanager
async def runner(data: Path, work: Work, *, clock: Clock = CLOCK, **how: bool | int) -> AsyncIterator[Runner]:
    """A runner of one type, "t", on the journal of `data`; what it had not done is left at the end."""
    journal = await journals.open_test_journal(data, clock.now_us)
    alone = Ownership(None, journal, clock, LeaseTimes())
    made = Runner(journal.operations, clock, Ids(clock), failure_of, alone)
    made.register_type("t", "things", work, **how)  # type: ignore[arg-type]  # at_once and in_turn
    await made.resume()
    try:
        yield made
    finally:
        await made.stop()
        await journal.close()


class Gate:
    """Work that records its start and waits until the test opens it."""

    def __init__(self) -> None:
        self.working: list[str] = []
        self.most = 0
        self.open = asyncio.Event()

    async def __call__(self, operation: Operation, progress: Progress) -> None:
        self.working.append(operation.memory)
        self.most = max(self.most, len(self.working))
        await self.open.wait()
        await progress.report_done(1, 1)
        self.working.remove(operation.memory)

    async def begun(self, count: int) -> None:
        async def look() -> bool:
            return len(self.working) == count

        await until(look)


async def test_an_operation_succeeds_and_reports_progress(tmp_path: Path) -> None:
    seen = asyncio.Event()

    async def work(operation: Operation, progress: Progress) -> None:
        await progress.report_done(3, 10)
        await seen.wait()
        await progress.report_done(10, 10)

    async with runner(tmp_path, work) as runs:
        started = await runs.start("t", "ns", "joy", "{}")
        assert (started.state, started.unit, started.memory) == (OperationState.QUEUED, "things", "joy")

        async def under_way() -> bool:
            return (await runs.get(started.id)).done == 3

        await until(under_way)
        assert (await runs.list_page("ns", "joy", "", 5))[0].done == 3
        seen.set()
        ended = await runs.wait_for_end(started.id)
        assert (ended.state, ended.done, ended.total, ended.error) == (OperationState.SUCCEEDED, 10, 10, None)
        assert ended.end_time_us >= ended.create_time_us > 0
        assert await runs.get(started.id) == ended


async def test_operations_run_serially_per_memory_and_in_parallel(tmp_path: Path) -> None:
    gate = Gate()
    async with runner(tmp_path, gate, at_once=2) as runs:
        started = [await runs.start("t", "ns", name, "") for name in ("a", "a", "b", "c")]
        await gate.begun(2)
        assert sorted(gate.working) == ["a", "b"]
        states = [(await runs.get(each.id)).state.value for each in started]
        assert states == ["running", "queued", "running", "queued"]
        gate.open.set()
        for each in started:
            assert (await runs.wait_for_end(each.id)).state is OperationState.SUCCEEDED
        assert gate.most == 2


async def test_queued_work_is_cancelled_at_once_running_work_later(tmp_path: Path) -> None:
    gate = Gate()
    async with runner(tmp_path, gate) as runs:
        first, second = [await runs.start("t", "ns", "a", "") for _ in range(2)]
        await gate.begun(1)
        assert (await runs.cancel(second.id)).state is OperationState.CANCELLED
        asked = await runs.cancel(first.id)
        assert (asked.state, asked.cancel_asked) == (OperationState.RUNNING, True)
        gate.open.set()
        ended = await runs.wait_for_end(first.id)
        assert (ended.state, ended.done) == (OperationState.CANCELLED, 1)
        assert await runs.cancel(first.id) == ended
        with pytest.raises(OperationNotFound):
            await runs.cancel("01J00000000000000000000000")


async def test_an_operation_that_just_began_is_cancelled(tmp_path: Path) -> None:
    gate = Gate()
    async with runner(tmp_path, gate) as runs:
        waiting = Operation("01J00000000000000000000000", "t", "ns", "a", "", process=0)
        await runs.store.create(waiting)
        ask_cancel = runs.store.ask_cancel

        async def asked(id: str) -> Operation | None:
            found = await ask_cancel(id)
            runs.begin_task(waiting)  # claimed meanwhile, and its task has not run its first step
            return found

        runs.store.ask_cancel = asked  # type: ignore[method-assign]  # for this one
        async with asyncio.timeout(60):
            assert (await runs.cancel(waiting.id)).state is OperationState.CANCELLED


async def test_cancelling_begun_work_runs_its_undo_even_while_queued(
    tmp_path: Path,
) -> None:
    undone: list[str] = []
    gate = Gate()

    async def work(operation: Operation, progress: Progress) -> None:
        try:
            await progress.check_cancelled()
        except OperationCancelled:
            undone.append(operation.id)
            raise
        await gate(operation, progress)

    async with runner(tmp_path, work, undoes=True) as runs:
        before = Operation("01J00000000000000000000000", "t", "", "", "", state=OperationState.RUNNING, process=0)
        await runs.start("t", "", "", "")
        await gate.begun(1)
        await runs.store.create(before)
        await runs.resume()
        assert (await runs.cancel(before.id)).cancel_asked
        gate.open.set()
        assert (await runs.wait_for_end(before.id)).state is OperationState.CANCELLED
        assert undone == [before.id]


async def test_a_failure_has_a_reason_but_no_exception_text(tmp_path: Path) -> None:
    async def work(operation: Operation, progress: Progress) -> None:
        if operation.payload == "refused":
            raise MemoryNotFound("there is no memory ns/a")
        raise RuntimeError("secret")

    async with runner(tmp_path, work) as runs:
        refused = await runs.wait_for_end((await runs.start("t", "", "", "refused")).id)
        assert refused.state is OperationState.FAILED
        assert refused.error is not None
        assert (refused.error.code, refused.error.reason) == (5, "MEMORY_NOT_FOUND")
        broken = await runs.wait_for_end((await runs.start("t", "", "", "")).id)
        assert broken.error is not None
        assert (broken.error.code, broken.error.reason) == (13, "INTERNAL")
        assert "secret" not in broken.error.message


async def test_transient_failures_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    tries: list[str] = []

    async def work(operation: Operation, progress: Progress) -> None:
        tries.append(operation.payload)
        if operation.payload == "never" or len(tries) < 3:
            raise ModelDown("the model is away", retry_after_s=1.0)

    async with runner(tmp_path, work) as runs:
        assert (await runs.wait_for_end((await runs.start("t", "", "", "")).id)).state is OperationState.SUCCEEDED
        assert len(tries) == 3
        failed = await runs.wait_for_end((await runs.start("t", "", "", "never")).id)
        assert failed.error is not None
        assert failed.error.reason == "MODEL_UNAVAILABLE"
        assert tries.count("never") == module.TRIES


async def test_a_restart_continues_unfinished_operations(tmp_path: Path) -> None:
    gate = Gate()
    async with runner(tmp_path, gate) as runs:
        ids = [(await runs.start("t", "ns", "a", "")).id for _ in range(3)]
        await gate.begun(1)
    gate.working.clear()
    async with runner(tmp_path, gate) as runs:
        await gate.begun(1)
        assert [(await runs.get(id)).state.value for id in ids] == ["running", "queued", "queued"]
        await runs.cancel(ids[2])
        gate.open.set()
        ended = [(await runs.wait_for_end(id)).state.value for id in ids]
        assert ended == ["succeeded", "succeeded", "cancelled"]


async def test_an_operation_is_done_even_if_its_caller_leaves(tmp_path: Path) -> None:
    done = asyncio.Event()

    async def work(operation: Operation, progress: Progress) -> None:
        done.set()

    async with runner(tmp_path, work) as runs:
        starting = asyncio.create_task(runs.start("t", "ns", "a", ""))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        async with asyncio.timeout(60):
            await done.wait()
        (row,) = await runs.list_page("ns", "a", "", 5)
        assert (await runs.wait_for_end(row.id)).state is OperationState.SUCCEEDED


async def test_an_operation_with_an_unknown_write_is_done_if_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    async with runner(tmp_path, gate) as runs:
        create = runs.store.create

        async def done(operation: Operation, answer: Answer | None = None) -> None:
            await create(operation, answer)
            raise OutcomeUnknown("the commit failed")

        async def lost(operation: Operation, answer: Answer | None = None) -> None:
            raise OutcomeUnknown("the commit failed")

        monkeypatch.setattr(runs.store, "create", done)
        started = await runs.start("t", "ns", "a", "")
        await gate.begun(1)
        gate.open.set()
        assert (await runs.wait_for_end(started.id)).state is OperationState.SUCCEEDED
        monkeypatch.setattr(runs.store, "create", lost)
        with pytest.raises(JournalUnavailable):
            await runs.start("t", "ns", "a", "")


async def test_an_operation_written_at_lease_loss_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have claimed it by then: both would do it."""
    gate, number = Gate(), [5]
    async with runner(tmp_path, gate) as runs:
        create, ownership = runs.store.create, runs.ownership
        left = [0, 6]  # taken from the end: first with a new lease, then without a lease

        async def done(operation: Operation, answer: Answer | None = None) -> None:
            await create(operation, answer)
            number[0] = left.pop()

        monkeypatch.setattr(Ownership, "number", property(lambda _: number[0]))
        monkeypatch.setattr(Ownership, "shared", True)
        monkeypatch.setattr(ownership, "is_valid", lambda: bool(number[0]))
        monkeypatch.setattr(runs.store, "create", done)
        while left:
            number[0] = 5
            started = await runs.start("t", "ns", "a", "")
            assert started.process == 5
            assert not runs.live
        number[0] = 7
        await runs.resume()
        await gate.begun(1)
        rows = await runs.store.list_page("", "", "", 5)
        assert [row.process for row in rows] == [7, 7]
        gate.open.set()
        for row in rows:
            assert (await runs.wait_for_end(row.id)).state is OperationState.SUCCEEDED


async def test_repeated_work_is_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    tries: list[str] = []

    async def work(operation: Operation, progress: Progress) -> None:
        tries.append(operation.id)
        for done in (0, 3):  # repeats the work of the previous try
            await progress.report_done(done, 10)
        raise ModelDown("the model is away", retry_after_s=1.0)

    async with runner(tmp_path, work) as runs:
        started = await runs.start("t", "", "", "")
        async with asyncio.timeout(60):
            assert (await runs.wait_for_end(started.id)).state is OperationState.FAILED
        assert len(tries) == 1 + module.TRIES


async def test_waiting_wide_operations_do_not_block_memory_operations(tmp_path: Path) -> None:
    wide: list[str] = []
    both = asyncio.Event()

    async def work(operation: Operation, progress: Progress) -> None:
        if operation.memory:
            return
        wide.append(operation.namespace)
        if len(wide) == 2:
            both.set()
        await both.wait()
        part = await runs.start("t", operation.namespace, "joy", "")
        await runs.wait_for_end(part.id)

    async with runner(tmp_path, work, at_once=2) as runs:
        started = [await runs.start("t", namespace, "", "") for namespace in ("a", "b")]
        async with asyncio.timeout(60):
            for each in started:
                assert (await runs.wait_for_end(each.id)).state is OperationState.SUCCEEDED


async def test_an_operation_of_another_process_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)

    async def work(operation: Operation, progress: Progress) -> None:
        raise OwnedElsewhere("another server owns the memory", retry_after_s=0.1)

    async with runner(tmp_path, work) as runs:
        claim, failures = runs.store.claim, [OutcomeUnknown("away")]

        async def claimed(id: str, process: int | None, former: int | None) -> bool:
            if failures:
                raise failures.pop()
            return await claim(id, process, former)

        monkeypatch.setattr(runs.store, "claim", claimed)
        started = await runs.start("t", "ns", "a", "")

        async def given_away() -> bool:
            row = await runs.store.get(started.id)
            return row is not None and row.process is None and started.id not in runs.live

        await until(given_away)


async def test_an_unknown_type_fails(tmp_path: Path) -> None:
    gate = Gate()
    async with runner(tmp_path, gate) as runs:
        runs.register_type("newer", "things", gate)
        id = (await runs.start("newer", "", "", "")).id
    async with runner(tmp_path, gate) as runs:
        ended = await runs.wait_for_end(id)
        assert ended.state is OperationState.FAILED
        assert ended.error is not None
        assert "newer" in ended.error.message


async def test_an_answered_request_starts_nothing(tmp_path: Path) -> None:
    async def work(operation: Operation, progress: Progress) -> None:
        """Does nothing."""

    def answer(operation: Operation) -> Answer:
        return Answer("r", b"", operation.id.encode(), CLOCK.now_us())

    async with runner(tmp_path, work) as runs:
        first = await runs.start("t", "", "", "", answer)
        with pytest.raises(AlreadyAnswered):
            await runs.start("t", "", "", "", answer)
        assert [each.id for each in await runs.list_page("", "", "", 10)] == [first.id]


async def test_ended_operations_are_removed_after_seven_days(tmp_path: Path) -> None:
    async def work(operation: Operation, progress: Progress) -> None:
        """Does nothing."""

    now = [CLOCK.now_us()]
    clock = Clock(now_us=lambda: now[0])
    async with runner(tmp_path, work, clock=clock) as runs:
        id = (await runs.start("t", "", "", "")).id
        await runs.wait_for_end(id)
    now[0] += module.KEPT_US
    async with runner(tmp_path, work, clock=clock) as runs:
        assert (await runs.get(id)).ended
    now[0] += 1
    async with runner(tmp_path, work, clock=clock) as runs:

        async def removed() -> bool:
            return not await runs.list_page("", "", "", 10)

        await until(removed)
        with pytest.raises(OperationNotFound):
            await runs.get(id)
