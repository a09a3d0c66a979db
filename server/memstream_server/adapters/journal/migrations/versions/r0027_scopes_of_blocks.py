"""Questions of blocks over several memories: the memories that are asked, and those that versions were made of."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "standing_memories",
        sa.Column("memory", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("block", TEXT, primary_key=True),
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("name", TEXT, primary_key=True),
        sa.Column("uid", TEXT, nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "block_sources",
        sa.Column("key", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("source", sa.BigInteger(), primary_key=True, autoincrement=False),
    )
    op.create_index("block_sources_source", "block_sources", ["source", "key"])
