"""Blocks of memories. The triggers that count bytes are made again."""

import sqlalchemy as sa
from alembic import op

from memstream_server.adapters.journal.sql.byte_counts import list_removals, list_triggers

revision = "0021"
down_revision = "0020"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
BIG_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    connection = op.get_bind()
    for statement in list_removals(connection.dialect.name):
        connection.exec_driver_sql(statement)
    op.add_column("memories", sa.Column("block_version", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_table(
        "blocks",
        sa.Column("key", BIG_KEY, primary_key=True, autoincrement=False),
        sa.Column("memory", sa.BigInteger(), nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
    )
    op.create_index("blocks_name", "blocks", ["memory", "name", "key"])
    for statement in list_triggers(connection.dialect.name):
        connection.exec_driver_sql(statement)
