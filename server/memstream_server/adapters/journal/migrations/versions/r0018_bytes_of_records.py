"""Bytes of each namespace: also those of memories, producers, operations, conflicts and conversations.

The triggers are removed: migration 0021 makes them again. All rows are counted again: slice by slice after the
migrations, in transactions of their own, because a read of all rows takes long (byte_counts.py).
"""

import json

import sqlalchemy as sa
from alembic import op

from memstream_server.adapters.journal.sql.byte_counts import COUNTED, UNCOUNTED, list_removals

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    connection = op.get_bind()
    for statement in list_removals(connection.dialect.name):
        connection.exec_driver_sql(statement)
    op.add_column("namespace_bytes", sa.Column("memories", sa.BigInteger(), nullable=False, server_default="0"))
    connection.exec_driver_sql("DELETE FROM namespace_bytes")
    mark = {"name": UNCOUNTED, "value": json.dumps([next(iter(COUNTED)), None])}
    connection.execute(sa.text("INSERT INTO meta (name, value) VALUES (:name, :value)"), mark)
