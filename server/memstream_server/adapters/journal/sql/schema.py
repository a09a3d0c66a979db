"""The journal's tables, and the integer key that keeps the rows of one memory together.

`key` = memory number << 32 | position (or revision, in the event log). As the primary key it is SQLite's rowid: all
rows of a memory lie in one run of pages even if its writes alternate with those of other memories, and a memory is a
range of keys. Numbers are never reused, so rows of a deleted memory cannot appear in another.

Only values that a query selects by are columns; the rest of a fragment is in its payload (codec.py). Access statistics
are the exception: they change without a new payload, and their columns take precedence.

Index conditions are declared for SQLite only: declaring PostgreSQL's, which are the same, would import its dialect at
every start. `create_tables` (migrate.py) copies them where it creates the tables on PostgreSQL.
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
BIG_KEY = BigInteger().with_variant(Integer(), "sqlite")  # in SQLite only INTEGER is an alias of the rowid
TEXT = Text().with_variant(Text(collation="C"), "postgresql")  # sorts by bytes, as SQLite does

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
    Column("owner", BigInteger),  # number of the process that owns the memory, on a shared database; null: none
    Column("revision", BigInteger, nullable=False),
    Column("next_position", BigInteger, nullable=False),
    Column("reflection_aggregate", Double, nullable=False),
    Column("create_time_us", BigInteger, nullable=False),
    Column("update_time_us", BigInteger, nullable=False),
    Column("seed", LargeBinary, nullable=False),
    Column("labels", TEXT, nullable=False),
    Column("policy", TEXT, nullable=False),
    Column("fragments", BigInteger, nullable=False, server_default="0"),  # those that are not forgotten
    Column("change_time_us", BigInteger, nullable=False, server_default="0"),  # time of the last commit
    Column("block_version", BigInteger, nullable=False, server_default="0"),  # the last one given to a block
    UniqueConstraint("namespace", "name", name="memories_name"),
    sqlite_autoincrement=True,
)
Index("memories_owner", memories.c.owner, sqlite_where=text("owner IS NOT NULL"))

memory_labels = Table(  # to find memories by label; `memories` has the labels themselves, in one text
    "memory_labels",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("label", LargeBinary, primary_key=True),  # a hash of the pair: a pair may be longer than an index allows
    Column("name", TEXT, primary_key=True),
    Column("memory", BigInteger, nullable=False),
)
Index("memory_labels_memory", memory_labels.c.memory)

processes = Table(  # the servers of a PostgreSQL database; on SQLite the directory's lock replaces leases
    "processes",
    metadata,
    Column("number", BIG_KEY, primary_key=True, autoincrement=True),
    Column("id", TEXT, nullable=False),  # pid and host, for display
    Column("address", TEXT, nullable=False),
    Column("lease_until_us", BigInteger, nullable=False),  # by the database's clock
    sqlite_autoincrement=True,
)

deletions = Table(  # deleted memories whose rows are not all removed yet
    "deletions",
    metadata,
    Column("number", BIG_KEY, primary_key=True, autoincrement=False),
    Column("uid", TEXT, nullable=False),
    Column("namespace", TEXT, nullable=False, server_default=""),  # under which its bytes count (byte_counts.py)
)

namespace_bytes = Table(  # counted by triggers (byte_counts.py); the sum over the shards is the count
    "namespace_bytes",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("shard", BigInteger, primary_key=True, autoincrement=False),
    *(
        Column(kind, BigInteger, nullable=False)
        for kind in ("fragments", "history", "receipts", "conversations", "requests")
    ),
    Column("memories", BigInteger, nullable=False, server_default="0"),
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

receipts = Table(  # hashes of received batches, to tell repeats from conflicts; kept after the batch is stored
    "receipts",
    metadata,
    Column("memory", BigInteger, primary_key=True, autoincrement=False),
    Column("producer", TEXT, primary_key=True),
    Column("last_sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("first_sequence", BigInteger, nullable=False),
    Column("hashes", LargeBinary, nullable=False),  # 16 bytes each
    Column("rejections", LargeBinary),
    Column("outcomes", LargeBinary),  # written when the batch is stored, if the receipt asks for it
)

observations = Table(  # batches that are received and not yet stored
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
    Column("due_time_us", BigInteger),  # expiry time; null if forgotten or pinned
    Column("forget_time_us", BigInteger),
    Column("access_count", BigInteger, nullable=False),
    Column("access_time_us", BigInteger, nullable=False),
    Column("session", TEXT, nullable=False),
    Column("speaker", TEXT, nullable=False),
    Column("external_id", TEXT),
    # At the time of the write; `vectors` has the present one. Empty if the model of a space refused the text.
    Column("model", TEXT, nullable=False),
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
Index("fragments_due", fragments.c.due_time_us, sqlite_where=text("due_time_us IS NOT NULL"))
Index(
    "fragments_forgotten",
    fragments.c.memory,
    fragments.c.forget_time_us,
    sqlite_where=text("forget_time_us IS NOT NULL"),
)
Index(  # what an image does not have, without a read of all rows
    "fragments_accessed",
    fragments.c.key,
    fragments.c.access_time_us,
    fragments.c.access_count,  # SQLite reads it for the condition
    sqlite_where=text("access_count > 0"),
)

Index(  # fragments that may lack a vector: those that were written without one
    "fragments_unvectored", fragments.c.memory, fragments.c.key, sqlite_where=text("model = ''")
)

vectors = Table(
    "vectors",
    metadata,
    Column("key", BigInteger, primary_key=True, autoincrement=False),
    Column("model", TEXT, primary_key=True),
    Column("vector", LargeBinary, nullable=False),
)

versions = Table(  # what a fragment said before the commit that made revision `replaced`
    "versions",
    metadata,
    Column("key", BigInteger, primary_key=True, autoincrement=False),
    Column("replaced", BigInteger, primary_key=True, autoincrement=False),
    Column("time_us", BigInteger, nullable=False),
    Column("event", TEXT, nullable=False),
    Column("principal", TEXT, nullable=False),
    Column("model", TEXT, nullable=False),  # the space of `vector`; empty without a vector
    Column("payload", LargeBinary, nullable=False),
    Column("terms", LargeBinary),
    Column("vector", LargeBinary),
)

anchors = Table(  # short-term data of held fragments
    "anchors",
    metadata,
    Column("memory", BigInteger, primary_key=True, autoincrement=False),
    Column("id", TEXT, primary_key=True),
    Column("vector", LargeBinary),
    Column("enhancements", LargeBinary, nullable=False),
    Column("model", TEXT, nullable=False, server_default=""),  # the space of `vector`
    Column("next_model", TEXT),  # the space of `next_vector`, for the same content
    Column("next_vector", LargeBinary),
)

events = Table(  # one row per revision
    "events",
    metadata,
    Column("key", BIG_KEY, primary_key=True, autoincrement=False),
    Column("time_us", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False),
)

event_fragments = Table(  # to find the events of a fragment: the revisions of the log that name it
    "event_fragments",
    metadata,
    Column("memory", BigInteger, primary_key=True, autoincrement=False),
    Column("fragment", TEXT, primary_key=True),
    Column("revision", BigInteger, primary_key=True, autoincrement=False),
    sqlite_with_rowid=False,
)

recall_receipts = Table(  # the key has the revision of the commit that wrote the receipt
    "recall_receipts",
    metadata,
    Column("key", BIG_KEY, primary_key=True, autoincrement=False),
    Column("id", TEXT, nullable=False),
    Column("time_us", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False),
)

blocks = Table(  # all kept versions; the key has the version, which no two writes to the memory's blocks share
    "blocks",
    metadata,
    Column("key", BIG_KEY, primary_key=True, autoincrement=False),
    Column("memory", BigInteger, nullable=False),
    Column("name", TEXT, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("sources", TEXT),  # ids of the fragments that the text was made of, with spaces between them
)
Index("blocks_name", blocks.c.memory, blocks.c.name, blocks.c.key)
Index("blocks_sources", blocks.c.memory, blocks.c.key, sqlite_where=text("sources IS NOT NULL"))

standing_blocks = Table(  # those that keep themselves; `blocks` has their questions
    "standing_blocks",
    metadata,
    Column("memory", BigInteger, primary_key=True, autoincrement=False),
    Column("name", TEXT, primary_key=True),
    Column("revision", BigInteger, nullable=False),  # of the memory, at which the text held; -1: not known to hold
    Column("rest_us", BigInteger, nullable=False),
    Column("look_us", BigInteger),
    Column("problem", TEXT, nullable=False),
)

standing_memories = Table(  # those that questions with scopes name; without `uid` there is none
    "standing_memories",
    metadata,
    Column("memory", BigInteger, primary_key=True, autoincrement=False),  # of the block
    Column("block", TEXT, primary_key=True),
    Column("namespace", TEXT, primary_key=True),
    Column("name", TEXT, primary_key=True),
    Column("uid", TEXT, nullable=False),
    Column("revision", BigInteger, nullable=False),
)

block_sources = Table(  # other memories that a version was made of
    "block_sources",
    metadata,
    Column("key", BigInteger, primary_key=True, autoincrement=False),  # of the version
    Column("source", BigInteger, primary_key=True, autoincrement=False),
)
Index("block_sources_source", block_sources.c.source, block_sources.c.key)

outbox = Table(  # identifies the memory by uid, because its rows outlive the memory
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

conflicts = Table(  # suspicions, kept after they are decided
    "conflicts",
    metadata,
    Column("memory", BigInteger, primary_key=True, autoincrement=False),
    Column("newer", TEXT, primary_key=True),
    Column("older", TEXT, primary_key=True),
    Column("reason", TEXT, nullable=False),
    Column("time_us", BigInteger, nullable=False),
    Column("decision", TEXT, nullable=False),  # empty while open
    Column("note", TEXT, nullable=False),
    Column("decide_time_us", BigInteger),
)
Index("conflicts_older", conflicts.c.memory, conflicts.c.older)

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
Index("jobs_memory", jobs.c.memory)
Index("jobs_oldest", jobs.c.create_time_us, jobs.c.id)

KEYED_TABLES = (vectors, versions, observations, events, recall_receipts, blocks, block_sources, fragments)
"""Tables with rows of a memory, by `key`."""
NUMBERED_TABLES = (
    *(producers, receipts, anchors, jobs, conflicts),
    *(memory_labels, event_fragments, standing_blocks, standing_memories),
)
"""Tables with rows of a memory, by its number in `memory`. Deletion and `memstream verify` read both tuples."""


def row_key(number: int, position: int) -> int:
    """The primary key of a memory's `position`. Raises ValueError if it is out of range."""
    if not 0 <= position < 1 << POSITION_BITS:
        raise ValueError(f"position {position} is outside 0 .. 2^{POSITION_BITS} - 1")
    return number << POSITION_BITS | position


