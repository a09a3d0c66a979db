"""Removes what imports leave behind: uploaded files, and memories and conversations with a temporary name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import structlog

from memstream_server.engine.errors import EngineError
from memstream_server.engine.operations.transfer.upload import SUFFIX
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.operations.runner import OperationRunner
    from memstream_server.engine.operations.transfer.disk_space import Disk
    from memstream_server.ports.conversations import ConversationStore
    from memstream_server.ports.journal.port import Journal

log = structlog.get_logger(__name__)

TIDY_RETRY_S = 30.0
"""Pause before a failed cleanup is retried."""


class ImportCleanup:
    """The cleanup of a process's imports."""

    def __init__(
        self,
        journal: Journal,
        conversations: ConversationStore,
        runner: OperationRunner,
        disk: Disk,
        delete: Callable[[MemoryRecord], Awaitable[None]],
    ) -> None:
        self._journal = journal
        self._conversations = conversations
        self._runner = runner
        self._disk = disk
        self._delete = delete
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, unfinished: Callable[[], Awaitable[list[Operation]]]) -> None:
        """Remove what ended imports have left, and later what the unfinished ones leave."""
        # In this order: another server may start an import at any time, and writes its operation first.
        memories, names = await self._staged_memories(), await self._conversations.list_names("", "", 1_000_000)
        going_on = {one.id: one for one in await unfinished() if one.type == "import"}
        for record in memories:
            if record.name.partition(".")[0] not in going_on:
                await self._delete(record)
        for name in names:
            if name.partition(".")[0] not in going_on:
                await self._conversations.discard_staged(name)
        kept = {json.loads(one.payload)["file"] for one in going_on.values()}
        await asyncio.to_thread(self._remove_files, kept)
        for operation in going_on.values():
            self.remove_after(operation)

    async def stop(self) -> None:
        """Stop the cleanup; the next start does it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def remove_after(self, operation: Operation) -> None:
        """Remove what the operation leaves, once it has ended."""
        task = asyncio.create_task(self._remove_when_ended(operation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _remove_when_ended(self, operation: Operation) -> None:
        """Remove what the operation leaves, after its end: an unfinished one may be resumed."""
        while True:
            try:
                await self._runner.wait_for_end(operation.id)
                await self._remove_leftovers(operation)
            except (EngineError, JournalError) as error:
                log.warning("import_cleanup_failed", operation=operation.id, error=error)
                await asyncio.sleep(TIDY_RETRY_S)
            else:
                return

    async def _remove_leftovers(self, operation: Operation) -> None:
        path = self._disk.directory / json.loads(operation.payload)["file"]
        await asyncio.to_thread(path.unlink, missing_ok=True)
        for record in await self._staged_memories():
            if record.name.startswith(f"{operation.id}."):
                await self._delete(record)
        for name in await self._conversations.list_names("", f"{operation.id}.", 1_000_000):
            if name.startswith(f"{operation.id}."):
                await self._conversations.discard_staged(name)

    async def _staged_memories(self) -> list[MemoryRecord]:
        return await self._journal.list_memories("", "", 1_000_000)

    def _remove_files(self, kept: set[str]) -> None:
        for path in self._disk.directory.glob(f"*{SUFFIX}"):
            if path.name not in kept:
                path.unlink(missing_ok=True)
