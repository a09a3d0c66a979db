"""Exports and imports of a process: what they are made of, and what the wire calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memstream_server.engine.transfer.disk import Disk
from memstream_server.engine.transfer.exporting import Exporter, Part, Wanted
from memstream_server.engine.transfer.importing import Importer

if TYPE_CHECKING:
    from memstream_server.engine.dependencies import Dependencies
    from memstream_server.engine.operations import OperationRunner
    from memstream_server.engine.registry import Registry
    from memstream_server.ports.conversations import ConversationStore
    from memstream_server.ports.journal.records import MemoryRecord


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """What the composition root gives."""

    conversations: ConversationStore
    disk: Disk
    server: str
    """The server's version."""
    import_bytes_max: int
    name_bytes_max: int


class Transfers:
    """`imports` takes what is sent in; `export` sends out. `start` before operations are resumed."""

    def __init__(
        self,
        dependencies: Dependencies,
        registry: Registry,
        runner: OperationRunner,
        delete: Callable[[MemoryRecord], Awaitable[None]],
    ) -> None:
        given = dependencies.transfers
        self._operations = dependencies.operations
        self._exporter = Exporter(
            dependencies.journal, given.conversations, given.disk, given.server, dependencies.clock.now_us
        )
        self.imports = Importer(
            dependencies,
            registry,
            given.conversations,
            runner,
            given.disk,
            delete,
            bytes_max=given.import_bytes_max,
            name_bytes_max=given.name_bytes_max,
        )

    async def start(self) -> None:
        """Remove what imports of an earlier process left that are not gone on with."""
        await self.imports.start(self._operations.unfinished)

    async def stop(self) -> None:
        """After the operations."""
        await self.imports.stop()

    def export(self, wanted: Wanted) -> AsyncGenerator[Part, None]:
        """The lines in parts. Raises MemoryNotFound, StorageIsFull, JournalUnavailable."""
        return self._exporter.export(wanted)
