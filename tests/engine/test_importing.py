"""Imports whose callers leave, and failures during an import."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from memstream_server.engine.errors import JournalUnavailable
from memstream_server.engine.operations import runner
from memstream_server.engine.operations.runner import Progress
from memstream_server.engine.operations.transfer import import_memory
from memstream_server.engine.operations.transfer.import_memory import BATCH, Target
from memstream_server.engine.operations.transfer.upload import Upload
from memstream_server.ports.operations import Operation, OperationState
from tests.engine.assembled import NAMESPACE, assembled, check, hasty
from tests.engine.engine_parts import PartsEngine
from tests.engine.test_fragments import live
from tests.support.faulty_journal import Fault
from tests.support.waiting import until
from tests.transfer.exports import HEADER, ended, fragment, memory

__all__ = ["hasty"]  # a fixture


def taken(engine: PartsEngine, fragments: int) -> Upload:
    """An import of a memory "joy" that was uploaded completely."""
    intake = engine.importer.open_upload("")
    lines = [HEADER, memory(fragments=fragments), *(fragment(number) for number in range(1, fragments + 1))]
    intake.add_lines(b"".join(ended(lines)))
    return intake


async def begun(engine: PartsEngine, intake: Upload) -> Operation:
    try:
        return await engine.importer.begin_import(intake, intake.finish(), Target(NAMESPACE, ""), None)
    finally:
        intake.close()


async def imports(engine: PartsEngine) -> list[Operation]:
    return await engine.operations.list_page(NAMESPACE, "", "", 10)


async def test_import_completes_after_its_caller_leaves(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        intake = taken(parts.engine, 3)
        beginning = asyncio.create_task(begun(parts.engine, intake))
        await asyncio.sleep(0)
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        (operation,) = await until(lambda: imports(parts.engine))
        ended_ = await parts.engine.operations.wait_for_end(operation.id)
        assert ended_.state is OperationState.SUCCEEDED, ended_.error
        assert len(await live(parts.engine)) == 3
        await check(parts.engine, "joy")

        async def gone() -> bool:
            return not intake.path.exists()

        await until(gone)


async def test_import_keeps_its_file_until_its_end_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the lease were lost together with the database: the operation resumes when both are back."""
    monkeypatch.setattr(import_memory, "TIDY_RETRY_S", 0.05)
    async with assembled(tmp_path) as parts:
        finished, asked = parts.engine.operations.wait_for_end, asyncio.Event()

        async def away(id: str) -> Operation:
            if not asked.is_set():
                asked.set()
                raise JournalUnavailable("scripted: away", retry_after_s=0.1)
            return await finished(id)

        monkeypatch.setattr(parts.engine.operations, "wait_for_end", away)
        release = parts.journal.hold("commit")
        intake = taken(parts.engine, 3)
        operation = await begun(parts.engine, intake)
        await asked.wait()
        await asyncio.sleep(0.2)
        assert intake.path.exists()
        release()
        assert (await finished(operation.id)).state is OperationState.SUCCEEDED

        async def gone() -> bool:
            return not intake.path.exists()

        await until(gone)


@pytest.mark.usefixtures("hasty")
async def test_retried_import_never_reports_less_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.01)
    told: list[int] = []
    at = Progress.report_done

    async def telling(self: Progress, done: int, total: int) -> None:
        told.append(done)
        await at(self, done, total)

    monkeypatch.setattr(Progress, "report_done", telling)
    async with assembled(tmp_path) as parts:
        intake = taken(parts.engine, 2 * BATCH + 1)
        parts.journal.fail_at(2, Fault.LOST, "commit")
        operation = await begun(parts.engine, intake)
        finished = await parts.engine.operations.wait_for_end(operation.id)
        assert (finished.state, finished.done) == (OperationState.SUCCEEDED, 2 * BATCH + 1)
        assert parts.journal.failed == "commit"
        assert told == sorted(told)
        assert len(await live(parts.engine)) == 2 * BATCH + 1