def key_range(number: int) -> tuple[int, int]:
    """The least and the greatest key of a memory."""
    return number << POSITION_BITS, (number + 1 << POSITION_BITS) - 1


def key_position(row_key: int) -> int:
    """The position (or revision) in a key."""
    return row_key & ((1 << POSITION_BITS) - 1)


conversations = Table(  # keys of messages and plans combine the conversation's number and their own, as above
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
    Column("message_time_us", BigInteger, nullable=False, server_default="0"),  # of the last message ever appended
    Column("message_count", BigInteger, nullable=False, server_default="0"),
    Column("labels", TEXT, nullable=False, server_default=""),
    Column("ttl_us", BigInteger),
    Column("update_time_us", BigInteger, nullable=False, server_default="0"),
    Column("expire_time_us", BigInteger),
    Column("feed_memory", TEXT, nullable=False, server_default=""),
    Column("fed_number", BigInteger, nullable=False, server_default="0"),  # of the last message it was fed with
    Column("changes", BigInteger, nullable=False, server_default="0"),  # how often messages were replaced or deleted
    UniqueConstraint("namespace", "name", name="conversations_name"),
    sqlite_autoincrement=True,
)
Index("conversations_latest", conversations.c.namespace, conversations.c.update_time_us, conversations.c.number)
Index("conversations_expire", conversations.c.expire_time_us, sqlite_where=text("expire_time_us IS NOT NULL"))
FEED_DUE = text("feed_memory <> '' AND fed_number < last_number")
Index("conversations_feeding", conversations.c.number, sqlite_where=FEED_DUE)

