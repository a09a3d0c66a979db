"""The journal's tables, and the integer that keeps one memory's rows side by side.

`key` = memory number << 32 | position (or revision, in the event log). As the primary key it is SQLite's rowid, so
everything of a memory lies in one run of pages however its writes were interleaved with others', and a memory is
a range. Numbers are given once and never again, so the rows of a deleted memory cannot come back under another.

Only what a query selects by is a column; the rest of a fragment is in its payload (codec.py). The exceptions are
the access statistics: they are changed without rewriting the payload, and the columns are the truth.

Conditions of indexes are named for SQLite alone: for PostgreSQL's, which are the same, SQLAlchemy would import its
dialect at every start. Its tables are made by the migrations, which name both (migrate.py).
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

POSITION_BITS = 32
"""4 billion positions a memory, 2 billion memories ever created."""

metadata = MetaData()
BIG_KEY = BigInteger().with_variant(Integer(), "sqlite")  # only INTEGER is an alias of the rowid there
TEXT = Text().with_variant(Text(collation="C"), "postgresql")  # ordered by bytes, as in SQLite and in every release

meta = Table("meta", metadata, Column("name", TEXT, primary_key=True), Column("value", TEXT, nullable=False))

memories = Table(
    "memories",
    metadata,
    Column("number", BIG_KEY, primary_key=True, autoincrement=True),
    Column("uid", TEXT, nullable=False, unique=True),
    Column("namespace", TEXT, nullable=False),
    Column("name", TEXT, nullable=False),
    Column("kind", TEXT, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("owner", BigInteger),  # number of a process, where several serve the database; null: nobody
    Column("revision", BigInteger, nullable=False),
    Column("next_position", BigInteger, nullable=False),
    Column("reflection_aggregate", Double, nullable=False),
    Column("create_time_us", BigInteger, nullable=False),
    Column("update_time_us", BigInteger, nullable=False),
    Column("seed", LargeBinary, nullable=False),
    Column("labels", TEXT, nullable=False),
    Column("policy", TEXT, nullable=False),
    UniqueConstraint("namespace", "name", name="memories_name"),
    sqlite_autoincrement=True,
)
Index(
    "memories_owner",
    memories.c.owner,
    sqlite_where=text("owner IS NOT NULL"),
)

processes = Table(  # the servers of a PostgreSQL database; on SQLite the directory's lock is the lease
    "processes",
    metadata,
    Column("number", BIG_KEY, primary_key=True, autoincrement=True),
    Column("id", TEXT, nullable=False),  # pid and host, for people
    Column("address", TEXT, nullable=False),
    Column("lease_until_us", BigInteger, nullable=False),  # by the database's clock
    sqlite_autoincrement=True,
)

deletions = Table(  # memories that are gone, whose rows are being removed
    "deletions",
    metadata,
    Column("number", BIG_KEY, primary_key=True, autoincrement=False),
    Column("uid", TEXT, nullable=False),
)

producers = Table(
    "producers",
    metadata,
    Column("memory", BigInteger, primary_key=True, autoincrement=False),
    Column("name", TEXT, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("received", BigInteger, nullable=False),
    Column("stored", BigInteger, nullable=False),
)

receipts = Table(  # what was received, for telling repeats from conflicts; kept after it was stored
    "receipts",
    metadata,
    Column("memory", BigInteger, primary_key=True, autoincrement=False),
    Column("producer", TEXT, primary_key=True),
    Column("last_sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("first_sequence", BigInteger, nullable=False),
    Column("hashes", LargeBinary, nullable=False),  # 16 bytes each
    Column("rejections", LargeBinary),
    Column("outcomes", LargeBinary),  # written when the batch is stored, where they are to be kept
)

observations = Table(  # batches received, not yet stored
    "observations",
    metadata,
    Column("key", BIG_KEY, primary_key=True, autoincrement=False),
    Column("memory", BigInteger, nullable=False),
    Column("producer", TEXT, nullable=False),
    Column("first_sequence", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False),
)

fragments = Table(
    "fragments",
    metadata,
    Column("key", BIG_KEY, primary_key=True, autoincrement=False),
    Column("memory", BigInteger, nullable=False),
    Column("id", TEXT, nullable=False),
    Column("tier", TEXT, nullable=False),
    Column("kind", TEXT, nullable=False),
    Column("due_time_us", BigInteger),  # its own expiry, while that is to be acted on: null when forgotten or pinned
    Column("forget_time_us", BigInteger),
    Column("access_count", BigInteger, nullable=False),
    Column("access_time_us", BigInteger, nullable=False),
    Column("session", TEXT, nullable=False),
    Column("speaker", TEXT, nullable=False),
    Column("external_id", TEXT),
    Column("model", TEXT, nullable=False),  # as it was when the row was written; what holds is in `vectors`
    Column("payload", LargeBinary, nullable=False),
    Column("terms", LargeBinary),
)
Index("fragments_id", fragments.c.id, fragments.c.memory, unique=True)
Index(
    "fragments_external_id",
    fragments.c.memory,
    fragments.c.external_id,
    unique=True,
    sqlite_where=text("external_id IS NOT NULL"),
)
Index(
    "fragments_due",
    fragments.c.due_time_us,
    sqlite_where=text("due_time_us IS NOT NULL"),
)
Index(
    "fragments_forgotten",
    fragments.c.memory,
    fragments.c.forget_time_us,
    sqlite_where=text("forget_time_us IS NOT NULL"),
)

vectors = Table(
    "vectors",
    metadata,
    Column("key", BigInteger, primary_key=True, autoincrement=False),
    Column("model", TEXT, primary_key=True),
    Column("vector", LargeBinary, nullable=False),
)

anchors = Table(  # the short-term side of held fragments
    "anchors",
    metadata,
    Column("memory", BigInteger, primary_key=True, autoincrement=False),
    Column("id", TEXT, primary_key=True),
    Column("vector", LargeBinary),
    Column("enhancements", LargeBinary, nullable=False),
    Column("model", TEXT, nullable=False, server_default=""),  # the space of `vector`
    Column("next_model", TEXT),  # of the same content in another space
    Column("next_vector", LargeBinary),
)

events = Table(  # one row a revision
    "events",
    metadata,
    Column("key", BIG_KEY, primary_key=True, autoincrement=False),
    Column("time_us", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False),
)

outbox = Table(  # names the memory by uid: its rows outlive the memory
    "outbox",
    metadata,
    Column("id", BIG_KEY, primary_key=True, autoincrement=True),
    Column("memory", TEXT, nullable=False),
    Column("fragment", TEXT, nullable=False),
    Column("deleted", Boolean, nullable=False),
    sqlite_autoincrement=True,
)
Index("outbox_memory", outbox.c.memory)

requests = Table(
    "requests",
    metadata,
    Column("request", TEXT, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("time_us", BigInteger, nullable=False),
    Column("response", LargeBinary, nullable=False),
)
Index("requests_time", requests.c.time_us)

jobs = Table(
    "jobs",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("memory", BigInteger, nullable=False),
    Column("type", TEXT, nullable=False),
    Column("payload", TEXT, nullable=False),
    Column("create_time_us", BigInteger, nullable=False),
    Column("attempts", BigInteger, nullable=False),
)


def key(number: int, position: int) -> int:
    """The primary key of a memory's `position`. Raises ValueError for one that does not fit."""
    if not 0 <= position < 1 << POSITION_BITS:
        raise ValueError(f"position {position} is outside 0 .. 2^{POSITION_BITS} - 1")
    return number << POSITION_BITS | position


