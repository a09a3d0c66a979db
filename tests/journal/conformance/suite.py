"""The contract of every Journal, tested through the port only.

A store passes by a module with a class that inherits `JournalConformance` and a fixture `opener`: a coroutine
function that opens the same, at first empty, store each time it is called. `now` is the clock it is opened with.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import Connection

from memstream_server.adapters.journal.sql import byte_counts
from memstream_server.adapters.journal.store import SqlJournal
from memstream_server.core.events import Event, EventType
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import NamespaceBytes
from tests.journal.conformance.answering import Answering
from tests.journal.conformance.byte_counting import ByteCounting
from tests.journal.conformance.committing import Committing
from tests.journal.conformance.images import Images
from tests.journal.conformance.indexing import Indexing
from tests.journal.conformance.memories import Memories
from tests.journal.conformance.reading import Reading
from tests.journal.conformance.recalling import Recalling
from tests.journal.conformance.receiving import Receiving
from tests.journal.conformance.storing import Storing
from tests.journal.conformance.vectors import Vectors
from tests.journal.conformance.versioning import Versioning
from tests.journal.samples import Opener, record


def _sum_rows(connection: Connection) -> dict[str, NamespaceBytes]:
    sums = byte_counts.list_sums(connection.dialect.name)
    return byte_counts.sum_up((kind, connection.exec_driver_sql(text)) for kind, text in sums)


async def check_bytes(journal: Journal) -> None:
    """Fails if what is counted with every write is not what a read of all rows counts."""
    assert isinstance(journal, SqlJournal)
    with contextlib.suppress(JournalError):  # the test has closed it
        counted = await journal._read(_sum_rows)
        assert await journal.read_bytes([*counted]) == counted


class JournalConformance(
    Memories,
    Receiving,
    Committing,
    Images,
    Reading,
    Answering,
    Indexing,
    Storing,
    Versioning,
    Recalling,
    Vectors,
    ByteCounting,
):
    """Subclass it to run all its tests against the store of `opener`."""

    @pytest.fixture
    async def journal(self, opener: Opener) -> AsyncIterator[Journal]:
        opened = await opener()
        await opened.create_memory(record(), (Event(EventType.MEMORY_CREATED, ""),))
        await opened.own_memory("u1")
        await opened.open_producer("u1", 1, "p")
        yield opened
        await check_bytes(opened)
        await opened.close()
