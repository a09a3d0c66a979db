"""Operations: long-running work that continues after a restart."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "operations",
        sa.Column("id", TEXT, primary_key=True),
        sa.Column("type", TEXT, nullable=False),
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("memory", TEXT, nullable=False),
        sa.Column("payload", TEXT, nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("done", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("unit", TEXT, nullable=False),
        sa.Column("create_time_us", sa.BigInteger(), nullable=False),
        sa.Column("end_time_us", sa.BigInteger(), nullable=False),
        sa.Column("error", TEXT),
        sa.Column("cancel_asked", sa.Boolean(), nullable=False),
    )
