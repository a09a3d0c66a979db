"""The bytes that each namespace stores: counted by triggers, in the transaction of the write that changes them.

Triggers reach every write of every server version, and roll back with it. A row counts the bytes of its values and
ROW_BYTES; the database's own overhead and its indexes do not count. A memory or conversation that is being imported
counts under a name of its own until it is published; a deleted memory counts until its rows are removed.

On PostgreSQL every server adds to rows of its own, its shard, so that no server waits for another; the sum counts.

Migration 0021 makes the triggers: to change one, add a migration that does as it does. Migration 0018 leaves a mark,
and every open counts the rows that are there, slice by slice, until the mark is gone (`finish_migrating`, migrate.py):
a start that is killed loses one slice, and no server serves before all rows are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import BigInteger, Connection, bindparam, cast, func, select

from memstream_server.adapters.journal.sql.schema import memories, namespace_bytes
from memstream_server.ports.journal.records import NamespaceBytes

ROW_BYTES = 64
"""What a row counts beyond its values: its key, times and numbers, about."""
UNCOUNTED = "uncounted_rows"
"""Name in `meta` of the mark: the table that is to be counted next and the last counted value of its key, or none."""
KINDS = ("fragments", "history", "receipts", "conversations", "requests", "memories")
COUNTED = {
    "fragments": ("fragments", ("payload", "terms")),
    "vectors": ("fragments", ("vector",)),
    "anchors": ("fragments", ("vector", "enhancements", "next_vector")),
    "observations": ("fragments", ("payload",)),
    "versions": ("history", ("payload", "terms", "vector")),
    "events": ("history", ("payload",)),
    "recall_receipts": ("receipts", ("payload",)),
    "messages": ("conversations", ("payload",)),
    "message_bodies": ("conversations", ("body",)),
    "states": ("conversations", ("document",)),
    "plans": ("conversations", ("payload",)),
    "requests": ("requests", ("request", "digest", "response")),
    "receipts": ("requests", ("hashes", "rejections", "outcomes")),
    "producers": ("requests", ()),
    "operations": ("requests", ("payload", "error")),
    "conflicts": ("history", ("reason", "note")),
    "conversations": ("conversations", ("labels",)),
    "memories": ("memories", ("labels", "policy")),
    "blocks": ("memories", ("payload",)),
}
"""By table: the kind of its bytes, and the columns whose bytes count."""
_OF_CONVERSATIONS = ("messages", "message_bodies", "plans")
RECORDS = ("producers", "operations", "conflicts", "conversations", "memories")
"""Tables of texts. Most statements that update them change nothing that counts, and few rows."""
_SHARD = {"sqlite": "0", "postgresql": "coalesce(nullif(current_setting('memstream.shard', true), ''), '0')::bigint"}
_FIND = {"sqlite": "instr", "postgresql": "strpos"}
_SUM = {"sqlite": "sum(bytes)", "postgresql": "sum(bytes)::bigint"}
_NAMES = ", ".join(KINDS)
_ARE_ZERO = " AND ".join(f"{kind} = 0" for kind in KINDS)
_STAGING = ("memories", "conversations")
"""Tables whose rows have no namespace until they are published."""
_TIDIED = ("deletions", "conversations")
"""Tables whose rows end last of what counts under a name."""
_STAGED = "CASE {0}.namespace WHEN '' THEN '\n' || {0}.name ELSE {0}.namespace END"
"""The name under which a memory or conversation counts; no namespace has a newline."""

_TOTAL = [cast(func.coalesce(func.sum(namespace_bytes.c[kind]), 0), BigInteger).label(kind) for kind in KINDS]
_STORES_ANYTHING = func.sum(sum(namespace_bytes.c[kind] for kind in KINDS)) > 0
"""A row of zeros may stay: its shard is tidied by the next deletion."""
_OF_SOME = (
    select(namespace_bytes.c.namespace, *_TOTAL)
    .where(namespace_bytes.c.namespace.in_(bindparam("namespaces", expanding=True)))
    .group_by(namespace_bytes.c.namespace)
    .having(_STORES_ANYTHING)
)
_OF_EACH = select(*_TOTAL).group_by(namespace_bytes.c.namespace).subquery()
_NAMESPACES = (
    select(
        namespace_bytes.c.namespace,
        select(func.count()).where(memories.c.namespace == namespace_bytes.c.namespace).scalar_subquery(),
    )
    .where(namespace_bytes.c.namespace > bindparam("after"))
    .group_by(namespace_bytes.c.namespace)
    .having(_STORES_ANYTHING)
    .order_by(namespace_bytes.c.namespace)
    .limit(bindparam("limit"))
)
_AFTER_STAGED = "\x0b"
"""After the names of what is not published, which begin with a newline, and before every name of a namespace."""
_LARGEST = select(
    func.coalesce(func.max(sum(_OF_EACH.c[kind] for kind in KINDS)), 0), func.coalesce(func.max(_OF_EACH.c.receipts), 0)
)


# ---- reads


def read_bytes(connection: Connection, namespaces: Sequence[str]) -> dict[str, NamespaceBytes]:
    """The counts of those namespaces that store anything; at most some thousands."""
    rows = connection.execute(_OF_SOME, {"namespaces": namespaces})
    return {namespace: NamespaceBytes(*counts) for namespace, *counts in rows}


def read_largest(connection: Connection) -> tuple[int, int]:
    """(most bytes of any namespace, most bytes of receipts)."""
    total, receipts = connection.execute(_LARGEST).one()
    return int(total), int(receipts)


def list_namespaces(connection: Connection, after: str, limit: int) -> list[tuple[str, int]]:
    """(namespace, number of memories) of those that store anything."""
    rows = connection.execute(_NAMESPACES, {"after": after or _AFTER_STAGED, "limit": limit}).all()
    return [(namespace, count) for namespace, count in rows]


# ---- the tables' statements


def add_counts(dialect: str, table: str, where: str) -> str:
    """The statement that adds what the rows `r` of a table with `where` store."""
    kind, columns = COUNTED[table]
    size = _size(dialect, table, "r", columns)
    return _add(dialect, kind, _rows(dialect, table, "r", size, f" FROM {table} r{where}"))


def list_sums(dialect: str) -> Iterator[tuple[str, str]]:
    """(kind, a statement that returns (namespace, bytes) of all rows of a table): what the counts should be."""
    for table, (kind, columns) in COUNTED.items():
        rows = _rows(dialect, table, "r", _size(dialect, table, "r", columns), f" FROM {table} r")
        yield kind, f"SELECT namespace, {_SUM[dialect]} FROM ({rows}) AS counted GROUP BY namespace"


def sum_up(summed: Iterable[tuple[str, Iterable[Any]]]) -> dict[str, NamespaceBytes]:
    """The counts of all namespaces, from the rows of `list_sums` by kind."""
    found: dict[str, dict[str, int]] = {}
    for kind, rows in summed:
        for namespace, size in rows:
            if namespace is not None:
                counts = found.setdefault(namespace, dict.fromkeys(KINDS, 0))
                counts[kind] += size
    return {namespace: NamespaceBytes(**counts) for namespace, counts in found.items()}


def list_removals(dialect: str) -> Iterator[str]:
    """The statements that remove the triggers, as any earlier version made them."""
    made = {f"{table}_bytes_{event}" for table in COUNTED for event in ("insert", "delete", "update")}
    made |= {f"{table}_bytes_{what}" for table in (*_STAGING, "deletions") for what in ("publish", "tidy")}
    if dialect == "sqlite":
        yield from (f"DROP TRIGGER IF EXISTS {name}" for name in sorted(made))
        return
    made |= {f"{table}_count_bytes" for table in COUNTED}
    yield from (f"DROP FUNCTION IF EXISTS {name}() CASCADE" for name in sorted(made))


def list_triggers(dialect: str) -> Iterator[str]:
    """The statements that create the triggers."""
    for table, (kind, columns) in COUNTED.items():
        by_row = dialect == "sqlite" or table in RECORDS
        yield from (_row_counters(dialect, table, kind, columns) if by_row else _group_counters(table, kind, columns))
    sums = ", ".join(
        f"{'CAST(' * (dialect != 'sqlite')}coalesce(sum({kind}), 0){' AS bigint)' * (dialect != 'sqlite')}"
        for kind in KINDS
    )
    added = ", ".join(f"{kind} = namespace_bytes.{kind} + excluded.{kind}" for kind in KINDS)
    for table in _STAGING:
        publish = (
            f"INSERT INTO namespace_bytes (namespace, shard, {_NAMES}) SELECT new.namespace, {_SHARD[dialect]}, {sums}"
            " FROM namespace_bytes WHERE namespace = '\n' || old.name"
            f" ON CONFLICT (namespace, shard) DO UPDATE SET {added};"
            " DELETE FROM namespace_bytes WHERE namespace = '\n' || old.name;"
        )
        when = "old.namespace = '' AND new.namespace <> ''"
        yield from _row_trigger(
            dialect, f"{table}_bytes_publish", f"AFTER UPDATE OF namespace ON {table}", publish, when
        )
    for table in _TIDIED:
        name = "old.namespace" if table == "deletions" else _STAGED.format("old")
        tidy = f"DELETE FROM namespace_bytes WHERE namespace = {name} AND shard = {_SHARD[dialect]} AND {_ARE_ZERO};"
        if table in COUNTED:  # in one trigger: SQLite fires two in no order
            tidy = f"{_take_off(dialect, table, *COUNTED[table])}; {tidy}"
        yield from _row_trigger(dialect, f"{table}_bytes_tidy", f"AFTER DELETE ON {table}", tidy)


def _size(dialect: str, table: str, row: str, columns: Sequence[str]) -> str:
    if table not in RECORDS:
        width = "length({})"
    else:
        width = "length(CAST({} AS BLOB))" if dialect == "sqlite" else "octet_length({})"
    return " + ".join([str(ROW_BYTES), *(f"coalesce({width.format(f'{row}.{name}')}, 0)" for name in columns)])


def _owner(dialect: str, table: str, row: str) -> str:
    """The name under which a row counts, as an expression; null if its memory is unknown."""
    if table == "requests":
        request = f"({row}.request || '\n')"
        return f"substr({request}, 1, {_FIND[dialect]}({request}, '\n') - 1)"
    if table in _STAGING:
        return _STAGED.format(row)
    if table == "states":
        return f"{row}.namespace"
    if table == "operations":
        return f"nullif({row}.namespace, '')"  # empty: of the whole store
    by_number = ("anchors", "receipts", "producers", "conflicts")
    number = f"{row}.memory" if table in by_number else f"({row}.key >> 32)"
    owners = "conversations" if table in _OF_CONVERSATIONS else "memories"
    known = f"(SELECT {_STAGED.format('o')} FROM {owners} AS o WHERE o.number = {number})"
    if owners == "conversations":
        return known
    return f"coalesce({known}, (SELECT nullif(d.namespace, '') FROM deletions AS d WHERE d.number = {number}))"


def _rows(dialect: str, table: str, row: str, size: str, source: str = "") -> str:
    return f"SELECT {_owner(dialect, table, row)} AS namespace, {size} AS bytes{source}"


def _add(dialect: str, kind: str, rows: str, *, single: bool = False) -> str:
    """Add the bytes of rows of (namespace, bytes); `single`: there is one row."""
    size = "bytes" if single else _SUM[dialect]
    counts = ", ".join(size if one == kind else "0" for one in KINDS)
    grouped = "" if single else f" GROUP BY namespace HAVING {_SUM[dialect]} <> 0"
    return (
        f"INSERT INTO namespace_bytes (namespace, shard, {_NAMES}) SELECT namespace, {_SHARD[dialect]}, {counts}"
        f" FROM ({rows}) AS counted WHERE namespace IS NOT NULL{grouped}"
        f" ON CONFLICT (namespace, shard) DO UPDATE SET {kind} = namespace_bytes.{kind} + excluded.{kind}"
    )


def _take_off(dialect: str, table: str, kind: str, columns: Sequence[str]) -> str:
    size = f"-({_size(dialect, table, 'old', columns)})"
    return _add(dialect, kind, _rows(dialect, table, "old", size), single=True)


def _row_counters(dialect: str, table: str, kind: str, columns: Sequence[str]) -> Iterator[str]:
    after, before = (_size(dialect, table, row, columns) for row in ("new", "old"))
    more = _add(dialect, kind, _rows(dialect, table, "new", after), single=True)
    yield from _row_trigger(dialect, f"{table}_bytes_insert", f"AFTER INSERT ON {table}", f"{more};")
    if table not in _TIDIED:
        less = _take_off(dialect, table, kind, columns)
        yield from _row_trigger(dialect, f"{table}_bytes_delete", f"AFTER DELETE ON {table}", f"{less};")
    if columns:
        other = _add(dialect, kind, _rows(dialect, table, "new", f"{after} - ({before})"), single=True)
        event = f"AFTER UPDATE OF {', '.join(columns)} ON {table}"
        yield from _row_trigger(dialect, f"{table}_bytes_update", event, f"{other};", f"{after} <> {before}")


def _group_counters(table: str, kind: str, columns: Sequence[str]) -> Iterator[str]:
    """Of PostgreSQL, once for each statement: a row of `namespace_bytes` leaves a copy with every update."""
    size, function = _size("postgresql", table, "r", columns), f"{table}_count_bytes"
    rows = {
        "INSERT": _rows("postgresql", table, "r", size, " FROM after_rows r"),
        "DELETE": _rows("postgresql", table, "r", f"-({size})", " FROM before_rows r"),
    }
    rows["UPDATE"] = " UNION ALL ".join(rows.values())
    branches = "".join(
        f" IF TG_OP = '{event}' THEN {_add('postgresql', kind, some)}; END IF;" for event, some in rows.items()
    )
    yield f"CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN{branches} RETURN NULL; END $$"
    after, before = "NEW TABLE AS after_rows", "OLD TABLE AS before_rows"
    for event, given in (("INSERT", after), ("DELETE", before), ("UPDATE", f"{after} {before}")):
        yield (
            f"CREATE TRIGGER {table}_bytes_{event.lower()} AFTER {event} ON {table} REFERENCING {given}"
            f" FOR EACH STATEMENT EXECUTE FUNCTION {function}()"
        )


def _row_trigger(dialect: str, name: str, event: str, body: str, when: str = "") -> Iterator[str]:
    condition = f" WHEN ({when})" if when else ""
    if dialect == "sqlite":
        yield f"CREATE TRIGGER {name} {event}{condition} BEGIN {body} END"
        return
    yield f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} RETURN NULL; END $$"
    yield f"CREATE TRIGGER {name} {event} FOR EACH ROW{condition} EXECUTE FUNCTION {name}()"
