"""Bytes of each namespace: a table that triggers keep. Migration 0018 makes them, and has the rows counted."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("deletions", sa.Column("namespace", TEXT, nullable=False, server_default=""))
    op.create_table(
        "namespace_bytes",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("shard", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("fragments", sa.BigInteger(), nullable=False),
        sa.Column("history", sa.BigInteger(), nullable=False),
        sa.Column("receipts", sa.BigInteger(), nullable=False),
        sa.Column("conversations", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
    )
