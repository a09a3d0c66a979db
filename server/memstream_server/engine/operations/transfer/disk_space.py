"""The directory for the temporary files of exports and imports, and the disk space that they leave free."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from memstream_server.engine.errors import StorageIsFull


@dataclass(frozen=True, slots=True)
class Disk:
    """A directory, and how much of its disk must stay free."""

    directory: Path
    reserve_bytes: int

    def check_free(self) -> None:
        """Create the directory. Raises StorageIsFull if too little space is free."""
        self.directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.directory).free
        if free < self.reserve_bytes:
            raise StorageIsFull(
                f"{free} bytes are free on the disk of exports and imports, {self.reserve_bytes} must stay free",
                retry_after_s=5.0,
            )
