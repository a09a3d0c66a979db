"""The engine's own limits, given by the composition root; units in the names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_DENSE_SHARE = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what the engine holds and does at once."""

    active_memories_max: int = 1_000
    """Memories whose working set is in RAM; the least recently used leave first."""
    active_bytes_max: int = 2 << 30
    """Bytes of all working sets together."""
    dense_in_memory_max: int = 200_000
    """Fragments up to which a memory's vectors are in RAM too, if they fit (`dense_max`); larger ones search the
    vector index."""
    decide_max: int = 256
    """Observations decided and committed together."""
    flush_interval_s: float = 15.0
    """How long the index's write-behind gathers rows before it flushes."""
    flush_rows: int = 8_192
    """Rows that make it flush sooner."""
    fresh_s: float = 30.0
    """How long after its flush a vector stays in the overlay of a memory searched in the index."""
    access_interval_s: float = 5.0
    """How often access statistics are written."""
    maintenance_interval_s: float = 60.0
    """How often fragments that are due to be forgotten or erased, and events past their retention, are looked for."""
    model_retry_s: float = 1.0
    """First pause before a model that was down is asked again, where a policy waits for models; doubles up to 30 s."""
    space_notice_s: float = 0.0
    """How long other servers of the same store may take to notice that another embedding space is in force."""
    namespace_memories_max: int = 0
    """Memories of one namespace; 0 is no limit."""
    memory_fragments_max: int = 0
    """Fragments of one memory up to which it takes observations, forgotten ones included; 0 is no limit."""
    embed_deadline_s: float = 2.0
    """How long a recall waits for the query's vector before it answers from the lexical legs alone."""

    def dense_max(self, dimension: int) -> int:
        """Vectors of that many numbers that one memory may have in RAM: a quarter of what all active memories may take.

        They leave when they are twice as many.
        """
        return min(self.dense_in_memory_max, self.active_bytes_max // (_DENSE_SHARE * 4 * dimension))


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Of a process that shares its journal with others."""

    lease_s: float = 10.0
    renew_s: float = 3.0


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Of exports and imports."""

    directory: Path
    """Where lines are kept until they are sent or imported."""
    disk_free_min_bytes: int
    server: str
    """The server's version."""
    import_bytes_max: int
    name_bytes_max: int
