"""A page of a list is one statement, whatever the number of its rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from memstream_server.adapters.journal.store import SqlJournal
from memstream_server.ports.conversations import ConversationName, Message, MessageQuery
from memstream_server.ports.operations import Operation
from tests.journal.samples import Now, record
from tests.support import journals

ROWS = 40
LABELS = (("team", "blue"),)


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SqlJournal]:
    """A journal with ROWS rows in each list."""
    opened = await journals.open_test_journal(tmp_path / "data", Now())
    talk = ConversationName("comedy", "talk")
    for number in range(ROWS):
        blue = replace(record(f"u{number:02}", f"m{number:02}"), labels=LABELS if number % 2 else ())
        await opened.create_memory(blue, ())
        await opened.create_memory(replace(record(f"v{number:02}"), namespace=f"n{number:02}"), ())
        await opened.operations.create(Operation(f"o{number:02}", "reindex", "comedy", "joy", "{}"))
        await opened.conversations.append_message(talk, Message("ada", "grace", "hello"), 1)
    yield opened
    await opened.close()


@contextmanager
def counted(journal: SqlJournal) -> Iterator[list[str]]:
    """The statements that the readers send."""
    sent: list[str] = []

    def note(connection: Any, cursor: Any, text: str, *_: Any) -> None:
        sent.append(text)

    event.listen(journal._database.reader, "before_cursor_execute", note)
    yield sent
    event.remove(journal._database.reader, "before_cursor_execute", note)


List = Callable[[SqlJournal, int], Awaitable[Sequence[object]]]
LISTS: dict[str, tuple[List, int, int]] = {
    "memories": (lambda j, limit: j.list_memories("comedy", "", limit), ROWS, 1),
    "memories by label": (lambda j, limit: j.list_memories("comedy", "", limit, labels=LABELS), ROWS // 2, 1),
    "memories by prefix": (lambda j, limit: j.list_memories("comedy", "", limit, "m1"), 10, 1),
    "namespaces with counts": (lambda j, limit: j.list_namespaces("", limit), ROWS + 1, 1),
    "operations": (lambda j, limit: j.operations.list_page("comedy", "", "", limit), ROWS, 1),
    "operations of a memory": (lambda j, limit: j.operations.list_page("comedy", "joy", "", limit), ROWS, 1),
    "messages": (
        lambda j, limit: j.conversations.list_messages(ConversationName("comedy", "talk"), MessageQuery(limit=limit)),
        ROWS,
        2,  # the conversation's number first
    ),
}


@pytest.mark.parametrize("name", LISTS)
async def test_a_page_is_the_same_statements_at_any_size(journal: SqlJournal, name: str) -> None:
    read, rows, statements = LISTS[name]
    for limit in (1, 5, rows):
        with counted(journal) as sent:
            page = await read(journal, limit)
        assert (len(page), len(sent)) == (limit, statements), sent
