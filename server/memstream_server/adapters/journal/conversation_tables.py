"""The tables of conversations.

A message's and a plan's key is the conversation's number and its own in one integer, as a fragment's is (schema.py).
Only what a query selects by is a column beside the payload.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, LargeBinary, Table, UniqueConstraint

from memstream_server.adapters.journal.schema import BIG_KEY, TEXT, metadata

conversations = Table(
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
