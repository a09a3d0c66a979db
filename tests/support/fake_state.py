"""State of the fake engine: the test's script, memories, and producers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memstream_server.core.events import Event
from memstream_server.core.values import Fragment
from memstream_server.engine.errors import (
    EngineError,
)
from memstream_server.engine.requests import (
    NewObservation,
    Query,
    RejectedObservation,
)
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.journal.writing import Rejection

if TYPE_CHECKING:
    from tests.support.fake_engine import FakeSession

DIMENSION = 4
Step = tuple[str, int, int, tuple[Event, ...]]


@dataclass
class Script:
    """What a test controls. Gates are open until a test clears them."""

    receiving: asyncio.Event = field(default_factory=asyncio.Event)
    storing: asyncio.Event = field(default_factory=asyncio.Event)
    indexing: asyncio.Event = field(default_factory=asyncio.Event)
    recalling: asyncio.Event = field(default_factory=asyncio.Event)
    """Holds queries whose text begins with "wait"."""
    refuse_submits: list[EngineError] = field(default_factory=list)
    """Raised by the next submissions, one each."""
    fail_recalls: list[BaseException] = field(default_factory=list)
    cancelled_recalls: int = 0
    sessions_closed: int = 0
    queries: list[Query] = field(default_factory=list)
    items: list[NewObservation | RejectedObservation] = field(default_factory=list)

    def __post_init__(self) -> None:
        for gate in (self.receiving, self.storing, self.indexing, self.recalling):
            gate.set()


@dataclass
class FakeProducer:
    epoch: int = 0
    received: int = 0
    stored: int = 0
    known: dict[int, tuple[bytes, Rejection | None]] = field(default_factory=dict)
    session: FakeSession | None = None


@dataclass
class FakeMemory:
    record: MemoryRecord
    fragments: list[Fragment] = field(default_factory=list)
    history: list[Step] = field(default_factory=list)
    producers: dict[str, FakeProducer] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def commit(self, *events: Event) -> int:
        self.record = replace(self.record, revision=self.record.revision + 1)
        self.history.append((self.record.uid, self.record.revision, self.record.revision * 1_000_000, events))
        self.changed.set()
        self.changed = asyncio.Event()
        return self.record.revision
