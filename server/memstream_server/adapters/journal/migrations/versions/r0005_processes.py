"""Several servers on one database: their leases, and the owner of each memory."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

BIG_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "processes",
        sa.Column("number", BIG_KEY, primary_key=True, autoincrement=True),
        sa.Column("id", TEXT, nullable=False),
        sa.Column("address", TEXT, nullable=False),
        sa.Column("lease_until_us", sa.BigInteger(), nullable=False),
        sqlite_autoincrement=True,
    )
    op.add_column("memories", sa.Column("owner", sa.BigInteger()))
    owned = sa.text("owner IS NOT NULL")
    op.create_index("memories_owner", "memories", ["owner"], sqlite_where=owned, postgresql_where=owned)
