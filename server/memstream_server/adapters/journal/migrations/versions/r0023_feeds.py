"""The memory that a conversation feeds, and how far."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
DUE = "feed_memory <> '' AND fed_number < last_number"


def upgrade() -> None:
    op.add_column("conversations", sa.Column("feed_memory", TEXT, nullable=False, server_default=""))
    op.add_column("conversations", sa.Column("fed_number", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index(
        "conversations_feeding", "conversations", ["number"], sqlite_where=sa.text(DUE), postgresql_where=sa.text(DUE)
    )
