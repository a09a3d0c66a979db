"""Bodies of messages, their client ids, and how many messages each conversation has."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
BIG_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_COUNT = sa.text(
    "UPDATE conversations SET message_count = (SELECT count(*) FROM messages"
    " WHERE key BETWEEN conversations.number * 4294967296 AND conversations.number * 4294967296 + 4294967295)"
)


def upgrade() -> None:
    for name in ("message_time_us", "message_count"):
        op.add_column("conversations", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("messages", sa.Column("conversation", sa.BigInteger()))
    op.add_column("messages", sa.Column("client_id", TEXT))
    op.create_index(
        "messages_client_id",
        "messages",
        ["conversation", "client_id"],
        unique=True,
        sqlite_where=sa.text("client_id IS NOT NULL"),
        postgresql_where=sa.text("client_id IS NOT NULL"),
    )
    op.create_table(
        "message_bodies",
        sa.Column("key", BIG_KEY, primary_key=True, autoincrement=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
    )
    op.get_bind().execute(_COUNT)
