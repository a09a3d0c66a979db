"""The exporter and the importer of a process, as the rpcs call them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING

from memstream_server.engine.operations.transfer.disk_space import Disk
from memstream_server.engine.operations.transfer.export_memory import Exporter, ExportPart, Wanted
from memstream_server.engine.operations.transfer.import_memory import Importer

if TYPE_CHECKING:
    from memstream_server.engine.operations.runner import OperationRunner
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.engine.settings import TransferSettings
    from memstream_server.ports.journal.records import MemoryRecord


class Transfers:
    """`imports` receives lines; `export` sends them. Call `start` before operations are resumed."""

    def __init__(
        self,
        storage: Storage,
        models: EngineModels,
        runtime: Runtime,
        registry: Registry,
        runner: OperationRunner,
        delete: Callable[[MemoryRecord], Awaitable[None]],
        settings: TransferSettings,
    ) -> None:
        disk = Disk(settings.directory, settings.disk_free_min_bytes)
        self._operations = storage.operations
        self._exporter = Exporter(storage.journal, storage.conversations, disk, settings.server, runtime.clock.now_us)
        self.imports = Importer(
            storage,
            models,
            runtime,
            registry,
            storage.conversations,
            runner,
            disk,
            delete,
            bytes_max=settings.import_bytes_max,
            name_bytes_max=settings.name_bytes_max,
        )

    async def start(self) -> None:
        """Remove files and temporary memories of earlier imports that will not be resumed."""
        await self.imports.cleanup.start(self._operations.list_unfinished)

    async def stop(self) -> None:
        """Call after the operations have stopped."""
        await self.imports.cleanup.stop()

    def export(self, wanted: Wanted) -> AsyncGenerator[ExportPart, None]:
        """Yields the lines in parts. Raises MemoryNotFound, StorageIsFull, JournalUnavailable."""
        return self._exporter.export(wanted)
