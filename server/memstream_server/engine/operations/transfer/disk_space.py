"""Where exports and imports put lines aside: a folder of the data directory, never down to the last byte."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from memstream_server.engine.errors import StorageIsFull


@dataclass(frozen=True, slots=True)
class Disk:
    """A folder, and how much of its disk stays free."""

    directory: Path
    reserve_bytes: int

    def check(self) -> None:
        """Raises StorageIsFull. Makes the folder."""
        self.directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.directory).free
        if free < self.reserve_bytes:
            raise StorageIsFull(
                f"{free} bytes are free where exports and imports are put aside, {self.reserve_bytes} are kept free",
                retry_after_s=5.0,
            )
