"""Conversations: their messages and plans."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

BIG_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "conversations",
        sa.Column("number", BIG_KEY, primary_key=True, autoincrement=True),
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("last_number", sa.BigInteger(), nullable=False),
        sa.Column("completed", sa.Boolean(), nullable=False),
        sa.Column("completions", sa.BigInteger(), nullable=False),
        sa.Column("completed_number", sa.BigInteger(), nullable=False),
        sa.Column("create_time_us", sa.BigInteger(), nullable=False),
        sa.UniqueConstraint("namespace", "name", name="conversations_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "messages",
        sa.Column("key", BIG_KEY, primary_key=True, autoincrement=False),
        sa.Column("sender", TEXT, nullable=False),
        sa.Column("receiver", TEXT, nullable=False),
        sa.Column("current_goal", TEXT, nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "plans",
        sa.Column("key", BIG_KEY, primary_key=True, autoincrement=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
    )
