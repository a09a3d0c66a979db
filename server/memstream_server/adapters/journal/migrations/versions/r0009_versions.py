"""Versions: what a fragment said before it was changed."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "versions",
        sa.Column("key", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("replaced", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("time_us", sa.BigInteger(), nullable=False),
        sa.Column("event", TEXT, nullable=False),
        sa.Column("principal", TEXT, nullable=False),
        sa.Column("model", TEXT, nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("terms", sa.LargeBinary()),
        sa.Column("vector", sa.LargeBinary()),
    )
