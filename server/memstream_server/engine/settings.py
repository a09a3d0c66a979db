"""The engine's limits, set by the composition root; units are in the names."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from memstream_server.core.dense import count_fitting
from memstream_server.engine.errors import StorageIsFull

_DENSE_SHARE = 4


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of RAM use and batch sizes."""

    active_memories_max: int = 1_000
    """Memories with a working set in RAM; beyond this the least recently used are evicted."""
    active_bytes_max: int = 2 << 30
    """Bytes of all working sets together."""
    dense_bytes_max: int = 1 << 40
    """Bytes of the vectors that one memory keeps in RAM, if that is less than its share of `active_bytes_max`; larger
    memories search the vector index.
    """
    newest_vectors: int = 0
    """Without an index to search: vectors of its newest fragments that a memory beyond `dense_max` keeps in RAM."""
    decide_max: int = 256
    """Observations decided and committed together."""
    flush_interval_s: float = 15.0
    """How long the index's write-behind collects rows before a flush."""
    flush_rows: int = 8_192
    """Number of rows that triggers an earlier flush."""
    fresh_s: float = 30.0
    """How long after its flush a vector stays in the overlay of a memory that searches the index."""
    access_interval_s: float = 5.0
    """How often access statistics are written."""
    maintenance_interval_s: float = 60.0
    """How often maintenance runs: forgets and erases what is due, prunes events."""
    model_retry_s: float = 1.0
    """First retry delay for a model that is down, if the policy waits for models; doubles up to 30 s."""
    space_notice_s: float = 0.0
    """How long other servers of the same store may take to notice a switch of the embedding space."""
    vector_retry_s: float = 600.0
    """How soon texts that the embedding model refused are embedded again; doubles while none gets a vector."""
    namespace_memories_max: int = 0
    """Memories per namespace; 0: no limit."""
    memory_fragments_max: int = 0
    """Fragments per memory, including forgotten ones; 0: no limit."""
    memory_blocks_max: int = 64
    """Blocks per memory,"""
    block_versions_max: int = 32
    """kept versions of a block, the present one included,"""
    block_bytes_max: int = 65_536
    """and bytes of a block's text."""
    namespace_bytes_max: int = 0
    """Bytes that a namespace stores,"""
    namespace_receipts_bytes_max: int = 0
    """and bytes of its receipts of recalls; 0: no limit."""
    standing_max: int = 1_024
    """Standing queries open in this process,"""
    memory_standing_max: int = 512
    """on one memory,"""
    caller_standing_max: int = 0
    """and of one principal; 0: no limit."""
    embed_deadline_s: float = 2.0
    """How long a recall waits for the query's vector before it falls back to lexical search."""

    def dense_max(self, dimension: int) -> int:
        """Vectors of that dimension that one memory may keep in RAM: they take a quarter of the RAM for all active
        memories, as int8 copies if they are many.
        """
        return count_fitting(min(self.dense_bytes_max, self.active_bytes_max // _DENSE_SHARE), dimension)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Lease times of a process that shares its journal."""

    lease_s: float = 10.0
    renew_s: float = 3.0


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Settings of exports and imports."""

    directory: Path
    """Temporary directory of exports and imports."""
    disk_free_min_bytes: int
    server: str
    """The server's version."""
    import_bytes_max: int
    name_bytes_max: int

    def check_free(self) -> None:
        """Create the directory. Raises StorageIsFull if too little space is free on its disk."""
        self.directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.directory).free
        if free < self.disk_free_min_bytes:
            raise StorageIsFull(
                f"{free} bytes are free on the disk of exports and imports, {self.disk_free_min_bytes} must stay free",
                retry_after_s=5.0,
            )
