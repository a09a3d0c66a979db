"""State documents. A large one is in parts, as large bodies are (hidden_conversations.py); forks share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, bindparam, delete, insert, select, tuple_, update

from memstream_server.adapters.journal.sql import hidden_conversations as hidden
from memstream_server.adapters.journal.sql import messages
from memstream_server.adapters.journal.sql.schema import states
from memstream_server.ports.conversation_records import StateDiffers, StateDocument, StateName, StateScope
from memstream_server.ports.conversations import ConversationName, NotThere

_NAMES_MAX = 64
"""Documents per statement: those after `bytes_max` are read in vain."""
_NAMED = select(states).where(
    states.c.namespace == bindparam("namespace"),
    states.c.scope == bindparam("scope"),
    states.c.name.in_(bindparam("names", expanding=True)),
)


def _is_named(name: StateName) -> ColumnElement[bool]:
    return and_(states.c.namespace == name.namespace, states.c.scope == name.scope.value, states.c.name == name.name)


def _of_session(conversation: ConversationName) -> StateName:
    return StateName(conversation.namespace, StateScope.SESSION, conversation.name)


def read_document(connection: Connection, row: Row[Any]) -> bytes:
    """The document of a row of `states`."""
    return bytes(row.document) if row.parts is None else hidden.read_parts(connection, row.parts)


def _to_state(connection: Connection, row: Row[Any]) -> StateDocument:
    return StateDocument(read_document(connection, row), row.version, row.update_time_us)


def find_state(connection: Connection, name: StateName) -> StateDocument | None:
    row = connection.execute(select(states).where(_is_named(name))).one_or_none()
    return None if row is None else _to_state(connection, row)


def get_state(connection: Connection, name: StateName) -> StateDocument:
    """Raises NotThere."""
    found = find_state(connection, name)
    if found is None:
        text = f"there is no state of the {name.scope.value} {name.name}"
        raise NotThere(text, ConversationName(name.namespace, name.name))
    return found


def get_states(connection: Connection, names: Sequence[StateName], bytes_max: int) -> list[StateDocument | None]:
    """As many, from the first, as `bytes_max` holds, but one in any case."""
    found: list[StateDocument | None] = []
    size = 0
    for start in range(0, len(names), _NAMES_MAX):
        some = names[start : start + _NAMES_MAX]
        rows = _find_rows(connection, some)
        for name in some:
            row = rows.get(name)
            state = None if row is None else _to_state(connection, row)
            size += 0 if state is None else len(state.document)
            if found and size > bytes_max:
                return found
            found.append(state)
    return found


def _find_rows(connection: Connection, names: Sequence[StateName]) -> dict[StateName, Row[Any]]:
    scopes: dict[tuple[str, StateScope], list[str]] = {}
    for each in names:
        scopes.setdefault((each.namespace, each.scope), []).append(each.name)
    return {
        StateName(namespace, scope, row.name): row
        for (namespace, scope), some in scopes.items()
        for row in connection.execute(_NAMED, {"namespace": namespace, "scope": scope.value, "names": some})
    }


def list_states(
    connection: Connection, namespace: str, after: tuple[str, str], limit: int
) -> list[tuple[StateName, StateDocument]]:
    place = tuple_(states.c.scope, states.c.name)
    wanted = (states.c.namespace == namespace) & (place > after) & (states.c.scope != StateScope.SESSION.value)
    rows = connection.execute(select(states).where(wanted).order_by(states.c.scope, states.c.name).limit(limit)).all()
    return [(StateName(namespace, StateScope(row.scope), row.name), _to_state(connection, row)) for row in rows]


def set_state(
    connection: Connection,
    name: StateName,
    document: bytes,
    version: int | None,
    now_us: int,
    stored: messages.Stored = messages.NOT_STORED,
) -> StateDocument:
    if name.scope is StateScope.SESSION:
        row = messages.get_or_create(connection, ConversationName(name.namespace, name.name), now_us)
        messages.touch_row(connection, row.number, now_us)
    parts = stored.get(document)
    made = _put(connection, name, b"" if parts is not None else document, parts, version, now_us)
    return StateDocument(document, made, now_us)


def _put(
    connection: Connection, name: StateName, document: bytes, parts: int | None, version: int | None, now_us: int
) -> int:
    """The new version."""
    present = _lock(connection, name, version)
    made = max(now_us, (0 if present is None else present.version) + 1)
    values = {"version": made, "update_time_us": now_us, "document": document, "parts": parts}
    if parts is not None:
        hidden.keep_parts(connection, [parts])
    if present is None:
        named = {"namespace": name.namespace, "scope": name.scope.value, "name": name.name}
        connection.execute(insert(states), named | values)
    else:
        connection.execute(update(states).where(_is_named(name)).values(values))
        _release(connection, present)
    return made


def _lock(connection: Connection, name: StateName, version: int | None) -> Any:
    """The present row or None. `version`: what it must have; 0: there is none. Raises StateDiffers."""
    wanted = select(states.c.version, states.c.parts).where(_is_named(name)).with_for_update()
    present = connection.execute(wanted).one_or_none()
    known = 0 if present is None else present.version
    if version is not None and version != known:
        raise StateDiffers("the state was written since", known)
    return present


def _release(connection: Connection, row: Any) -> None:
    if row.parts is not None:
        hidden.release_parts(connection, [row.parts])


def delete_state(connection: Connection, name: StateName, version: int | None = None) -> bool:
    present = _lock(connection, name, version)
    if present is None:
        return False
    connection.execute(delete(states).where(_is_named(name)))
    _release(connection, present)
    return True


def copy_state(connection: Connection, source: ConversationName, target: ConversationName, now_us: int) -> None:
    """Give a fork the document of its source, without a copy of its parts."""
    old = connection.execute(select(states).where(_is_named(_of_session(source)))).one_or_none()
    if old is not None:
        _put(connection, _of_session(target), bytes(old.document), old.parts, None, now_us)


def read_session(connection: Connection, conversation: ConversationName) -> bytes | None:
    """The document of a session; None: there is none."""
    found = find_state(connection, _of_session(conversation))
    return None if found is None else found.document