conversation_labels = Table(  # to find conversations by label, as memory_labels
    "conversation_labels",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("label", LargeBinary, primary_key=True),
    Column("conversation", BigInteger, primary_key=True, autoincrement=False),
)
Index("conversation_labels_conversation", conversation_labels.c.conversation)

states = Table(
    "states",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("scope", TEXT, primary_key=True),
    Column("name", TEXT, primary_key=True),  # of a session: that of its conversation
    Column("version", BigInteger, nullable=False),
    Column("update_time_us", BigInteger, nullable=False),
    Column("document", LargeBinary, nullable=False),
    Column("parts", BigInteger),  # the hidden conversation whose bodies are its parts (`document` is empty)
)
Index("states_parts", states.c.parts, sqlite_where=text("parts IS NOT NULL"))

messages = Table(
    "messages",
    metadata,
    Column("key", BIG_KEY, primary_key=True, autoincrement=False),
    Column("sender", TEXT, nullable=False),
    Column("receiver", TEXT, nullable=False),
    Column("current_goal", TEXT, nullable=False),
    Column("payload", LargeBinary, nullable=False),  # with the body, if that is small
    Column("conversation", BigInteger),  # null without a client id
    Column("client_id", TEXT),
)
Index(
    "messages_client_id",
    messages.c.conversation,
    messages.c.client_id,
    unique=True,
    sqlite_where=text("client_id IS NOT NULL"),
)

message_bodies = Table(  # large bodies: a list that needs none reads no page of them
    "message_bodies",
    metadata,
    Column("key", BIG_KEY, primary_key=True, autoincrement=False),
    Column("body", LargeBinary, nullable=False),
    Column("parts", BigInteger),  # the hidden conversation whose bodies are the parts of this one (`body` is empty)
)
Index("message_bodies_parts", message_bodies.c.parts, sqlite_where=text("parts IS NOT NULL"))

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
Index("operations_namespace", operations.c.namespace, operations.c.id)
Index("operations_memory", operations.c.namespace, operations.c.memory, operations.c.id)
Index("operations_end", operations.c.end_time_us)  # 0 while unfinished
