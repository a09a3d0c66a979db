"""Large bodies in parts, and how often a conversation's messages were replaced or deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"

IN_PARTS = "parts IS NOT NULL"


def upgrade() -> None:
    op.add_column("conversations", sa.Column("changes", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("message_bodies", sa.Column("parts", sa.BigInteger()))
    op.create_index(
        "message_bodies_parts",
        "message_bodies",
        ["parts"],
        sqlite_where=sa.text(IN_PARTS),
        postgresql_where=sa.text(IN_PARTS),
    )