def span(number: int) -> tuple[int, int]:
    """The least and the greatest key of a memory."""
    return number << POSITION_BITS, (number + 1 << POSITION_BITS) - 1


def position(row_key: int) -> int:
    """The position (or revision) a key stands for."""
    return row_key & ((1 << POSITION_BITS) - 1)


conversations = Table(  # a message's or plan's key is the conversation's number and its own, as for fragments
    "conversations",
    metadata,
    Column("number", BIG_KEY, primary_key=True, autoincrement=True),
    Column("namespace", TEXT, nullable=False),
    Column("name", TEXT, nullable=False),
    Column("last_number", BigInteger, nullable=False),
    Column("completed", Boolean, nullable=False),
    Column("completions", BigInteger, nullable=False),
    Column("completed_number", BigInteger, nullable=False),
    Column("create_time_us", BigInteger, nullable=False),
    UniqueConstraint("namespace", "name", name="conversations_name"),
    sqlite_autoincrement=True,
)

messages = Table(
    "messages",
    metadata,
    Column("key", BIG_KEY, primary_key=True, autoincrement=False),
    Column("sender", TEXT, nullable=False),
    Column("receiver", TEXT, nullable=False),
    Column("current_goal", TEXT, nullable=False),
    Column("payload", LargeBinary, nullable=False),
)

plans = Table(
    "plans",
    metadata,
    Column("key", BIG_KEY, primary_key=True, autoincrement=False),
    Column("state", TEXT, nullable=False),
    Column("payload", LargeBinary, nullable=False),
)

operations = Table(
    "operations",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("type", TEXT, nullable=False),
    Column("namespace", TEXT, nullable=False),
    Column("memory", TEXT, nullable=False),
    Column("payload", TEXT, nullable=False),
    Column("state", TEXT, nullable=False),
    Column("done", BigInteger, nullable=False),
    Column("total", BigInteger, nullable=False),
    Column("unit", TEXT, nullable=False),
    Column("create_time_us", BigInteger, nullable=False),
    Column("end_time_us", BigInteger, nullable=False),
    Column("error", TEXT),
    Column("cancel_asked", Boolean, nullable=False),
    Column("process", BigInteger),
)
