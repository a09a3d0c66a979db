"""Labels and times of conversations, and state documents.

The triggers that count bytes are removed: migration 0021 makes them again.
"""

import sqlalchemy as sa
from alembic import op

from memstream_server.adapters.journal.sql.byte_counts import list_removals

revision = "0020"
down_revision = "0019"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    connection = op.get_bind()
    for statement in list_removals(connection.dialect.name):
        connection.exec_driver_sql(statement)
    op.add_column("conversations", sa.Column("labels", TEXT, nullable=False, server_default=""))
    op.add_column("conversations", sa.Column("ttl_us", sa.BigInteger()))
    op.add_column("conversations", sa.Column("update_time_us", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("conversations", sa.Column("expire_time_us", sa.BigInteger()))
    op.execute("UPDATE conversations SET update_time_us = create_time_us")
    op.create_index("conversations_latest", "conversations", ["namespace", "update_time_us", "number"])
    op.create_index(
        "conversations_expire",
        "conversations",
        ["expire_time_us"],
        sqlite_where=sa.text("expire_time_us IS NOT NULL"),
        postgresql_where=sa.text("expire_time_us IS NOT NULL"),
    )
    op.create_table(
        "conversation_labels",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("label", sa.LargeBinary(), primary_key=True),
        sa.Column("conversation", sa.BigInteger(), primary_key=True, autoincrement=False),
    )
    op.create_index("conversation_labels_conversation", "conversation_labels", ["conversation"])
    op.create_table(
        "states",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("scope", TEXT, primary_key=True),
        sa.Column("name", TEXT, primary_key=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("update_time_us", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
    )
