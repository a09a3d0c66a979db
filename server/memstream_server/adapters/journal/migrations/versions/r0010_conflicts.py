"""Suspicions: pairs of fragments that may not be true together, open or decided."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "conflicts",
        sa.Column("memory", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("newer", TEXT, primary_key=True),
        sa.Column("older", TEXT, primary_key=True),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("time_us", sa.BigInteger(), nullable=False),
        sa.Column("decision", TEXT, nullable=False),
        sa.Column("note", TEXT, nullable=False),
        sa.Column("decide_time_us", sa.BigInteger()),
    )
    op.create_index("conflicts_older", "conflicts", ["memory", "older"])
