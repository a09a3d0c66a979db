"""Blocks that keep themselves."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
WITH_SOURCES = "sources IS NOT NULL"


def upgrade() -> None:
    op.add_column("blocks", sa.Column("sources", TEXT))
    op.create_index(
        "blocks_sources",
        "blocks",
        ["memory", "key"],
        sqlite_where=sa.text(WITH_SOURCES),
        postgresql_where=sa.text(WITH_SOURCES),
    )
    op.create_table(
        "standing_blocks",
        sa.Column("memory", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("name", TEXT, primary_key=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("rest_us", sa.BigInteger(), nullable=False),
        sa.Column("look_us", sa.BigInteger()),
        sa.Column("problem", TEXT, nullable=False),
    )
